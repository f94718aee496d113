"""The gold metric of a GRPO run: what is really wanted, measured beside the reward it learns from.

Reports and alarms ask here, so that both speak of the same metric.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

_FIGURES = ("accuracy", "reward_mean")
"""Figures of an environment that say how good completions are, the clearest first."""


def gold_metric(settings: Mapping[str, Any], measured: Collection[str]) -> str | None:
    """The full name of a run's gold metric; None where the run has none.

    It is `grpo.health.gold_metric` where that is set. Otherwise it is a figure of a part with
    weight 0 of a `composite` environment: the part judges completions and is no part of the reward.

    Args:
        settings: The whole configuration of the run, as plain values (`model_dump()`, or
            `config.json` of its directory).
        measured: Names of the metrics that the run has logged. A part of a composite whose
            environment is never used logs none, and is passed over.
    """
    named = _inside(settings, "grpo", "health").get("gold_metric")
    if named is not None:
        return str(named)
    return next((name for name in _of_composites(settings) if name in measured), None)


def _of_composites(settings: Mapping[str, Any]) -> Iterator[str]:
    for environment, composite in _inside(settings, "env", "composite").items():
        parts = composite.get("parts") if isinstance(composite, Mapping) else None
        for part in parts or ():
            # A gate decides about the reward, whatever its weight.
            if part.get("gate") is None and part.get("weight", 1.0) == 0.0:
                yield from (f"env/{environment}/{part.get('env')}/{one}" for one in _FIGURES)


def _inside(settings: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """A section within sections; empty where the settings lack it, as those of old runs may."""
    found: Any = settings
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
