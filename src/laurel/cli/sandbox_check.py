"""`laurel sandbox check`: how well this machine locks programs in, found by trying."""

from __future__ import annotations

from rich.text import Text

from laurel.cli.json_output import write_json
from laurel.environments.sandbox.detection import Detection, detect
from laurel.environments.sandbox.group_trial import chosen_place, group_words
from laurel.environments.sandbox.tiers import LAYERS, Tier
from laurel.errors import ConfigError
from laurel.observe.console import make_console, visible

_GROUP = "cgroup"


def run_check(*, without: frozenset[str], as_json: bool) -> bool:
    """Try it, and print what was found.

    Args:
        without: Layers to leave out.
        as_json: Print one JSON object instead of lines.

    Returns:
        Whether a run would start here without being told to accept less.

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
        write_json(as_facts(found) | {_GROUP: group, "accepted": accepted})
        return accepted
    console = make_console()
    for line in lines(found, group):
        console.print(Text(visible(line)), soft_wrap=True)
    return accepted


def as_facts(found: Detection) -> dict[str, object]:
    """What was found, for programs."""
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
    """What was found, for people.

    Args:
        found: It.
        group: Its `group_words`.
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
