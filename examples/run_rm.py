"""Train a reward model: `python examples/run_rm.py --config examples/configs/rm.yaml key=value`.

The same as `laurel rm`, in the form that users of NeMo RL type. Without --config it reads
examples/configs/rm.yaml.
"""

import sys
from pathlib import Path

from laurel.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(a.split("=")[0] in ("--config", "-c", "--help") for a in arguments):
        arguments = ["--config", str(Path(__file__).parent / "configs" / "rm.yaml"), *arguments]
    sys.argv = ["laurel", "rm", *arguments]
    main()
