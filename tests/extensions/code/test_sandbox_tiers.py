"""Which isolation a run may start with, and what is said about it."""

import json
import logging
import socket

import pytest

from laurel.errors import ConfigError
from laurel.extensions.code import nodes
from laurel.extensions.code.command import detection_facts, lines, run_check
from laurel.extensions.code.opening import accepted_tier, open_pool, program_limits
from laurel.extensions.code.sandbox import detection as detection_module
from laurel.extensions.code.sandbox import pool as pool_module
from laurel.extensions.code.sandbox.detection import (
    CANARIES,
    Detection,
    EscapeAttempt,
    claims_of,
    detect,
)
from laurel.extensions.code.sandbox.grading import grade
from laurel.extensions.code.sandbox.inside.messages import send
from laurel.extensions.code.sandbox.jobs import Limits
from laurel.extensions.code.sandbox.tiers import LAYERS, Tier
from laurel.extensions.code.sandbox.zygote_process import RunningJob, SandboxLateError
from laurel.extensions.code.settings import SandboxConfig
from laurel.sandbox import limits
from laurel.sandbox.limits import available_cores
from laurel.workers.rendezvous import RankPlace
from sandbox_processes import isolation


def found(tier, **reasons):
    return Detection(tier=tier, reasons=reasons)


def test_a_run_starts_in_what_its_configuration_accepts():
    for tier in (Tier.FULL, Tier.NO_NAMESPACES, Tier.NO_LANDLOCK):
        assert accepted_tier(SandboxConfig(), found(tier)) is tier
    assert accepted_tier(SandboxConfig(min_tier="D"), found(Tier.SECCOMP_ONLY)) is Tier.SECCOMP_ONLY
    unsafe = SandboxConfig(min_tier="none")
    assert accepted_tier(unsafe, found(Tier.LIMITS_ONLY)) is Tier.LIMITS_ONLY


@pytest.mark.parametrize(
    ("settings", "tier", "said"),
    [
        ({}, Tier.SECCOMP_ONLY, "wants at least tier C"),
        ({"min_tier": "A"}, Tier.NO_NAMESPACES, "set it to B"),
        ({}, Tier.LIMITS_ONLY, "sandbox.min_tier=none"),
        ({"min_tier": "D"}, Tier.LIMITS_ONLY, "sandbox.min_tier=none"),
        ({"min_tier": "none"}, None, "it needs Linux"),
    ],
)
def test_and_in_nothing_less(settings, tier, said):
    with pytest.raises(ConfigError, match=said):
        open_pool(SandboxConfig(**settings), detection=found(tier, system="it needs Linux"))


def test_a_pool_says_once_what_it_is(caplog):
    caplog.set_level(logging.INFO)
    full = open_pool(SandboxConfig(), num_workers=1, detection=found(Tier.FULL))
    assert full.tier is Tier.FULL
    assert [one.levelname for one in caplog.records] == ["INFO"]
    caplog.clear()
    open_pool(SandboxConfig(), detection=found(Tier.NO_NAMESPACES, namespaces="EPERM"))
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "no namespaces: EPERM" in caplog.text
    caplog.clear()
    open_pool(SandboxConfig(min_tier="none"), detection=found(Tier.LIMITS_ONLY))
    assert "UNSAFE" in caplog.records[-1].message
    assert full.num_workers <= available_cores()


def test_a_pool_and_a_node_have_no_more_workers_than_the_container_pays_for(monkeypatch):
    monkeypatch.setattr(limits, "_affine_cores", lambda: 64)
    monkeypatch.setattr(limits, "cpu_quota", lambda: 5.5)
    monkeypatch.setattr(pool_module, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(nodes, "detect", lambda: found(Tier.FULL))
    with open_pool(SandboxConfig(), num_workers=8, detection=found(Tier.FULL)) as pool:
        assert pool.num_workers == 5
    node = nodes.NodeWorker(RankPlace(role="sandbox"))
    assert node.find(8, limits_mb=1)[1] == 5
    monkeypatch.setattr(pool_module, "available_memory", lambda: 1000 << 20)
    settings = SandboxConfig(memory_mb=250, disk_mb=50)
    with open_pool(settings, detection=found(Tier.FULL)) as pool:
        assert pool.num_workers == 1
    assert node.find(8, limits_mb=300)[1] == 1


def test_limits_are_those_of_the_configuration():
    limits = program_limits(SandboxConfig(cpu_seconds=1, wall_seconds=2, memory_mb=64, disk_mb=3))
    assert (limits.cpu_s, limits.wall_s, limits.mem_mb, limits.disk_mb) == (1, 2, 64, 3)
    with pytest.raises(ValueError, match="could then never be used up"):
        SandboxConfig(cpu_seconds=3, wall_seconds=2)


def test_a_program_that_was_ended_before_its_start_is_late():
    monitor, link = socket.socketpair()
    with monitor, link:
        send(monitor, {"ready": False, "ended_by": "wall", "said": ""})
        with pytest.raises(SandboxLateError):
            RunningJob(link, Limits()).outcome()


def test_a_canary_that_starts_late_is_tried_again(monkeypatch):
    tries = []

    def late_at_first(job, zygote, **options):
        tries.append(job.limits.wall_s)
        if len(tries) == 1:
            raise SandboxLateError("the program did not start in time")
        return grade(job, zygote, **options)

    monkeypatch.setattr(detection_module, "grade", late_at_first)
    found = detect()
    assert found.sightings
    assert all(one.held for one in found.sightings)
    assert tries[:2] == [found.sightings[0].canary.limits.wall_s, 10.0]
    assert len(tries) == len(found.sightings) + 1


def test_every_claim_has_its_canary():
    claimed = {claim for tier in Tier for claim in claims_of(tier)}
    assert {canary.claim for canary in CANARIES} == claimed
    assert "files" not in claims_of(Tier.SECCOMP_ONLY)
    assert claims_of(Tier.LIMITS_ONLY) == {"time", "memory", "output"}


@pytest.mark.slow
def test_layers_that_do_not_hold_are_not_believed(monkeypatch):
    """A canary that gets out: it reads what every program may read."""
    if detect().tier in (None, Tier.LIMITS_ONLY):
        pytest.skip("no layers here")
    escapes = EscapeAttempt(name="get out", claim="processes", code="print('ESCAPED')")
    monkeypatch.setattr(detection_module, "CANARIES", (escapes,))
    seen = detect()
    assert seen.tier is Tier.LIMITS_ONLY
    assert "'get out': it succeeded" in seen.reasons["seccomp"]
    with pytest.raises(ConfigError, match="min_tier=none"):
        accepted_tier(SandboxConfig(), seen)


def test_a_machine_on_which_limits_do_not_hold_runs_nothing(monkeypatch):
    endless = EscapeAttempt(name="never end", claim="time", code="print('ESCAPED')")
    monkeypatch.setattr(detection_module, "CANARIES", (endless,))
    seen = detect()
    assert seen.tier is None
    assert "never end" in seen.sentence()


def test_another_system_runs_nothing(monkeypatch):
    monkeypatch.setattr(detection_module.sys, "platform", "darwin")
    assert detect().tier is None
    assert "darwin" in detect().sentence()


def test_the_command_says_what_holds(capsys):
    seen = isolation(without=frozenset({"namespaces"}))
    assert run_check(without=frozenset({"namespaces"}), as_json=True) == (
        seen.tier is Tier.NO_NAMESPACES
    )
    said = json.loads(capsys.readouterr().out)
    assert said["tier"] == seen.tier.value
    assert said["reasons"]["namespaces"] == "it is switched off"
    assert {one["what"] for one in said["tried"]} <= {canary.name for canary in CANARIES}
    assert all(one["held"] for one in said["tried"])


def test_people_are_told_of_every_layer_what_it_lacks():
    said = lines(found(Tier.NO_LANDLOCK, landlock="the kernel is too old"), "no: not delegated")
    assert any(line.startswith("landlock ") and "too old" in line for line in said)
    assert any(line.startswith("control group ") and "not delegated" in line for line in said)
    assert {line.split()[0] for line in said if line} >= set(LAYERS)
    assert detection_facts(found(None))["tier"] is None


def test_an_unknown_layer_is_an_error():
    with pytest.raises(ConfigError, match="namespaces, landlock, seccomp, cgroup"):
        run_check(without=frozenset({"namespace"}), as_json=False)
