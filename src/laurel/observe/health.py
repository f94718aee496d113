"""Alarms of a run: from its metrics, step by step, to what rises and what is over.

Pure arithmetic: no clock, no chance, no files. The same figures in the same order give the same
events, also where a run was saved and resumed in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from laurel.config.health import Alarm, HealthConfig
from laurel.observe.health_history import History
from laurel.observe.health_rules import RULES, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An alarm that rises, or is over."""

    step: int
    alarm: Alarm
    state: Literal["raised", "over"]
    finding: Finding

    @property
    def advice(self) -> str:
        """What people usually do about it."""
        return RULES[self.alarm].advice


class Alarms:
    """What is wrong with a run at the moment.

    An alarm rises as soon as its rule finds something bad, and is over when the rule has found
    nothing bad `window` times in a row. A silent rule changes nothing.

    Example::

        alarms = Alarms(HealthConfig())
        for event in alarms.see(1, {"train/reward": 0.3, ...}):
            print(event.alarm, event.finding.text)
    """

    def __init__(
        self,
        config: HealthConfig,
        *,
        members: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing has been seen yet.

        Args:
            config: See there.
            members: Names of the reward models where there are several.
            settings: The whole configuration as plain values, in which a gold metric is looked for
                where `config` names none.
        """
        self.config = config
        self._history = History(config, members=members, settings=settings)
        self._good_in_a_row: dict[Alarm, int] = {}
        """By the alarms that are raised."""
        self._known: set[Alarm] = set()

    @property
    def raised(self) -> tuple[Alarm, ...]:
        """The alarms that have risen and are not over."""
        return tuple(name for name in RULES if name in self._good_in_a_row)

    @property
    def known(self) -> tuple[Alarm, ...]:
        """The alarms of which this run has measured enough to judge."""
        return tuple(name for name in RULES if name in self._known)

    @property
    def stopping(self) -> tuple[Alarm, ...]:
        """The alarms that are raised and are to end the run."""
        return tuple(name for name in self.raised if name in self.config.stop_on)

    def see(self, step: int, figures: Mapping[str, float]) -> list[Event]:
        """Judge what was measured at a step, or in a validation after it.

        Args:
            step: Its number.
            figures: By the full names that they are logged under.
        """
        self._history.add(figures)
        events = []
        for name, rule in RULES.items():
            finding = None if name in self.config.ignore else rule.judge(self._history)
            if finding is None:
                continue
            self._known.add(name)
            state = self._changed(name, finding)
            if state is not None:
                events.append(Event(step=step, alarm=name, state=state, finding=finding))
        return events

    def _changed(self, name: Alarm, finding: Finding) -> Literal["raised", "over"] | None:
        is_raised = name in self._good_in_a_row
        if finding.is_bad:
            self._good_in_a_row[name] = 0
            return None if is_raised else "raised"
        if not is_raised:
            return None
        self._good_in_a_row[name] += 1
        if self._good_in_a_row[name] < self.config.window:
            return None
        del self._good_in_a_row[name]
        return "over"

    def state_dict(self) -> dict[str, Any]:
        """Everything that was seen, as far as it is remembered; as JSON knows it."""
        return {
            "history": self._history.state_dict(),
            "raised": dict(self._good_in_a_row),
            "known": list(self.known),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._history.load_state_dict(state["history"])
        wanted = [name for name in RULES if name not in self.config.ignore]
        self._good_in_a_row = {n: state["raised"][n] for n in wanted if n in state["raised"]}
        self._known = {name for name in wanted if name in state["known"]}
