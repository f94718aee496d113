"""Computes metrics of rollouts (lengths, turns, rewards, environments), and updates alarms.

A metric has the name that NeMo RL gives it, or TRL's if only TRL has it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from laurel.config.environments import EnvironmentsConfig
from laurel.environments.interface import invalid_return, value_kind
from laurel.errors import EnvironmentFailedError
from laurel.grpo.branching import num_sampled, num_sampled_turns
from laurel.grpo.grading import RolloutStats, described
from laurel.models.tokenizer import FOREIGN_MARK
from laurel.observe.console import completion_text, shorten_middle
from laurel.observe.files import replace_file
from laurel.observe.health import AlarmEvent, Alarms
from laurel.observe.history import (
    CONTROL_TOKENS,
    FAILURES,
    LENGTH_CORRELATION,
    REPETITION,
    is_of_validation,
)
from laurel.observe.rules import Evidence
from laurel.observe.user_code import ForkGuard
from laurel.protocols import Environment
from laurel.rewards.remote.replica import failure_reason
from laurel.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from laurel.models.chat import ChatFormat
    from laurel.types import TokenIds

# NeMo RL's environments write such prefixes before their metrics, e.g. `reward_model_env/`.
_OWN_PREFIX = re.compile(r"^\w+_env/")


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return metrics of all rollouts, with or without a reward; lengths are in tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    if not rollouts:
        return {}
    prompts = np.array([_prompt_length(g, r) for g in groups for r in g.rollouts_G])
    written = np.array([np.count_nonzero(r.mask_L) for r in rollouts])
    whole = np.array([len(g.prompt_ids) + len(r.mask_L) for g in groups for r in g.rollouts_G])
    turns = np.array([r.num_turns for r in rollouts])
    cut = np.array([r.truncated for r in rollouts])
    figures = {
        "total_turns": turns.sum(),
        "avg_turns_per_sample": turns.mean(),
        "max_turns_per_sample": turns.max(),
        "natural_termination_rate": (~cut).mean(),
        "truncation_rate": cut.mean(),
        "mean_prompt_length": prompts.mean(),
        "total_num_tokens": whole.sum(),
        "mean_total_tokens_per_sample": whole.mean(),
        "mean_gen_tokens_per_sample": written.mean(),
        "max_gen_tokens_per_sample": written.max(),
        "mean_env_tokens_per_sample": (whole - prompts - written).mean(),
        "completions/mean_length": written.mean(),
        "completions/min_length": written.min(),
        "completions/max_length": written.max(),
        "completions/clipped_ratio": cut.mean(),
        "num_failures": sum(r.failure is not None for r in rollouts),
    }
    if turns.max() > 1:
        figures["sequences_per_rollout"] = np.mean([r.num_sequences for r in rollouts])
    if not cut.all():
        ended = written[~cut]
        figures["completions/mean_terminated_length"] = ended.mean()
        figures["completions/min_terminated_length"] = ended.min()
        figures["completions/max_terminated_length"] = ended.max()
    figures |= {f"reward/failed_{word}": n for word, n in failure_counts(groups).items()}
    if any(rollout.branch is not None for rollout in rollouts):
        sampled = sum(map(num_sampled, rollouts))
        figures["tree/sampled_tokens"] = sampled
        figures["tree/sampled_turns"] = sum(map(num_sampled_turns, rollouts))
        figures["tree/shared_share"] = 1.0 - sampled / max(written.sum(), 1)
        figures["tree/branched_share"] = np.mean([r.branch is not None for r in rollouts])
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if scored:
        rewards = np.array([r.reward for r in scored], dtype=np.float64)
        figures |= {
            "reward": rewards.mean(),
            "reward_std": rewards.std(),
            "reward_min": rewards.min(),
            "reward_max": rewards.max(),
        }
    stepped = [r.steps for r in scored if r.steps is not None]
    if stepped:
        values = [step.value for steps in stepped for step in steps]
        figures["steps/mean_per_completion"] = len(values) / len(stepped)
        figures["steps/share_without"] = np.mean([not steps for steps in stepped])
        if values:
            figures["steps/mean_reward"] = np.mean(values)
    for name in sorted({name for r in scored for name in r.components}):
        part = [r.components[name] for r in scored if name in r.components]
        figures |= {f"rewards/{name}/mean": np.mean(part), f"rewards/{name}/std": np.std(part)}
    return {name: float(value) for name, value in figures.items()}


def _prompt_length(group: RolloutGroup, rollout: Rollout) -> int:
    # The prompt's last tokens are the rollout's own where later contexts have others.
    return len(group.prompt_ids) + (rollout.turns[0].begin if rollout.turns else 0)


def control_token_metrics(groups: Sequence[RolloutGroup], chat: ChatFormat) -> dict[str, float]:
    """Return the share of completions in which the policy spells a control token as text.

    Control tokens are those of the policy, and the marks of common chat templates, which a judge or
    a reward model may have. The contents of messages are plain text, so nothing is gained by them;
    a share that rises shows that a policy tries to end its turn before the model that scores it.
    """
    said = [_said(rollout) for group in groups for rollout in group.rollouts_G]
    if not said:
        return {}
    spelled = sum(bool(chat.control_token_in(text) or FOREIGN_MARK.search(text)) for text in said)
    return {CONTROL_TOKENS.removeprefix("train/"): spelled / len(said)}


def _said(rollout: Rollout) -> str:
    return "\n".join(m.content for m in rollout.messages if m.role == "assistant")


def grading_metrics(stats: RolloutStats) -> dict[str, float]:
    """Return the seconds spent in environments, and the share that overlapped with generation.

    The share is omitted if no environment was called.
    """
    figures = {
        "timing/train/rollout/environment": stats.environment,
        "timing/train/rollout/environment_busy": stats.judging,
        "timing/train/rollout/environment_exposed": stats.exposed,
    }
    share = stats.hidden_share
    return figures if share is None else figures | {"performance/reward_hidden_share": share}


def reuse_metrics(stats: RolloutStats) -> dict[str, float]:
    """Return the share of the tokens of earlier turns that the generator took from its cache.

    The result is empty if no conversation had a second turn.
    """
    if not stats.num_repeated:
        return {}
    return {"performance/turns_reused_share": stats.num_cached / stats.num_repeated}


def unended_metrics(stats: RolloutStats) -> dict[str, float]:
    """Count conversations that ran out of turns or tokens before their environment ended them.

    Counts of 0 are omitted.
    """
    found = {"unended_out_of_turns": stats.num_out_of_turns, "unended_cut_off": stats.num_cut_off}
    return {name: float(number) for name, number in found.items() if number}


def unended_note(stats: RolloutStats, *, max_turns: int) -> str | None:
    """Return a warning about conversations that their environment had not ended.

    Conversations that ran out of tokens are always reported. Those that ran out of turns are
    reported only if `max_turns` is 1, its default, which is too few for such environments; a larger
    limit is the user's choice. The result is None if there is nothing to report.
    """
    said = []
    if stats.num_out_of_turns and max_turns == 1:
        said.append(
            f"{stats.num_out_of_turns} for want of a second turn (grpo.max_rollout_turns=1; set it "
            "to the turns that a conversation may take)"
        )
    if stats.num_cut_off:
        said.append(
            f"{stats.num_cut_off} as the answer was cut off or no room was left "
            "(policy.generation.max_new_tokens, policy.max_total_sequence_length)"
        )
    if not said:
        return None
    return "conversations ended that their environment had not ended: " + "; ".join(said)


def failures_with(figures: dict[str, float], left_out: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of a batch, with the failures in its dropped groups added.

    `num_failures_left_out` and the counter of each reason include the failures of dropped groups;
    `num_failures` covers only the batch.

    Args:
        left_out: The number of failures in dropped groups by reason.
    """
    found = {**figures, "num_failures_left_out": float(sum(left_out.values()))}
    for word, number in left_out.items():
        name = f"reward/failed_{word}"
        found[name] = found.get(name, 0.0) + number
    return found


def failure_counts(groups: Sequence[RolloutGroup]) -> Counter[str]:
    """Count completions without a reward by the category of the failure (`failure_reason`)."""
    counts: Counter[str] = Counter()
    for failure in (r.failure for group in groups for r in group.all_rollouts):
        if failure is not None:
            # Parts of composites put their names before it, each with a colon.
            parts = failure.split(": ", 3)
            words = (failure_reason(": ".join(parts[first:])) for first in range(len(parts)))
            counts[next((word for word in words if word != "other"), "other")] += 1
    return counts


def environment_metrics(
    groups: Sequence[RolloutGroup], environments: Mapping[str, Environment]
) -> dict[str, float]:
    """Return the metrics that each environment computes from its rollouts.

    The metrics are named `env/<name>/<metric>`.

    Raises:
        EnvironmentFailedError: An environment raised an error, or returned no metrics.
    """
    figures: dict[str, float] = {}
    for name, environment in environments.items():
        own = [group for group in groups if group.task.environment == name]
        if not own:
            continue
        measure = environment.global_post_process_and_metrics
        with _own_code(name, "measure", measure):
            returned: Any = measure(environment_batch(own))
            if not isinstance(returned, tuple) or len(returned) != 2:
                expected = "the batch, and a dictionary of figures"
                raise invalid_return(measure, value_kind(returned), expected)
            if not isinstance(returned[1], Mapping):
                kind = f"{value_kind(returned[1])} as figures"
                raise invalid_return(measure, kind, "a dictionary of numbers")
            bare = {_OWN_PREFIX.sub("", key): float(value) for key, value in returned[1].items()}
        figures |= {f"env/{name}/{key}": value for key, value in bare.items()}
    return figures


def end_batch(groups: Sequence[RolloutGroup], environments: Mapping[str, Environment]) -> None:
    """Pass a batch that was trained on to the environments that keep a state, which they update.

    Raises:
        EnvironmentFailedError: An environment raised an error.
    """
    for name, environment in environments.items():
        own = [group for group in groups if group.task.environment == name]
        if own and environment.spec.has_state:
            with _own_code(name, "end", environment.end_batch):
                environment.end_batch(environment_batch(own))


@contextmanager
def _own_code(environment: str, doing: str, method: Callable[..., Any]) -> Iterator[None]:
    # Any exception can come out of an environment's own code: the message names it.
    failed = f"the environment {environment!r} could not {doing} its batch"
    try:
        with ForkGuard():
            yield
    except EnvironmentFailedError as error:
        raise EnvironmentFailedError(f"{failed}: {error}") from error
    except Exception as error:
        raise EnvironmentFailedError(
            f"{failed} ({method.__name__}): {described(error, method)}"
        ) from error


def environment_batch(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return the rewarded rollouts of a batch as the dictionary that environments take.

    `protocols.Environment` lists its keys.
    """
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts_G]
    scored = [(group, rollout) for group, rollout in pairs if rollout.reward is not None]
    names = sorted({name for _, rollout in scored for name in rollout.components})
    return {
        "message_log": [
            [{"role": m.role, "content": m.content} for m in (*g.task.prompt, *r.messages)]
            for g, r in scored
        ],
        "prompt": ["\n".join(m.content for m in g.task.prompt) for g, _ in scored],
        "completion": ["".join(m.content for m in r.messages) for _, r in scored],
        "group_ids": [g.id for g, _ in scored],
        "rewards": torch.tensor([r.reward for _, r in scored], dtype=torch.float32),
        "components": {
            name: torch.tensor(
                [r.components.get(name, 0.0) for _, r in scored], dtype=torch.float32
            )
            for name in names
        },
        "is_end": torch.tensor([not r.truncated for _, r in scored], dtype=torch.bool),
        "prompt_lengths": torch.tensor([_prompt_length(*one) for one in scored], dtype=torch.int64),
        "generation_lengths": torch.tensor(
            [np.count_nonzero(r.mask_L) for _, r in scored], dtype=torch.int64
        ),
        "answers": [r.answer for _, r in scored],
        "notes": [r.note for _, r in scored],
        "num_failures": len(pairs) - len(scored),
    }


# What is measured for the alarms, what they say, and whether the run ends. The arithmetic is in
# `observe/rules.py`; nothing here changes what is learned.

HEALTH_FILE = "health.jsonl"
"""File in the run's log directory: a line for each alarm that is raised or ends."""
NUM_SAMPLES = 3
LONGEST_TEXT = 4000
"""Characters of a prompt or a completion that are kept as evidence."""
GRAM = 4
"""Tokens in an n-gram of `repeated_share`."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_TABLE_BITS = 16
_TABLE_SHIFT = np.uint64(64 - _TABLE_BITS)

Played = tuple[RolloutGroup, Rollout]


def members_of(config: EnvironmentsConfig) -> tuple[str, ...]:
    """Return the names of the reward models whose scores are combined; empty for a single one."""
    return tuple(part.name for part in config.reward_model.models or ())


class HealthWatch:
    """Updates the alarms of a run with metrics, and reports them on the console and in a file."""

    def __init__(self, alarms: Alarms, *, run_dir: Path, say: Callable[[str], None]) -> None:
        """Watch the alarms of a run.

        Args:
            alarms: The alarms, new or restored from a checkpoint.
            run_dir: The log directory of the run, in which alarms are written to `health.jsonl`.
        """
        self._alarms = alarms
        self._path = run_dir / HEALTH_FILE
        self._say = say
        self._is_enabled = alarms.config.enabled
        self._looked_for: set[str] = set()
        # The alarms that were explained in full.
        self._explained: set[str] = set()

    @property
    def reason_to_stop(self) -> str | None:
        """Return why the run must stop: a sentence with the raised alarms that `stop_on` lists.

        None if no such alarm is raised.
        """
        names = self._alarms.stopping if self._is_enabled else ()
        if not names:
            return None
        rising = ", ".join(names)
        return f"ended by an alarm: {rising} (grpo.health.stop_on); {self._path} has the evidence"

    def resumed(self, step: int) -> None:
        """Remove the alarms of steps after `step` from `health.jsonl`.

        A run that resumes from the checkpoint of `step` repeats the later steps, and writes their
        alarms again.
        """
        if not self._path.is_file():
            return
        with self._path.open(encoding="utf-8", newline="\n") as lines:
            kept = [line for line in lines if _counts(line, until=step)]
        with replace_file(self._path) as file:
            file.writelines(kept)

    def step(
        self, step: int, groups: Sequence[RolloutGroup], figures: Mapping[str, float]
    ) -> dict[str, float]:
        """Update the alarms with the metrics of a step; report alarms that were raised or cleared.

        Args:
            figures: The metrics that the step logs, by their full names.

        Returns:
            More metrics to log: those that only alarms use, and for each alarm with enough data
            `health/<alarm>`, 1 while it is raised and 0 otherwise. Empty if alarms are disabled.
        """
        if not self._is_enabled:
            return {}
        measured = completion_metrics(groups, figures)
        self._update_alarms(step, groups, {**figures, **measured})
        raised = self._alarms.raised
        return measured | {f"health/{n}": float(n in raised) for n in self._alarms.known}

    def validated(
        self, step: int, groups: Sequence[RolloutGroup], figures: Mapping[str, float]
    ) -> None:
        """Update the alarms with the metrics of a validation; report those raised or cleared."""
        if self._is_enabled:
            self._update_alarms(step, groups, figures)

    def _update_alarms(
        self, step: int, groups: Sequence[RolloutGroup], figures: Mapping[str, float]
    ) -> None:
        self._look_for_named(figures)
        for event in self._alarms.see(step, figures):
            self._tell(event, groups)

    def _look_for_named(self, figures: Mapping[str, float]) -> None:
        # Warn once if a metric that the configuration names is not among the first ones.
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
        if is_raised and event.alarm not in self._explained:
            self._explained.add(event.alarm)
            lines += [
                f"{found.metric} = {found.value:.4g}, threshold {found.threshold:.4g}",
                f"what people do: {event.advice}",
                f"samples: {self._path}",
            ]
            self._say("\n  ".join(lines))
        else:  # a metric near its threshold may cross it many times
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
    # The entry is whole, and of a step that will not be repeated.
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= until
    except (ValueError, KeyError, TypeError):  # a kill or a full disk came in the middle of it
        return False


def completion_metrics(
    groups: Sequence[RolloutGroup], figures: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of completions that are used only for alarms.

    These are the share of repeated 4-grams, the correlation of reward and length, and the share of
    completions without a reward.

    Args:
        figures: The other metrics of the step, which count the failures of dropped groups.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    written = (r.ids_L if r.mask_L.all() else r.ids_L[r.mask_L] for r in rollouts)
    repeated = [share for ids in written if (share := repeated_share(ids)) is not None]
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
    """Return the share of a text's 4-grams of tokens that occur earlier in the text.

    None for a text of fewer than four tokens.
    """
    count = len(ids_L) - GRAM + 1
    if count < 1:
        return None
    ids = ids_L.astype(np.uint64)
    pairs = ids[:-1] << np.uint64(32)
    pairs += ids[1:]
    # The product wraps around at 2**64: two 4-grams hardly ever meet.
    keys = pairs[:-2] * _FACTOR
    keys += pairs[2:]
    keys *= _FACTOR
    # Sorting all keys is most of the cost of a step's metrics. Instead each writes its number into
    # a table: of equal keys the last one finds itself there, and only those that a different key
    # has overwritten are sorted.
    slots = (keys >> _TABLE_SHIFT).view(np.int64)
    table = np.empty(1 << _TABLE_BITS, dtype=np.int32)
    numbers = np.arange(count, dtype=np.int32)
    table[slots] = numbers
    winners = table.take(slots)
    (overwritten,) = (winners != numbers).nonzero()
    found = keys.take(overwritten)
    lost = found[keys.take(winners.take(overwritten)) != found]
    lost.sort()
    num_distinct = count - len(overwritten)
    if len(lost):
        num_distinct += 1 + int(np.count_nonzero(lost[1:] != lost[:-1]))
    return 1.0 - num_distinct / count


def length_correlation(groups: Sequence[RolloutGroup]) -> float | None:
    """Return the correlation of reward and length within groups, pooled over all groups.

    None if the rewards, or the lengths, are equal within every group.
    """
    products = squares = other_squares = 0.0
    for group in groups:
        rewarded = (r for r in group.rollouts_G if r.reward is not None)
        scored = [(r.reward, np.count_nonzero(r.mask_L)) for r in rewarded]
        if len(scored) < 2:
            continue
        table = np.array(scored, dtype=np.float64)
        rewards, lengths = (table - table.mean(axis=0)).T
        products += float(rewards @ lengths)
        squares += float(rewards @ rewards)
        other_squares += float(lengths @ lengths)
    size = math.sqrt(squares) * math.sqrt(other_squares)
    return products / size if size > 0.0 else None


def samples_of(groups: Sequence[RolloutGroup], evidence: Evidence) -> list[dict[str, Any]]:
    """Return sample completions that show why an alarm was raised, as rows for `health.jsonl`.

    They are of different prompts if possible.

    Args:
        evidence: The property of the completions that are chosen, such as `longest` or `failed`.
    """
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
    # The clearest evidence comes first; equally clear completions keep the order of the batch.
    played = [(group, rollout) for group in groups for rollout in group.rollouts_G]
    if evidence == "failed":
        return [one for one in played if one[1].failure is not None]
    scored = [one for one in played if one[1].reward is not None]
    if evidence == "cut_off":
        return [one for one in scored if one[1].truncated]
    if evidence == "equal":
        apart = [one for one in scored if _spread(one[0]) == 0.0]
        return sorted(apart or scored, key=lambda one: _spread(one[0]))
    clearness: dict[str, Callable[[Rollout], float]] = {
        "best": lambda r: -(r.reward or 0.0),
        "worst": lambda r: r.reward or 0.0,
        "longest": lambda r: -float(r.mask_L.sum()),
        "shortest": lambda r: float(r.mask_L.sum()),
        "control_tokens": lambda r: -float(bool(FOREIGN_MARK.search(_said(r)))),
        "repetitive": lambda r: -(repeated_share(r.ids_L[r.mask_L]) or 0.0),
    }
    return sorted(scored, key=lambda one: clearness[evidence](one[1]))


def _spread(group: RolloutGroup) -> float:
    rewards = [r.reward for r in group.rollouts_G if r.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0
