"""Hostile programs, at every tier that this machine can show, and as another account."""

import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest

import hostile_suite
from laurel.extensions.code.sandbox.control_group import chosen_place
from laurel.extensions.code.sandbox.detection import small_world
from laurel.extensions.code.sandbox.tiers import LAYERS, Tier
from laurel.extensions.code.sandbox.zygote_process import ZygoteProcess
from sandbox_processes import END, busy, is_gone, isolation, named, wait_until

PROGRAMS = {program.name: program for program in hostile_suite.read_programs()}
QUICK = {program.claim: name for name, program in reversed(PROGRAMS.items())}  # one of each claim
LIMITS = ("time", "memory", "output")
"""What these programs are after has nothing to do with files or the network: two tiers, which end a
job in different ways, are enough; and as another account one that reaches each limit is."""
OF_EACH_LIMIT = ("r_list", "r_loop", "r_map", "r_sleep", "r_stdout", "r_thread", "s_silent")
BY_ACCOUNT = {  # their outcome depends on the account; so does what a program may do
    name
    for name, program in PROGRAMS.items()
    if program.claim not in LIMITS or name.startswith(("c_", "p_")) or name in OF_EACH_LIMIT
}
LIKE_SYSTEM = "/usr/bin/python3"
ACCOUNT = 1_234_567
SUITE = hostile_suite.__file__


@pytest.fixture(scope="module")
def world():
    with small_world() as world:
        yield world


@pytest.fixture(scope="module", params=[one for one in Tier if one is not Tier.LIMITS_ONLY])
def place(request, world):
    """A tier and its zygote, beside a process that has to live through it all."""
    tier = request.param
    found = isolation(without=frozenset(LAYERS) - tier.layers)
    if found.tier is not tier:
        pytest.skip(f"not to be had here: {found.sentence()}")
    neighbour = subprocess.Popen(["sleep", "1000"])
    zygote = ZygoteProcess(tier.layers, place=chosen_place("auto")[0])  # as in a run
    zygote.start()
    yield tier, zygote
    try:
        # None is left by a job. One that is being made for the next has its name only later, and a
        # zombie is there until its parent ends.
        wait_until(lambda: all(is_gone(one.pid) for one in busy(zygote.pid)))
    finally:
        children = [one for one, _ in named(zygote.pid)]
        zygote.close()
        lives = neighbour.poll() is None
        neighbour.kill()
        neighbour.wait()
    assert psutil.wait_procs(children, timeout=END)[1] == []
    assert lives


@pytest.mark.slow_parameters(
    "Tier.NO_NAMESPACES",
    "Tier.SECCOMP_ONLY",
    "Tier.NO_LANDLOCK",
)
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK.values() else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS],
)
def test_it_is_held(name, place, world):
    tier, zygote = place
    program = PROGRAMS[name]
    if not program.runs_in(tier):
        pytest.skip(f"tier {tier.value} does not claim to stop it")
    if program.claim in LIMITS and tier not in (Tier.FULL, Tier.NO_NAMESPACES):
        pytest.skip("the layers have no part in it")
    assert hostile_suite.fault_in(program, zygote, world) == ""


def test_the_suite_sees_an_escape(world):
    """Without any layer the same programs do get out, and are reported."""
    zygote = ZygoteProcess(frozenset())
    try:
        seen = {
            name: hostile_suite.fault_in(PROGRAMS[name], zygote, world)
            for name in ("f_secret", "f_write", "n_tcp", "n_abstract", "c_hello")
        }
    finally:
        zygote.close()
    assert seen.pop("c_hello") == ""
    assert seen["f_secret"].startswith("it got out")
    assert seen["f_write"] == "outside there was a file"
    assert seen["n_tcp"] == "outside there was a connection"
    assert seen["n_abstract"] == "outside there was a named socket"


@pytest.mark.slow
@pytest.mark.parametrize("like_docker", [False, True])
def test_it_is_held_as_another_account(like_docker):
    """An ordinary user, with and without the right to namespaces."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    if shutil.which(LIKE_SYSTEM) is None:
        pytest.skip(f"there is no {LIKE_SYSTEM} that any account may run")
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [
            LIKE_SYSTEM,
            "-S",
            SUITE,
            *(["--like-docker"] if like_docker else []),
            "--only",
            *BY_ACCOUNT,
        ],
        user=ACCOUNT,
        group=ACCOUNT,
        extra_groups=[],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
    )
    if "Permission denied" in done.stderr or "requires a different Python" in done.stderr:
        pytest.skip("another account cannot read this checkout")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["faults"] == {}
    assert said["programs"] == len(BY_ACCOUNT) > 80
    assert said["tier"] == ("B" if like_docker else "A")
    if like_docker:
        assert "unshare" in said["reasons"]["namespaces"]
