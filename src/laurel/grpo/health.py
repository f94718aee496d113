"""Watching a GRPO run: what is measured for the alarms, what they say, and whether the run ends.

The arithmetic is in `observe/health.py`. Nothing here changes what is learned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from laurel.config.environments import EnvironmentsConfig
from laurel.observe.console import completion_text, shorten_middle
from laurel.observe.health import (
    FAILURES,
    LENGTH_CORRELATION,
    REPETITION,
    AlarmEvent,
    Alarms,
    Evidence,
    is_of_validation,
)
from laurel.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from laurel.types import TokenIds

HEALTH_FILE = "health.jsonl"
"""In the run's log directory: a line for each alarm that rises or is over."""
NUM_SAMPLES = 3
LONGEST_TEXT = 4000
"""Characters of a prompt or a completion that are kept as evidence."""
GRAM = 4
"""Tokens that are taken together to see whether they were said before."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Played = tuple[RolloutGroup, Rollout]


def members_of(config: EnvironmentsConfig) -> tuple[str, ...]:
    """Name the reward models, where there are several."""
    return tuple(part.name for part in config.reward_model.models or ())


class HealthWatch:
    """Shows a run's figures to its alarms, and what these say to people."""

    def __init__(self, alarms: Alarms, *, run_dir: Path, say: Callable[[str], None]) -> None:
        """Watch from now on.

        Args:
            alarms: Perhaps those of a checkpoint.
            run_dir: Where `health.jsonl` goes.
            say: Puts text on the console.
        """
        self._alarms = alarms
        self._path = run_dir / HEALTH_FILE
        self._say = say
        self._is_enabled = alarms.config.enabled
        self._looked_for: set[str] = set()
        self._told: set[str] = set()
        """The alarms that were told at length."""

    @property
    def reason_to_stop(self) -> str | None:
        """Name the raised alarms that end the run (`stop_on`), in a sentence."""
        names = self._alarms.stopping if self._is_enabled else ()
        if not names:
            return None
        rising = ", ".join(names)
        return f"ended by an alarm: {rising} (grpo.health.stop_on); {self._path} has the evidence"

    def resumed(self, step: int) -> None:
        """Take out what was written beyond the step of a checkpoint: it will come again."""
        if not self._path.is_file():
            return
        with self._path.open(encoding="utf-8", newline="\n") as lines:
            kept = [line for line in lines if _counts(line, until=step)]
        beside = self._path.with_suffix(".new")
        beside.write_text("".join(kept), encoding="utf-8", newline="\n")
        beside.replace(self._path)

    def step(
        self, step: int, groups: Sequence[RolloutGroup], figures: Mapping[str, float]
    ) -> dict[str, float]:
        """Show the alarms what a step has measured, and tell what they say.

        Args:
            step: Its number.
            groups: Its rollouts.
            figures: What it logs, by full names.

        Returns:
            Figures to be logged with the others: what was measured for the alarms, and
            `health/<alarm>`, 1 while it is raised and 0 otherwise, for those that can be judged.
        """
        if not self._is_enabled:
            return {}
        measured = completion_figures(groups, figures)
        self._judge(step, groups, {**figures, **measured})
        raised = self._alarms.raised
        return measured | {f"health/{n}": float(n in raised) for n in self._alarms.known}

    def validated(
        self, step: int, groups: Sequence[RolloutGroup], figures: Mapping[str, float]
    ) -> None:
        """Show the alarms what a validation has measured, and tell what they say."""
        if self._is_enabled:
            self._judge(step, groups, figures)

    def _judge(
        self, step: int, groups: Sequence[RolloutGroup], figures: Mapping[str, float]
    ) -> None:
        self._look_for_named(figures)
        for event in self._alarms.see(step, figures):
            self._tell(event, groups)

    def _look_for_named(self, figures: Mapping[str, float]) -> None:
        """Say once where a metric that the configuration names is not among the first figures."""
        config, kind = self._alarms.config, any(map(is_of_validation, figures))
        for key in ("gold_metric", "format_metric"):
            name = getattr(config, key)
            if name is None or key in self._looked_for or is_of_validation(name) != kind:
                continue
            self._looked_for.add(key)
            if name not in figures:
                near = [n for n in figures if not n.startswith(("timing/", "performance/"))]
                of_environments = [n for n in near if "env/" in n] or near
                self._say(
                    f"warning: grpo.health.{key}={name} is not among what this run measures; its "
                    f"alarm stays silent. There are: {', '.join(sorted(of_environments))}"
                )

    def _tell(self, event: AlarmEvent, groups: Sequence[RolloutGroup]) -> None:
        found = event.finding
        is_raised = event.state == "raised"
        lines = [f"step {event.step}  alarm {event.state}: {event.alarm}", found.text]
        if is_raised and event.alarm not in self._told:
            self._told.add(event.alarm)
            lines += [
                f"{found.metric} = {found.value:.4g}, threshold {found.threshold:.4g}",
                f"what people do: {event.advice}",
                f"samples: {self._path}",
            ]
            self._say("\n  ".join(lines))
        else:  # a figure about its threshold may come and go
            self._say("  ".join(lines))
        entry = {
            "step": event.step,
            "alarm": event.alarm,
            "state": event.state,
            "metric": found.metric,
            "value": found.value,
            "threshold": found.threshold,
            "baseline": found.baseline,
            "text": found.text,
            "advice": event.advice,
            "samples": samples_of(groups, found.evidence) if is_raised else [],
        }
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk must not cost the step that was taken
            self._say(f"step {event.step}: {self._path} could not be written: {error}")


def _counts(line: str, *, until: int) -> bool:
    """Whether an entry is whole, and of a step that will not come again."""
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= until
    except (ValueError, KeyError, TypeError):  # a kill or a full disk came in the middle of it
        return False


# ------------------------------------------------------------------------------------------ figures


def completion_figures(
    groups: Sequence[RolloutGroup], figures: Mapping[str, float]
) -> dict[str, float]:
    """Measure what alarms read and a step does not log otherwise.

    Args:
        groups: The rollouts of the step.
        figures: Its other figures, for what is left out of the rollouts.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    repeated = [share for r in rollouts if (share := repeated_share(r.ids_L[r.mask_L])) is not None]
    found = {REPETITION: math.fsum(repeated) / len(repeated)} if repeated else {}
    correlation = length_correlation(groups)
    if correlation is not None:
        found[LENGTH_CORRELATION] = correlation
    left_out = figures.get("train/num_failures_left_out", 0.0)
    if rollouts or left_out:
        failed = sum(r.failure is not None for r in rollouts) + left_out
        found[FAILURES] = failed / (len(rollouts) + left_out)
    return found


def repeated_share(ids_L: TokenIds) -> float | None:
    """Give the share of a text's 4-grams of tokens that it has said before; None without any."""
    count = len(ids_L) - GRAM + 1
    if count < 1:
        return None
    ids = ids_L.astype(np.uint64)
    keys = np.zeros(count, dtype=np.uint64)
    for offset in range(GRAM):  # products wrap around at 2**64: two 4-grams hardly ever meet
        keys = (keys + ids[offset : offset + count] + np.uint64(1)) * _FACTOR
    return 1.0 - len(np.unique(keys)) / count


def length_correlation(groups: Sequence[RolloutGroup]) -> float | None:
    """Correlate reward and length within groups, over all of them.

    None where nowhere both of them differ.
    """
    products = squares = other_squares = 0.0
    for group in groups:
        judged = [(r.reward, int(r.mask_L.sum())) for r in group.rollouts_G if r.reward is not None]
        if len(judged) < 2:
            continue
        table = np.array(judged, dtype=np.float64)
        rewards, lengths = (table - table.mean(axis=0)).T
        products += float(rewards @ lengths)
        squares += float(rewards @ rewards)
        other_squares += float(lengths @ lengths)
    size = math.sqrt(squares) * math.sqrt(other_squares)
    return products / size if size > 0.0 else None


# ----------------------------------------------------------------------------------------- evidence


def samples_of(groups: Sequence[RolloutGroup], evidence: Evidence) -> list[dict[str, Any]]:
    """Choose completions that show what an alarm is about, of different prompts if possible."""
    ordered = _ordered(groups, evidence)
    first: dict[str, Played] = {}
    for one in ordered:
        first.setdefault(one[0].id, one)
    others = [one for one in ordered if one is not first[one[0].id]]
    samples = []
    for group, rollout in [*first.values(), *others][:NUM_SAMPLES]:
        prompt = "\n".join(m.content for m in group.task.prompt)
        sample: dict[str, Any] = {
            "prompt": shorten_middle(prompt, LONGEST_TEXT),
            "completion": shorten_middle(completion_text(rollout.messages), LONGEST_TEXT),
            "reward": rollout.reward,
            "num_tokens": int(rollout.mask_L.sum()),
            "truncated": rollout.truncated,
        }
        if rollout.failure is not None:
            sample["failure"] = rollout.failure
        samples.append(sample)
    return samples


def _ordered(groups: Sequence[RolloutGroup], evidence: Evidence) -> list[Played]:
    """Those that show it, the clearest first; where equally clear, in the order of the batch."""
    played = [(group, rollout) for group in groups for rollout in group.rollouts_G]
    if evidence == "failed":
        return [one for one in played if one[1].failure is not None]
    judged = [one for one in played if one[1].reward is not None]
    if evidence == "cut_off":
        return [one for one in judged if one[1].truncated]
    if evidence == "equal":
        apart = [one for one in judged if _spread(one[0]) == 0.0]
        return sorted(apart or judged, key=lambda one: _spread(one[0]))
    clearness: dict[str, Callable[[Rollout], float]] = {
        "best": lambda r: -(r.reward or 0.0),
        "worst": lambda r: r.reward or 0.0,
        "longest": lambda r: -float(r.mask_L.sum()),
        "shortest": lambda r: float(r.mask_L.sum()),
        "repetitive": lambda r: -(repeated_share(r.ids_L[r.mask_L]) or 0.0),
    }
    return sorted(judged, key=lambda one: clearness[evidence](one[1]))


def _spread(group: RolloutGroup) -> float:
    rewards = [r.reward for r in group.rollouts_G if r.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0
