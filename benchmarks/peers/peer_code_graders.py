"""Verdicts of the graders of APPS, TACO, LiveCodeBench and verl, from checkouts of theirs.

    python benchmarks/peers/peer_code_graders.py CHECKOUTS < questions > verdicts

CHECKOUTS has a directory `apps`, `TACO`, `LiveCodeBench` and `verl`, each a checkout of that
repository; numpy has to be installed. A question is a line of JSON: the `benchmark`, a `row` in its
format, and a `program`. A verdict is a line that says true or false. A program runs in a fork and
an empty directory, as the graders run it: without a sandbox. Give it only programs that you trust.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import shutil
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PATHS = {
    "apps": "apps/eval/testing_util.py",
    "taco": "TACO/metrics/testing_util.py",
    "livecodebench": "LiveCodeBench/lcb_runner/evaluation/testing_util.py",
    "verl": "verl/verl/utils/reward_score/prime_code/__init__.py",
}
"""Where each is, below the checkouts."""


def stand_in_for_pyext(name: str) -> None:
    """Three of them make modules of texts with pyext, which no Python since 3.11 can import."""

    class RuntimeModule:
        @staticmethod
        def from_string(module_name: str, doc: str, source: str) -> types.ModuleType:
            names: dict[str, Any] = {}
            # What is switched on in this file is not for the program.
            exec(compile(source, module_name, "exec", dont_inherit=True), names)
            module = types.ModuleType(module_name, doc)
            module.__dict__.update(
                {key: one for key, one in names.items() if key != "__builtins__"}
            )
            return module

    module = types.ModuleType(name)
    module.RuntimeModule = RuntimeModule  # type: ignore[attr-defined]
    sys.modules[name] = module


def loaded(benchmark: str, checkouts: Path) -> types.ModuleType:
    """The module of a grader."""
    path = checkouts / PATHS[benchmark]
    package = path.parent.name
    if benchmark == "taco":
        stand_in_for_pyext(f"{package}.pyext2")
        name, root = f"{package}.{path.stem}", path.parent.parent
    elif benchmark == "verl":
        name, root = package, path.parent.parent
    else:
        name, root = path.stem, path.parent
    sys.modules.pop(name, None)
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(root))


def apps(module: Any, row: Mapping[str, Any], program: str) -> bool:
    problem = {"input_output": json.loads(row["input_output"])}
    return all_right(module.run_test(problem=problem, test=program))


def taco(module: Any, row: Mapping[str, Any], program: str) -> bool:
    return all_right(module.run_test({"input_output": row["input_output"]}, test=program))


def livecodebench(module: Any, row: Mapping[str, Any], program: str) -> bool:
    sys.set_int_max_str_digits(50_000)  # as the module that calls this grader does
    packed = zlib.decompress(base64.b64decode(row["private_test_cases"]))
    cases = json.loads(row["public_test_cases"]) + json.loads(pickle.loads(packed))
    tests = {
        "inputs": [one["input"] for one in cases],
        "outputs": [one["output"] for one in cases],
        "fn_name": json.loads(row["metadata"]).get("func_name"),
    }
    results, _ = module.run_test({"input_output": json.dumps(tests)}, test=program)
    return all_right(results)


def verl(module: Any, row: Mapping[str, Any], program: str) -> bool:
    truth = row["reward_model"]["ground_truth"]
    score = module.compute_score(f"```python\n{program}\n```", truth, continuous=True)
    return float(score[0]) == 1.0


GRADERS: Mapping[str, Callable[[Any, Mapping[str, Any], str], bool]] = {
    "apps": apps,
    "taco": taco,
    "livecodebench": livecodebench,
    "verl": verl,
}


def all_right(results: Any) -> bool:
    """Whether a grader found every test passed: it says True, False, or how it went wrong."""
    return bool(results) and all(one is True or bool(one > 0) for one in results)


def in_a_fork(grade: Callable[[], bool]) -> bool:
    """What a grader says, which spoils the process that it is in; an exception is a no."""
    reading, writing = os.pipe()
    directory = tempfile.mkdtemp()
    pid = os.fork()
    if pid == 0:
        end = os._exit
        try:
            os.chdir(directory)
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            with contextlib.redirect_stdout(sys.stderr):
                said = grade()
            os.write(writing, b"1" if said else b"0")
        except BaseException:
            os.write(writing, b"0")
        finally:
            end(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    shutil.rmtree(directory, ignore_errors=True)
    if answer not in (b"0", b"1"):
        raise SystemExit("a grader ended without a verdict")
    return answer == b"1"


def main() -> None:
    checkouts = Path(sys.argv[1]).resolve()
    # TACO's starts `python`.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    stand_in_for_pyext("pyext")
    modules = {name: loaded(name, checkouts) for name in GRADERS}
    for line in sys.stdin:
        one = json.loads(line)
        module, grader = modules[one["benchmark"]], GRADERS[one["benchmark"]]
        said = in_a_fork(
            lambda module=module, grader=grader, one=one: grader(module, one["row"], one["program"])
        )
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
