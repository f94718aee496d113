"""`laurel doctor`: what this machine has, and what Laurel will use of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from laurel.cli import machine
from laurel.cli.json_output import write_json
from laurel.cli.machine import Finding, Probe
from laurel.observe.console import make_console, visible

WORTH_IT = 1.3
"""bfloat16 costs precision; on a GPU it is advised from this many times as fast."""
_ON_CPU = (
    "; on a CPU float32 is advised all the same, as laurel init writes it: bfloat16 costs "
    "precision. A large model on a CPU with bfloat16 instructions may be worth a try"
)

PROBES: Mapping[str, Probe] = {
    "versions": machine.versions,
    "libraries": machine.libraries,
    "extras": machine.extras,
    "cpu": machine.cpu,
    "memory": machine.memory,
    "gpus": machine.gpus,
    "disk": machine.disk,
    "hub": machine.hub,
    "sandbox": machine.sandbox,
    "speed": machine.speed,
}


def run_doctor(*, as_json: bool, probes: Mapping[str, Probe] = PROBES) -> None:
    """Run every probe and print what was found, then what will be used.

    Args:
        as_json: Print one JSON object instead of lines.
        probes: What to find out, by name; one that fails is reported as a line.
    """
    findings = examine(probes)
    if as_json:
        write_json({name: finding.facts for name, finding in findings.items()})
        return
    console = make_console()
    width = max(map(len, findings))
    for name, finding in findings.items():
        for index, line in enumerate(finding.lines):
            label = name if index == 0 else ""
            console.print(Text(f"{label:{width}}  {visible(line)}"), soft_wrap=True)


def examine(probes: Mapping[str, Probe]) -> dict[str, Finding]:
    """What every probe found, and under `will_use` what follows from it."""
    findings: dict[str, Finding] = {}
    for name, probe in probes.items():
        findings[name] = _run(probe)
    findings["will_use"] = _run(
        lambda: advise({name: finding.facts for name, finding in findings.items()})
    )
    return findings


def _run(probe: Probe) -> Finding:
    try:
        return probe()
    except Exception as error:  # whatever a probe meets, the others still have something to say
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
        return Finding(facts={"error": reason}, lines=(f"could not be found out ({reason})",))


def advise(facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    """What a run on this machine will use, from what the probes found."""
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
    return Finding(facts=used, lines=tuple(lines))
