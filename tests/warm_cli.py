"""`laurel` in one process after another, forked from this one, which has loaded torch already.

Each line of its input is `{"arguments": [...], "stdout": FILE, "stderr": FILE}`, each line of its
output the exit status. Tests with many short processes save seconds each.
"""

import importlib
import json
import os
import sys
import traceback

from laurel.cli.main import main as laurel

HEAVY = (
    "transformers.models.qwen3.modeling_qwen3",
    "laurel.grpo.loop",
    "laurel.training.reward_model",
    "laurel.generation.transformers.engine",
    "laurel.models.loading.reward_model",
    "laurel.models.loading.policy",
    "laurel.rewards.scorer",
)


def run(job):
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    sys.argv = ["laurel", *job["arguments"]]
    end_with(laurel)


def end_with(work):
    """End this process as a program ends that does this."""
    status = 0
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    for module in HEAVY:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
