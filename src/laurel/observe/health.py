"""Raises and ends the alarms of a run, step by step from its metrics.

The rules are pure arithmetic, without a clock, randomness or files. The same metrics in the same
order give the same events, even if the run was saved and resumed in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from laurel.config.grpo import Alarm, HealthConfig
from laurel.observe.history import History
from laurel.observe.rules import ALARMS, AlarmFinding, advice_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEvent:
    """An event of a run: an alarm is raised, or ends."""

    step: int
    alarm: Alarm
    state: Literal["raised", "over"]
    finding: AlarmFinding

    @property
    def advice(self) -> str:
        """The usual remedies if this alarm is raised."""
        return advice_of(self.alarm)


class Alarms:
    """The alarms of a run, which are updated step by step.

    An alarm is raised as soon as its rule finds something bad, and ends when the rule has found
    nothing bad `window` times in a row. A rule without a result changes nothing.

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
        """Create the alarms of a new run, none of which is raised.

        Args:
            members: The names of the reward models if there are several.
            settings: The whole configuration as plain values. A gold metric is searched in it if
                `config` names none.
        """
        self.config = config
        self._history = History(config, members=members, settings=settings)
        self._good_in_a_row: dict[Alarm, int] = {}
        """For each raised alarm, the number of good steps since the last bad one."""
        self._known: set[Alarm] = set()

    @property
    def raised(self) -> tuple[Alarm, ...]:
        """The alarms that are currently raised."""
        return tuple(name for name in ALARMS if name in self._good_in_a_row)

    @property
    def known(self) -> tuple[Alarm, ...]:
        """The alarms whose rules have had enough measurements in this run to give a result."""
        return tuple(name for name in ALARMS if name in self._known)

    @property
    def stopping(self) -> tuple[Alarm, ...]:
        """The raised alarms that are configured to end the run."""
        return tuple(name for name in self.raised if name in self.config.stop_on)

    def see(self, step: int, figures: Mapping[str, float]) -> list[AlarmEvent]:
        """Update all alarms with the metrics of a step, or of a validation after it.

        Returns:
            An event for each alarm that was raised or has ended.
        """
        self._history.add(figures)
        events = []
        for name, check in ALARMS.items():
            finding = None if name in self.config.ignore else check(self._history)
            if finding is None:
                continue
            self._known.add(name)
            state = self._changed(name, finding)
            if state is not None:
                events.append(AlarmEvent(step=step, alarm=name, state=state, finding=finding))
        return events

    def _changed(self, name: Alarm, finding: AlarmFinding) -> Literal["raised", "over"] | None:
        is_raised = name in self._good_in_a_row
        if finding.is_bad:
            self._good_in_a_row[name] = 0
            return None if is_raised else "raised"
        if not is_raised:
            return None
        # A single good step may be chance, and users would ignore an alarm that flickers.
        self._good_in_a_row[name] += 1
        if self._good_in_a_row[name] < self.config.window:
            return None
        del self._good_in_a_row[name]
        return "over"

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the raised alarms as values that JSON can hold."""
        return {
            "history": self._history.state_dict(),
            "raised": dict(self._good_in_a_row),
            "known": list(self.known),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the alarms from a saved state."""
        self._history.load_state_dict(state["history"])
        # A resumed run may ignore an alarm that was raised before.
        wanted = [name for name in ALARMS if name not in self.config.ignore]
        self._good_in_a_row = {n: state["raised"][n] for n in wanted if n in state["raised"]}
        self._known = {name for name in wanted if name in state["known"]}
