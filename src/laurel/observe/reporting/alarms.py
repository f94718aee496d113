"""The alarms of a run, from `health.jsonl`: since when, until when, what was seen, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One alarm, from the step it was raised at to the one it was over at."""

    name: str
    since: int
    until: int | None = None
    """None: it has not ended."""
    metric: str = ""
    value: float | None = None
    """What the metric was when it was raised."""
    threshold: float | None = None
    baseline: float | None = None
    text: str = ""
    advice: str = ""
    samples: Sequence[Mapping[str, Any]] = ()


def alarms_of(lines: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of the lines, those that go on first, then the latest.

    A line that repeats what is so already changes nothing: the alarm began when it was first told.
    """
    ended: list[Alarm] = []
    going_on: dict[str, Alarm] = {}
    for line in lines:
        name, step = str(line.get("alarm", "")), _number(line.get("step"))
        if not name or step is None:
            continue
        if line.get("state") == "over":
            alarm = going_on.pop(name, None)
            if alarm is not None:
                ended.append(replace(alarm, until=int(step)))
        elif line.get("state") == "raised" and name not in going_on:
            going_on[name] = _alarm(name, int(step), line)
    return [
        *sorted(going_on.values(), key=lambda alarm: -alarm.since),
        *sorted(ended, key=lambda alarm: -alarm.since),
    ]


def _alarm(name: str, step: int, line: Mapping[str, Any]) -> Alarm:
    samples = line.get("samples")
    return Alarm(
        name=name,
        since=step,
        metric=str(line.get("metric") or ""),
        value=_number(line.get("value")),
        threshold=_number(line.get("threshold")),
        baseline=_number(line.get("baseline")),
        text=str(line.get("text") or ""),
        advice=str(line.get("advice") or ""),
        samples=[sample for sample in samples if isinstance(sample, dict)][:MAX_SAMPLES]
        if isinstance(samples, list)
        else (),
    )


def _number(value: object) -> float | None:
    """JSON has no NaN: loggers write it as text, and `float` reads that."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
