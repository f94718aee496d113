import itertools
import json
import os
import sys

import pytest

from laurel import SLEEPING_THREADS
from laurel.errors import install_command
from laurel.extensions.doctor import machine
from laurel.extensions.doctor.doctor import PROBES, advise, run_doctor, run_probes
from laurel.extensions.doctor.machine import ProbeFinding, measure_products
from laurel.sandbox import limits


def test_every_probe_works_on_this_machine(capsys):
    run_doctor(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {*PROBES, "will_use"}
    assert [name for name, facts in found.items() if "error" in facts] == []
    assert found["versions"]["executable"] == sys.executable
    assert found["libraries"]["torch"].startswith("2.")
    assert found["libraries"]["misfits"] == []
    assert found["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert 0 < found["disk"]["free"] <= found["disk"]["total"]
    assert all(rate > 0 for rate in found["speed"]["gflops"].values())
    assert found["will_use"]["threads"] == found["cpu"]["threads"]


def test_a_probe_that_fails_is_a_line_among_the_others(capsys):
    def broken():
        raise OSError("no such\ndevice")

    probes = {"gpus": broken, "disk": machine.disk}
    run_doctor(as_json=False, probes=probes)
    printed = capsys.readouterr().out
    assert "could not be found out (OSError: no such device)" in printed
    assert "GiB free" in printed
    assert "device: cpu" in printed
    findings = run_probes(probes)
    assert findings["gpus"].facts == {"error": "OSError: no such device"}


def test_the_device_is_what_could_be_found_out():
    assert advise({name: {"error": "x"} for name in PROBES}).facts["device"] == "cpu"
    assert advise({"gpus": {"devices": [{"name": "H200"}]}}).facts["device"] == "cuda"


@pytest.mark.parametrize(("rate", "advised"), [(129.0, "float32"), (131.0, "bfloat16")])
def test_bfloat16_is_advised_where_it_is_clearly_faster(rate, advised):
    speed = {"gflops": {"float32": 100.0, "bfloat16": rate}}
    advice = advise({"gpus": {"devices": ["one"]}, "speed": speed})
    assert advice.facts["advised_precision"] == advised
    assert any("1.3 times as fast" in line for line in advice.lines)


def test_a_quota_below_the_cores_is_kept_to_and_told(monkeypatch):
    monkeypatch.setattr(limits, "_affine_cores", lambda: 8)
    monkeypatch.setattr(limits, "cpu_quota", lambda: 2.5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    found = machine.cpu()
    assert found.facts["usable_cores"] == 2
    assert "2 of" in found.lines[0]
    assert "the container's quota is 2.5" in found.lines[0]
    advice = advise({"cpu": found.facts})
    assert advice.facts["threads"] == 2
    assert advice.lines[1].startswith("threads: 2, one per usable core")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    advice = advise({"cpu": machine.cpu().facts})
    assert advice.facts["threads"] == 6
    assert advice.lines[1].startswith("threads: 6, as OMP_NUM_THREADS says")


def test_it_says_how_threads_wait_and_who_decided_it(monkeypatch):
    for name, value in SLEEPING_THREADS.items():
        monkeypatch.setenv(name, value)
    assert any("threads that wait sleep" in line for line in machine.cpu().lines)
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("KMP_BLOCKTIME")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    found = machine.cpu()
    assert found.facts["waiting_threads"] == {"OMP_WAIT_POLICY": "ACTIVE"}
    assert any("as the environment says: OMP_WAIT_POLICY=ACTIVE" in line for line in found.lines)


def test_what_is_absent_comes_with_the_command_that_brings_it():
    finding = machine.extras()
    assert {"lora", "vllm", "wandb", "mlflow", "test"} <= set(finding.facts)
    for extra, facts in finding.facts.items():
        absent = [name for name, version in facts["packages"].items() if version is None]
        assert facts["install"] == (install_command(extra) if absent else None)
        assert not absent or any(facts["install"] in line for line in finding.lines)
    column = 1 + max(map(len, finding.facts))  # where what is said of an extra begins
    assert {line[: column - 1].strip() for line in finding.lines} == set(finding.facts)


def test_the_speed_of_products_by_a_clock_of_our_own():
    """Each product of two 128 x 128 matrices, 2 * 128^3 operations, takes a thousandth second."""
    clock = (count / 1000 for count in itertools.count())
    rates = measure_products(("float32", "float64"), "cpu", seconds=0.02, clock=lambda: next(clock))
    assert rates == pytest.approx(dict.fromkeys(("float32", "float64"), 4.194304))


def test_threads_are_as_before():
    import torch

    before = torch.get_num_threads()
    assert isinstance(machine.speed(seconds=0.01), ProbeFinding)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("rate", [50.0, 900.0])
def test_a_cpu_is_advised_what_quick_start_and_init_write_for_it(rate):
    advice = advise({"speed": {"gflops": {"float32": 100.0, "bfloat16": rate}}})
    assert advice.facts["advised_precision"] == "float32"
    assert any("on a CPU float32 is advised" in line for line in advice.lines)
