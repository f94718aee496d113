"""Runs `laurel doctor` and `laurel sandbox check`: reports what this machine has and can do."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from laurel.cli.app import App
from laurel.errors import ConfigError
from laurel.extensions.doctor import machine
from laurel.extensions.doctor.machine import Probe, ProbeFinding
from laurel.observe.console import make_console, visible
from laurel.observe.files import replace_file
from laurel.observe.json_output import json_text, write_json
from laurel.run.options import JsonOption, complete_layers
from laurel.sandbox.control_group import chosen_place, group_words
from laurel.sandbox.detection import Detection, detect
from laurel.sandbox.tiers import LAYERS, Tier

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
    """Run every probe, print what was found, and print what a run would use.

    Args:
        as_json: Print one JSON object instead of lines.
        probes: The probes by name; one that fails is reported as a line.
    """
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
    cores = facts.get("cpu", {}).get("usable_cores")  # no more than the container's quota
    if cores is not None:
        used["threads"] = cores
        lines.append(f"threads: {cores}, one per usable core (cluster.cpu_threads=null)")
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


# `laurel doctor --trial`: what a run relies on, tried with models made on the spot.

TRIAL_PROBES = ("versions", "libraries", "cpu", "memory", "gpus")
"""The probes whose facts go into a trial's report; they name no directory except Python's."""
NAME_WIDTH, STATUS_WIDTH, SHARE_WIDTH = 26, 9, 6


def run_doctor_trial(
    *, minutes: float, report: Path, as_json: bool, checks: Mapping[str, Check] | None = None
) -> bool:
    """Run the checks of `laurel doctor --trial`, print a table and write the report.

    Args:
        minutes: The time limit; checks that have not begun by then are skipped.
        report: The JSON file, which can be attached to an issue; it is written after every check.
        as_json: Print the report instead of the table.
        checks: The checks by name; None runs all.

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


# `laurel sandbox check`: how well this machine locks programs in, found by trying.

_GROUP = "cgroup"


def run_check(*, without: frozenset[str], as_json: bool) -> bool:
    """Try the sandbox on this machine, and print how well it confines programs.

    Args:
        without: The names of sandbox layers to leave out.
        as_json: Print one JSON object instead of lines.

    Returns:
        True if a run would start here without options that accept less isolation.

    Raises:
        ConfigError: There is no layer of such a name.
    """
    unknown = sorted(without - {*LAYERS, _GROUP})
    if unknown:
        raise ConfigError(f"--without {unknown[0]}: there are {', '.join([*LAYERS, _GROUP])}")
    found = detect(without=without - {_GROUP})
    place, reason = chosen_place("off" if _GROUP in without else "auto")
    group = group_words(place, reason)
    accepted = found.tier is not None and found.tier.is_at_least(Tier.NO_LANDLOCK)
    if as_json:
        write_json(detection_facts(found) | {_GROUP: group, "accepted": accepted})
        return accepted
    console = make_console()
    for line in lines(found, group):
        console.print(Text(visible(line)), soft_wrap=True)
    return accepted


def detection_facts(found: Detection) -> dict[str, object]:
    """Convert what the sandbox detection found to JSON-compatible values."""
    return {
        "tier": found.tier.value if found.tier else None,
        "layers": sorted(found.tier.layers) if found.tier else [],
        "reasons": dict(found.reasons),
        "tried": [
            {"what": one.canary.name, "held": one.held, "detail": one.detail}
            for one in found.sightings
        ],
    }


def lines(found: Detection, group: str) -> list[str]:
    """Return what the sandbox detection found as lines of text.

    Args:
        found: The result of the detection.
        group: The description of the control group, from `group_words`.
    """
    said = [found.sentence(), ""]
    have = found.tier.layers if found.tier else frozenset()
    for name in LAYERS:
        said.append(f"{name:<15}{'yes' if name in have else 'no: ' + found.reasons.get(name, '')}")
    said.append(f"{'control group':<15}{group}")
    if found.sightings:
        said += ["", "programs that tried to get out, or to use too much:"]
    for one in found.sightings:
        said.append(f"  {'held' if one.held else 'GOT OUT':<8}{one.canary.name} ({one.detail})")
    return said


# The commands of `laurel sandbox`.

sandbox_app = App(help="Where programs that a model wrote are run.", no_args_is_help=True)


@sandbox_app.callback()
def sandbox_commands() -> None:
    """Where programs that a model wrote are run."""


@sandbox_app.command("check")
def check_sandbox(
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER",
            autocompletion=complete_layers,
            help="Try without namespaces, landlock or seccomp. May be repeated.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run hostile programs in the sandbox and report which isolation layers work here.

    For a layer that does not, print what protection is missing and how to enable it. The exit code
    is 1 if a run would be refused unless an option allows weaker isolation.
    """

    if not run_check(without=frozenset(without or ()), as_json=as_json):
        raise typer.Exit(1)
