"""The command `laurel sandbox check`: how well this machine locks programs in, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text

from laurel.errors import ConfigError
from laurel.extensions.code.sandbox.control_group import chosen_place, group_words
from laurel.extensions.code.sandbox.detection import Detection, detect
from laurel.extensions.code.sandbox.tiers import LAYERS, Tier
from laurel.observe.console import make_console, visible
from laurel.observe.json_output import write_json
from laurel.plugins import Command
from laurel.run.options import JsonOption

_GROUP = "cgroup"


def run_check(*, without: frozenset[str], as_json: bool) -> bool:
    """Try the sandbox on this machine, and print how well it confines programs.

    Returns:
        True if a run would start here without options that accept less isolation.

    Raises:
        ConfigError: There is no layer of such a name.
    """
    unknown = sorted(without - {*LAYERS, _GROUP})
    if unknown:
        raise ConfigError(f"--without {unknown[0]}: there are {', '.join([*LAYERS, _GROUP])}")
    detection = detect(without=without - {_GROUP})
    place, reason = chosen_place("off" if _GROUP in without else "auto")
    group = group_words(place, reason)
    accepted = detection.tier is not None and detection.tier.is_at_least(Tier.NO_LANDLOCK)
    if as_json:
        write_json(detection_facts(detection) | {_GROUP: group, "accepted": accepted})
        return accepted
    console = make_console()
    for line in lines(detection, group):
        console.print(Text(visible(line)), soft_wrap=True)
    return accepted


def detection_facts(detection: Detection) -> dict[str, object]:
    """Convert what the sandbox detection found to JSON-compatible values."""
    return {
        "tier": detection.tier.value if detection.tier else None,
        "layers": sorted(detection.tier.layers) if detection.tier else [],
        "reasons": dict(detection.reasons),
        "tried": [
            {"what": sighting.canary.name, "held": sighting.held, "detail": sighting.detail}
            for sighting in detection.sightings
        ],
    }


def lines(detection: Detection, group: str) -> list[str]:
    """Return what the sandbox detection found as lines of text."""
    text = [detection.sentence(), ""]
    have = detection.tier.layers if detection.tier else frozenset()
    for name in LAYERS:
        text.append(
            f"{name:<15}{'yes' if name in have else 'no: ' + detection.reasons.get(name, '')}"
        )
    text.append(f"{'control group':<15}{group}")
    if detection.sightings:
        text += ["", "programs that tried to get out, or to use too much:"]
    for sighting in detection.sightings:
        state = "held" if sighting.held else "GOT OUT"
        text.append(f"  {state:<8}{sighting.canary.name} ({sighting.detail})")
    return text


class SandboxCheck(Command):
    """Say how well this machine locks programs in."""

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return check_sandbox


def complete_layers() -> list[str]:
    """List the sandbox layers that can be left out, as shell completions."""
    return [*LAYERS, _GROUP]


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
