"""Runs `laurel doctor`: reports what this machine has and can do."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from laurel.extensions.doctor import machine
from laurel.extensions.doctor.machine import Probe, ProbeFinding
from laurel.observe.console import make_console, visible
from laurel.observe.files import replace_file
from laurel.observe.json_output import json_text, write_json

if TYPE_CHECKING:
    from laurel.extensions.doctor.checks import Check, Outcome

WORTH_IT = 1.3
"""The speedup over float32 from which bfloat16 is advised on a GPU, despite its lower precision."""
_ON_CPU = (
    "; on a CPU float32 is advised all the same, as laurel init writes it: bfloat16 costs "
    "precision. A large model on a CPU with bfloat16 instructions may be worth a try"
)

PROBES: Mapping[str, Probe] = {
    "versions": machine.system_versions,
    "libraries": machine.libraries,
    "extras": machine.extras,
    "cpu": machine.cpu,
    "memory": machine.memory,
    "gpus": machine.gpus,
    "disk": machine.disk,
    "hub": machine.hub,
    "sandbox": machine.sandbox_advice,
    "speed": machine.speed,
}


def run_doctor(*, as_json: bool, probes: Mapping[str, Probe] = PROBES) -> None:
    """Run every probe, print what was found, and print what a run would use."""
    findings = run_probes(probes)
    if as_json:
        write_json({name: finding.facts for name, finding in findings.items()})
        return
    console = make_console()
    width = max(map(len, findings))
    for name, finding in findings.items():
        for index, line in enumerate(finding.lines):
            label = name if index == 0 else ""
            console.print(Text(f"{label:{width}}  {visible(line)}"), soft_wrap=True)


def run_probes(probes: Mapping[str, Probe]) -> dict[str, ProbeFinding]:
    """Run every probe and return its finding by name; `will_use` holds the advice of `advise`."""
    findings = {name: _run(probe) for name, probe in probes.items()}
    findings["will_use"] = _run(
        lambda: advise({name: finding.facts for name, finding in findings.items()})
    )
    return findings


def _run(probe: Probe) -> ProbeFinding:
    try:
        return probe()
    except Exception as error:  # whatever a probe meets, the others still have something to say
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
        return ProbeFinding(facts={"error": reason}, lines=(f"could not be found out ({reason})",))


def advise(facts: Mapping[str, Mapping[str, Any]]) -> ProbeFinding:
    """Derive from the probes' facts what a run will use here: device, threads and precision."""
    has_gpu = bool(facts.get("gpus", {}).get("devices"))
    device = "cuda" if has_gpu else "cpu"
    lines = [f"device: {device} (cluster.device=auto)"]
    used: dict[str, Any] = {"device": device}
    processor = facts.get("cpu", {})
    threads = processor.get("threads")
    if threads is not None:
        used["threads"] = threads
        is_each = threads == processor["usable_cores"]  # no more than the container's quota
        why = "one per usable core" if is_each else "as OMP_NUM_THREADS says"
        lines.append(f"threads: {threads}, {why} (cluster.cpu_threads=null)")
    rates = facts.get("speed", {}).get("gflops")
    if rates:
        ratio = rates["bfloat16"] / rates["float32"]
        precision = "bfloat16" if has_gpu and ratio >= WORTH_IT else "float32"
        used["advised_precision"] = precision
        on_cpu = "" if has_gpu else _ON_CPU
        lines.append(
            f"precision: {precision} is advised (policy.precision, --precision): a product in "
            f"bfloat16 is {ratio:.2g} times as fast as in float32{on_cpu}"
        )
    used["attention"] = "laurel_forest"
    lines.append(
        "attention: token forest on scaled_dot_product_attention, checked at every load; padded "
        "rows for models that cannot use it"
    )
    return ProbeFinding(facts=used, lines=tuple(lines))


TRIAL_PROBES = ("versions", "libraries", "cpu", "memory", "gpus")
"""The probes whose facts go into a trial's report; they name no directory except Python's."""
NAME_WIDTH, STATUS_WIDTH, SHARE_WIDTH = 26, 9, 6


def run_doctor_trial(
    *, minutes: float, report: Path, as_json: bool, checks: Mapping[str, Check] | None = None
) -> bool:
    """Run the checks of `laurel doctor --trial`, print a table and write the report.

    Returns:
        True if no check failed.
    """
    import torch

    from laurel.extensions.doctor.checks import SIZES, Trial, run_trial
    from laurel.observe.console import quiet_libraries
    from laurel.workers.process import choose_device

    quiet_libraries()
    device = choose_device("auto")
    trial = Trial(
        device=device,
        num_devices=torch.cuda.device_count() if device.type == "cuda" else 2,
        sizes=SIZES[device.type],
        end=time.monotonic() + 60 * minutes,
    )
    console = make_console()
    width = shutil.get_terminal_size().columns

    def say(lines: Sequence[str]) -> None:
        for line in lines if not as_json else ():
            console.print(Text(visible(line)), soft_wrap=True)

    findings = run_probes({name: PROBES[name] for name in TRIAL_PROBES})
    checked: list[dict[str, Any]] = []
    facts = {
        "machine": {name: findings[name].facts for name in TRIAL_PROBES},
        "device": device.type,
        "num_devices": trial.num_devices,
        "checks": checked,
    }

    def keep(outcome: Outcome) -> None:
        # At once: the machine may be at hand for minutes only.
        say(outcome_row(outcome, width))
        checked.append(asdict(outcome))
        with replace_file(report) as file:
            file.write(json_text(facts) + "\n")

    say(trial_row("check", "result", "peak", "measured", width))
    outcomes = run_trial(trial, checks=checks, say=keep)
    if as_json:
        write_json(facts)
    say(["", f"written: {report}"])
    return not any(outcome.status == "fail" for outcome in outcomes)


def outcome_row(outcome: Outcome, width: int) -> list[str]:
    """Return the lines of the trial's table for one check."""
    share = "" if outcome.share is None else f"{outcome.share:.0%}"
    return trial_row(outcome.name, outcome.status, share, outcome.detail, width)


def trial_row(name: str, status: str, share: str, detail: str, width: int) -> list[str]:
    """Return the lines of one table row; `detail` is wrapped to `width`.

    On a narrow terminal, `detail` goes below the other columns.
    """
    head = f"{name:<{NAME_WIDTH}}{status:<{STATUS_WIDTH}}{share:>{SHARE_WIDTH}}  "
    indent = " " * len(head) if width - len(head) >= 30 else "    "
    wrapped = textwrap.wrap(detail, max(30, width - len(indent)))
    if len(indent) < len(head):
        return [head.rstrip(), *(indent + line for line in wrapped)]
    return [head + wrapped[0], *(indent + line for line in wrapped[1:])]
