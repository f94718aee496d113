"""A completion while it is being played: what was said, its tokens, its reward so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from laurel.environments.returned import checked_return, column_of, unfit
from laurel.types import (
    Generated,
    Message,
    Rollout,
)

if TYPE_CHECKING:
    from laurel.types import LogProbs, Mask, TokenIds


@dataclass(slots=True, kw_only=True)
class Unfinished:
    """One completion in the making."""

    index: int
    metadata: dict[str, Any] | None
    group_id: str = ""
    """Of the group it belongs to."""
    messages: list[Message] = field(default_factory=list)
    ids: list[TokenIds] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    truncated: bool = False
    is_over: bool = False
    num_turns: int = 0
    weight_version: int | None = None
    answer: str | None = None
    stop_strings: tuple[str, ...] = ()
    observation: Mapping[str, str] = field(default_factory=dict)
    """What the environment said last."""

    def say(self, generated: Generated) -> None:
        """Take in a turn of the policy."""
        self._append(generated.ids_L, True, generated.logprobs_L)
        self.messages.append(Message("assistant", generated.text))
        self.num_turns += 1
        self.truncated = generated.finish_reason != "stop"
        versions = (self.weight_version, generated.weight_version)
        self.weight_version = min(v for v in versions if v is not None)

    def hear(self, observation: Mapping[str, str], ids: TokenIds) -> None:
        """Take in what the environment says."""
        self._append(ids, False, np.zeros(len(ids), dtype=np.float32))
        self.messages.append(Message(observation["role"], observation["content"]))

    def _append(self, ids: TokenIds, is_policy: bool, logprobs: LogProbs) -> None:
        self.ids.append(np.asarray(ids, dtype=np.int32))
        self.masks.append(np.full(len(ids), is_policy))
        self.logprobs.append(np.asarray(logprobs, dtype=np.float32))

    def fail(self, reason: str) -> None:
        """End without a reward."""
        self.failure, self.is_over = reason, True

    def finished(self) -> Rollout:
        """What became of it."""
        return Rollout(
            messages=tuple(self.messages),
            ids_L=np.concatenate(self.ids),
            mask_L=np.concatenate(self.masks),
            logprobs_L=np.concatenate(self.logprobs),
            reward=None if self.failure is not None else self.reward,
            components=self.components,
            failure=self.failure,
            truncated=self.truncated,
            num_turns=self.num_turns,
            weight_version=self.weight_version or 0,
            answer=self.answer,
        )


def take_verdict(step: Callable[..., Any], returned: Any, games: Sequence[Unfinished]) -> None:
    """Give each conversation its part of what `step` returned.

    Raises:
        EnvironmentFailedError: It is no verdict on these conversations.
    """
    size = len(games)
    verdict = checked_return(step, returned, size)
    parts = verdict.rewards if isinstance(verdict.rewards, dict) else {"": verdict.rewards}
    columns = {name: column_of(step, part, size, "rewards") for name, part in parts.items()}
    over = column_of(step, verdict.terminateds, size, "terminateds")
    for i, game in enumerate(games):
        failure = verdict.failures[i] if verdict.failures is not None else None
        observation = verdict.observations[i]
        values = {name: float(column[i]) for name, column in columns.items()}
        for name, value in values.items():
            if failure is None and not np.isfinite(value):
                what = f"the reward {value}" + (f" as {name!r}" if name else "")
                failure = str(unfit(step, what, "a finite number, or a reason in `failures`"))
        if failure is None and not over[i] and not _is_message(observation):
            failure = f"{observation!r} is no observation: a role and a content are expected"
        if failure is not None:
            game.fail(failure)
            continue
        game.reward += sum(values.values())
        for name, value in values.items():
            if name:
                game.components[name] = game.components.get(name, 0.0) + value
        game.is_over = bool(over[i])
        game.metadata = verdict.metadata[i]
        stops = verdict.next_stop_strings[i]
        game.stop_strings = game.stop_strings if stops is None else tuple(stops)
        game.answer = verdict.answers[i] if verdict.answers is not None else None
        game.observation = observation


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )
