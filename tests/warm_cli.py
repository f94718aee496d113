"""`python` in one process after another, forked from this one, which has loaded torch already.

Each line of its input is `{"arguments": [...], "folder": ..., "environment": {...}, "stdout": FILE,
"stderr": FILE}`, with the arguments of `python`: `-m MODULE`, `-c TEXT` or a script, and those of
the program. Each is answered by two lines: the process's number, and at its end its exit status.
"""

import gc
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import traceback
import types

HEAVY = (
    "laurel.cli.main",
    "transformers.models.qwen3.modeling_qwen3",
    "laurel.grpo.loop",
    "laurel.training.reward_model",
    "laurel.training.sft",
    "laurel.generation.transformers.engine",
    "laurel.models.loading.reward_model",
    "laurel.models.loading.policy",
    "laurel.rewards.scorer",
    "torch.utils.tensorboard",
    *(["pandas"] if importlib.util.find_spec("pandas") else []),  # pyarrow imports it then
)


def load(modules):
    """Import them for all forks, whose garbage collectors leave their objects out."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()


def open_files(job):
    """Read and write those of a job."""
    for descriptor, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
        flags = os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(name, flags), descriptor)


def run(job):
    """Do what `python` does with such arguments; this process then ends as that one would."""
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    _heed_environment()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in path if folder and folder not in sys.path]
    kind, *arguments = job["arguments"]
    sys.path[0] = "" if kind in ("-m", "-c") else os.path.dirname(os.path.abspath(kind))
    if kind == "-m":
        sys.argv = arguments
        sys.modules.pop(arguments[0], None)  # it is run again, as `__main__`
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


def _heed_environment():
    """Do what modules that are there already would do as they are imported."""
    tempfile.tempdir = None  # looked for when it is first asked for
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None:
        dynamo.disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"


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
    load(HEAVY)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            job = json.loads(line)
            open_files(job)
            run(job)
            return
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
