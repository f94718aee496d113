"""Fine-tune a model: `python examples/run_sft.py --config examples/configs/sft.yaml key=value`.

The same as `laurel sft`, in the form that users of NeMo RL type. Without --config it reads
examples/configs/sft.yaml.
"""

import sys
from pathlib import Path

from laurel.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(a.split("=")[0] in ("--config", "-c", "--help") for a in arguments):
        arguments = ["--config", str(Path(__file__).parent / "configs" / "sft.yaml"), *arguments]
    sys.argv = ["laurel", "sft", *arguments]
    main()
