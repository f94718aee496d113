"""What is asked of a sandbox, what it says, and how tiers are told apart."""

import pytest

from laurel.extensions.code.sandbox.grading import status_of
from laurel.extensions.code.sandbox.inside.calls import EXIT_CODES
from laurel.extensions.code.sandbox.jobs import (
    CallTest,
    Limits,
    SandboxJob,
    Status,
    StdioTest,
)
from laurel.extensions.code.sandbox.tiers import LAYERS, Tier
from laurel.extensions.code.sandbox.zygote_process import ProcessOutcome

LIMITS = Limits(cpu_s=2)


def ended(by="exit", **fields):
    return status_of(ProcessOutcome(ended_by=by, **fields), LIMITS)


def test_an_end_by_us():
    assert ended("wall") is Status.TIMEOUT_WALL
    for name in ("stdout", "stderr", "result"):
        assert ended(name) is Status.OUTPUT_LIMIT
    truncated = frozenset({"stdout"})
    assert ended(exit_code=0, cpu_s=0.1, truncated=truncated) is Status.OUTPUT_LIMIT
    assert ended("cancel") is Status.KILLED


@pytest.mark.parametrize(
    ("signal", "cpu_s", "status"),
    [
        (24, 2.0, Status.TIMEOUT_CPU),
        (9, 3.0, Status.TIMEOUT_CPU),
        (9, 0.5, Status.KILLED),
        (9, None, Status.KILLED),
        (11, 0.1, Status.KILLED),
        (6, 9.0, Status.KILLED),
        (31, 0.1, Status.FORBIDDEN),
        (25, 0.1, Status.DISK_LIMIT),
    ],
)
def test_an_end_by_a_signal(signal, cpu_s, status):
    assert ended(signal=signal, cpu_s=cpu_s) is status


def test_an_end_by_itself():
    assert ended(exit_code=0, cpu_s=1.9) is Status.OK
    assert ended(exit_code=0, cpu_s=2.1) is Status.TIMEOUT_CPU
    assert ended(exit_code=1) is Status.RUNTIME_ERROR
    assert ended(exit_code=255) is Status.RUNTIME_ERROR
    assert {ended(exit_code=code).value for code in EXIT_CODES.values()} == set(EXIT_CODES)


def test_only_a_failure_of_ours_is_no_verdict():
    assert [status for status in Status if not status.is_verdict] == [Status.SANDBOX_ERROR]


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "stdio"},
        {"mode": "stdio", "tests": [CallTest()]},
        {"mode": "call"},
        {"mode": "call", "tests": [CallTest()]},
        {"mode": "call", "tests": [StdioTest()], "entry": "f"},
        {"mode": "tests", "entry": "f"},
        {"mode": "tests", "test_code": "assert f()"},
        {"mode": "tests", "test_code": " ", "entry": "f"},
    ],
)
def test_jobs_that_cannot_be_judged(fields):
    with pytest.raises(ValueError, match="needs"):
        SandboxJob(code="", **fields)


@pytest.mark.parametrize("name", ["cpu_s", "mem_mb", "stdout_kb"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


@pytest.mark.parametrize(
    ("layers", "tier"),
    [
        (set(LAYERS), Tier.FULL),
        ({"landlock", "seccomp"}, Tier.NO_NAMESPACES),
        ({"namespaces", "seccomp"}, Tier.NO_LANDLOCK),
        ({"seccomp"}, Tier.SECCOMP_ONLY),
        ({"landlock"}, Tier.LIMITS_ONLY),
        ({"namespaces", "landlock"}, Tier.LIMITS_ONLY),
        (set(), Tier.LIMITS_ONLY),
    ],
)
def test_the_tier_of_layers(layers, tier):
    assert Tier.of(frozenset(layers)) is tier
    assert tier.layers <= layers


def test_tiers_have_an_order():
    for index, tier in enumerate(Tier):
        for other_index, other in enumerate(Tier):
            assert tier.is_at_least(other) == (index <= other_index)


def test_a_tier_says_what_is_lost_and_what_to_do():
    said = Tier.NO_NAMESPACES.sentence({"namespaces": "unshare: Operation not permitted"})
    assert said.startswith(
        "sandbox tier B (no namespaces: unshare: Operation not permitted). Lost:"
    )
    assert "Docker" in said
    assert "Lost" not in Tier.FULL.sentence({})
    for tier in Tier:
        assert tier.stops
        assert bool(tier.lost) == bool(tier.remedy) == (tier is not Tier.FULL)
