"""Figures of a batch of rollouts: lengths, turns, rewards and what the environments measure.

Names are NeMo RL's where it has one, TRL's where only it has one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from laurel.environments.interface import unfit, value_kind
from laurel.errors import EnvironmentFailedError
from laurel.grpo.judging import RolloutStats, described
from laurel.protocols import Environment
from laurel.rewards.remote.replica import failure_reason
from laurel.types import RolloutGroup

_OWN_PREFIX = re.compile(r"^\w+_env/")
"""What NeMo RL's environments write before their figures, e.g. `reward_model_env/`."""


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Measure all rollouts, judged or not; lengths are in tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    if not rollouts:
        return {}
    prompts = np.array([len(g.prompt_ids) for g in groups for _ in g.rollouts_G])
    written = np.array([int(r.mask_L.sum()) for r in rollouts])
    heard = np.array([int((~r.mask_L).sum()) for r in rollouts])
    turns = np.array([r.num_turns for r in rollouts])
    cut = np.array([r.truncated for r in rollouts])
    figures = {
        "total_turns": turns.sum(),
        "avg_turns_per_sample": turns.mean(),
        "max_turns_per_sample": turns.max(),
        "natural_termination_rate": (~cut).mean(),
        "truncation_rate": cut.mean(),
        "mean_prompt_length": prompts.mean(),
        "total_num_tokens": (prompts + written + heard).sum(),
        "mean_total_tokens_per_sample": (prompts + written + heard).mean(),
        "mean_gen_tokens_per_sample": written.mean(),
        "max_gen_tokens_per_sample": written.max(),
        "mean_env_tokens_per_sample": heard.mean(),
        "completions/mean_length": written.mean(),
        "completions/min_length": written.min(),
        "completions/max_length": written.max(),
        "completions/clipped_ratio": cut.mean(),
        "num_failures": sum(r.failure is not None for r in rollouts),
    }
    if not cut.all():
        ended = written[~cut]
        figures["completions/mean_terminated_length"] = ended.mean()
        figures["completions/min_terminated_length"] = ended.min()
        figures["completions/max_terminated_length"] = ended.max()
    figures |= {f"reward/failed_{word}": n for word, n in failure_counts(groups).items()}
    judged = [rollout for rollout in rollouts if rollout.reward is not None]
    if judged:
        rewards = np.array([r.reward for r in judged], dtype=np.float64)
        figures |= {
            "reward": rewards.mean(),
            "reward_std": rewards.std(),
            "reward_min": rewards.min(),
            "reward_max": rewards.max(),
        }
    for name in sorted({name for r in judged for name in r.components}):
        part = [r.components[name] for r in judged if name in r.components]
        figures |= {f"rewards/{name}/mean": np.mean(part), f"rewards/{name}/std": np.std(part)}
    return {name: float(value) for name, value in figures.items()}


def judging_metrics(stats: RolloutStats) -> dict[str, float]:
    """Measure where the time of environments went, and how much of it drawing has hidden."""
    figures = {
        "timing/train/rollout/environment": stats.environment,
        "timing/train/rollout/environment_busy": stats.judging,
        "timing/train/rollout/environment_exposed": stats.exposed,
    }
    share = stats.hidden_share
    return figures if share is None else figures | {"performance/reward_hidden_share": share}


def unended_metrics(stats: RolloutStats) -> dict[str, float]:
    """Count conversations that ended though their environment would have gone on."""
    found = {"unended_out_of_turns": stats.num_out_of_turns, "unended_cut_off": stats.num_cut_off}
    return {name: float(number) for name, number in found.items() if number}


def unended_note(stats: RolloutStats, *, max_turns: int) -> str | None:
    """Explain them; None where there are none, or a limit above 1 has ended them all."""
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
    """Add the failures of groups that were left out of a batch to its figures.

    They are in the counters of each reason, but not in `num_failures`, which is of the batch.
    """
    found = {**figures, "num_failures_left_out": float(sum(left_out.values()))}
    for word, number in left_out.items():
        name = f"reward/failed_{word}"
        found[name] = found.get(name, 0.0) + number
    return found


def failure_counts(groups: Sequence[RolloutGroup]) -> Counter[str]:
    """Count completions without a reward, by the word for why (`failure_reason`)."""
    counts: Counter[str] = Counter()
    for failure in (r.failure for group in groups for r in group.rollouts_G):
        if failure is not None:
            # Parts of composites put their names before it, each with a colon.
            parts = failure.split(": ", 3)
            words = (failure_reason(": ".join(parts[first:])) for first in range(len(parts)))
            counts[next((word for word in words if word != "other"), "other")] += 1
    return counts


def environment_metrics(
    groups: Sequence[RolloutGroup], environments: Mapping[str, Environment]
) -> dict[str, float]:
    """Let each environment measure its own samples, as `env/<name>/<figure>`.

    Raises:
        EnvironmentFailedError: It raised something, or what it gave are no figures.
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
                raise unfit(measure, value_kind(returned), expected)
            if not isinstance(returned[1], Mapping):
                kind = f"{value_kind(returned[1])} as figures"
                raise unfit(measure, kind, "a dictionary of numbers")
            bare = {_OWN_PREFIX.sub("", key): float(value) for key, value in returned[1].items()}
        figures |= {f"env/{name}/{key}": value for key, value in bare.items()}
    return figures


def end_batch(groups: Sequence[RolloutGroup], environments: Mapping[str, Environment]) -> None:
    """Let the state of environments go on from a batch that was learned from.

    Raises:
        EnvironmentFailedError: One of them raised something.
    """
    for name, environment in environments.items():
        own = [group for group in groups if group.task.environment == name]
        if own and environment.spec.has_state:
            with _own_code(name, "end", environment.end_batch):
                environment.end_batch(environment_batch(own))


@contextmanager
def _own_code(environment: str, doing: str, method: Callable[..., Any]) -> Iterator[None]:
    """Say whose code it was that failed: anything can come out of an environment's own."""
    failed = f"the environment {environment!r} could not {doing} its batch"
    try:
        yield
    except EnvironmentFailedError as error:
        raise EnvironmentFailedError(f"{failed}: {error}") from error
    except Exception as error:
        raise EnvironmentFailedError(
            f"{failed} ({method.__name__}): {described(error, method)}"
        ) from error


def environment_batch(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Make the batch that an environment measures (`protocols.Environment`)."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts_G]
    judged = [(group, rollout) for group, rollout in pairs if rollout.reward is not None]
    names = sorted({name for _, rollout in judged for name in rollout.components})
    return {
        "message_log": [
            [{"role": m.role, "content": m.content} for m in (*g.task.prompt, *r.messages)]
            for g, r in judged
        ],
        "prompt": ["\n".join(m.content for m in g.task.prompt) for g, _ in judged],
        "completion": ["".join(m.content for m in r.messages) for _, r in judged],
        "group_ids": [g.id for g, _ in judged],
        "rewards": torch.tensor([r.reward for _, r in judged], dtype=torch.float32),
        "components": {
            name: torch.tensor(
                [r.components.get(name, 0.0) for _, r in judged], dtype=torch.float32
            )
            for name in names
        },
        "is_end": torch.tensor([not r.truncated for _, r in judged], dtype=torch.bool),
        "prompt_lengths": torch.tensor([len(g.prompt_ids) for g, _ in judged], dtype=torch.int64),
        "generation_lengths": torch.tensor(
            [int(r.mask_L.sum()) for _, r in judged], dtype=torch.int64
        ),
        "answers": [r.answer for _, r in judged],
        "notes": [r.note for _, r in judged],
        "num_failures": len(pairs) - len(judged),
    }
