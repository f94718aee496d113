"""The known solutions of HumanEval pass in split execution; and programs that only seem right do
not.

LAUREL_DATA names a directory with `humaneval/HumanEval.jsonl.gz`.
"""

import gzip
import json
import os
from pathlib import Path

import pytest

from laurel.sandbox.detection import detect
from laurel.sandbox.jobs import Limits, SandboxJob, Status
from laurel.sandbox.pool import SandboxPool

DATA = Path(os.environ.get("LAUREL_DATA", "")) / "humaneval" / "HumanEval.jsonl.gz"
ALWAYS_EQUAL = """
class Same:
    def __eq__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
    def __len__(self): return 0
    def __iter__(self): return iter(())
    __hash__ = None
def {entry}(*args, **kwargs): return Same()
"""
CHEATS = {
    "an object equal to everything": ALWAYS_EQUAL,
    "an early end with success": "import os\nos._exit(0)",
    "an end with success in the call": "def {entry}(*args, **kwargs): raise SystemExit(0)",
    "nothing": "def {entry}(*args, **kwargs): pass",
}


@pytest.fixture(scope="module")
def tasks():
    if not DATA.is_file():
        pytest.skip(f"LAUREL_DATA holds no {DATA.name}")
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def pool():
    found = detect()
    if found.tier is None:
        pytest.skip(found.sentence())
    with SandboxPool(tier=found.tier, num_workers=2) as pool:
        yield pool


def job_of(task, code):
    return SandboxJob(
        id=task["task_id"],
        code=code,
        mode="tests",
        entry=task["entry_point"],
        test_setup=task["prompt"],
        test_code=f"{task['test']}\ncheck({task['entry_point']})\n",
        limits=Limits(cpu_s=10, wall_s=120),
    )


@pytest.mark.slow
def test_known_solutions_pass(tasks, pool):
    assert len(tasks) == 164
    some = tasks[::3]
    results = pool.run([job_of(one, one["prompt"] + one["canonical_solution"]) for one in some])
    assert {one.id: one for one in results if one.status is not Status.OK} == {}


@pytest.mark.slow_parameters(
    "an early end with success", "an end with success in the call", "nothing"
)
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not(tasks, pool, name):
    results = pool.run(
        [job_of(one, CHEATS[name].replace("{entry}", one["entry_point"])) for one in tasks[::8]]
    )
    assert [one.id for one in results if one.status is Status.OK] == []
    assert [one.reason for one in results if not one.status.is_verdict] == []
