"""Train a policy against a reward model.

`python examples/run_grpo_rm.py --config examples/configs/grpo_rm_1B.yaml key=value`

The same as `laurel grpo`, in the form that users of NeMo RL type. Without --config it reads
examples/configs/grpo_rm_1B.yaml.
"""

import sys
from pathlib import Path

from laurel.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(a.split("=")[0] in ("--config", "-c", "--help") for a in arguments):
        default = Path(__file__).parent / "configs" / "grpo_rm_1B.yaml"
        arguments = ["--config", str(default), *arguments]
    sys.argv = ["laurel", "grpo", *arguments]
    main()
