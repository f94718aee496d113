"""Real programs get the verdicts that they are known to deserve; a sample of each kind.

LAUREL_DATA names the directory with the data. `benchmarks/code_verdicts.py` judges all of them.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import code_verdicts

from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.jobs import Limits
from laurel.extensions.code.sandbox.pool import SandboxPool

SAMPLE = 60
OBJECTS = ("MBPP/367", "MBPP/601", "MBPP/927")
"""Tasks whose tests make objects of the program's classes."""
QUICK = Limits(cpu_s=3, wall_s=120)


@pytest.fixture(scope="module")
def pool():
    found = detect()
    if found.tier is None:
        pytest.skip(found.sentence())
    with SandboxPool(tier=found.tier, num_workers=2) as pool:
        yield pool


def known(name):
    try:
        return code_verdicts.SETS[name][1]()
    except FileNotFoundError as error:
        pytest.skip(f"LAUREL_DATA holds no {Path(error.filename).name}")


def sample(judged, count):
    return random.Random(7).sample(judged, count)


def differences(pool, judged):
    results = pool.run([one.job for one in judged])
    return [code_verdicts.describe(*pair) for pair in code_verdicts.differences(judged, results)]


@pytest.mark.slow
def test_known_solutions_of_mbpp_pass(pool):
    judged = known("mbpp")
    assert len(judged) == 974
    with_objects = [one for one in judged if one.job.id in OBJECTS]
    assert len(with_objects) == 3
    assert differences(pool, [*with_objects, *sample(judged, SAMPLE)]) == []


@pytest.mark.slow
def test_solutions_with_a_bug_fail(pool):
    judged = known("buggy")
    assert len(judged) == 164
    quick = [replace(one, job=replace(one.job, limits=QUICK)) for one in sample(judged, 40)]
    assert differences(pool, quick) == []


@pytest.mark.slow
def test_completions_of_a_model_get_their_recorded_verdicts(pool):
    judged = known("samples")
    assert len(judged) == 11_082
    assert differences(pool, sample(judged, SAMPLE)) == []
