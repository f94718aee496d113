"""For tests of the planner: plans of configurations, and configurations with changed keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from laurel.config.plugged import field_of
from laurel.config.policy import RolePlacement
from laurel.config.schemas import Run
from laurel.config.yaml_tree import Section
from laurel.extensions.plan.fit import FittedPlan, fit
from laurel.planning.memory import Shapes
from laurel.planning.plan import Plan, plan_run
from laurel.run.request import request_of

S = TypeVar("S", bound=Section)


def planned(config: Run) -> Plan:
    return plan_run(request_of(config))


def fitted(config: Run, shapes: Shapes, *, device_memory: int | None = None) -> FittedPlan:
    return fit(request_of(config), shapes, device_memory=device_memory)


def with_changes(config: S, changes: Mapping[str, Any]) -> S:
    """A copy with some keys, `a.b.c`, changed. What depends on them is not checked."""
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        if rest:
            field: Any = field_of(type(config), first)
            kinds = getattr(field.annotation, "__args__", ())
            section = config.get(first, field.default)
            if first == "placement":  # roles by name
                role, _, rest = rest.partition(".")
                own = (section or {}).get(role) or RolePlacement()
                value = {
                    **(section or {}),
                    role: with_changes(own, {rest: value}) if rest else value,
                }
            else:
                value = with_changes(section or kinds[0](), {rest: value})
        config = config.model_copy(update={first: value})
    return config


def as_changes(fix: str) -> dict[str, Any]:
    """The keys of a fix, `key=value key=value`; none where it is advice in words."""
    if any("=" not in word for word in fix.split()):
        return {}
    return {key: _read(value) for key, _, value in (word.partition("=") for word in fix.split())}


def _read(text: str) -> Any:
    if text.startswith("["):
        return [_read(item) for item in text[1:-1].split(",") if item]
    if text in ("null", "true"):
        return {"null": None, "true": True}[text]
    if text.replace(".", "", 1).isdecimal():
        return float(text) if "." in text else int(text)
    return text
