"""A reward model in this process as a Scorer, and the checks it must pass before it is used."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from laurel.data.forest import pack, pack_padded, pad, plant
from laurel.errors import DataError, ScoringContractError
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import GoldenScore, ScoringContract
from laurel.types import Completion, Conversation, Group, PaddedRows, Score, TokenForest, TokenGroup

GOLDEN_TOLERANCE = {"float64": 1e-4, "float32": 1e-4}
"""Allowed difference from a golden score, in units of max(1, |score|), by the dtype of the weights.
They and the arithmetic are the same; what differs is the order of sums on another machine or
library version."""
LOW_PRECISION_TOLERANCE = 5e-2
"""The same where the weights were, or now are, in bfloat16 or float16."""


class LocalScorer:
    """Scores groups with a model held here."""

    def __init__(
        self, model: RewardModel, contract: ScoringContract, *, batch_tokens: int = 8192
    ) -> None:
        """Hold a model.

        Args:
            model: The model.
            contract: The contract it scores by.
            batch_tokens: Token budget of one forward pass.
        """
        self.model = model
        self.contract = contract
        self.batch_tokens = batch_tokens
        # Calls run in threads of their own. A tokenizer is not made for that, and the first call
        # to end would switch dropout on again under the others.
        self._one_at_a_time = threading.Lock()

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`. The arithmetic runs in a thread, beside the event loop."""
        return await asyncio.to_thread(self.score_now, groups)

    def score_now(
        self, groups: Sequence[Group], on_batch: Callable[[int, int], None] | None = None
    ) -> list[tuple[Score, ...]]:
        """The same for callers without an event loop.

        Completions of a group that say the same are computed once: computed twice, the order of
        sums would make them differ in the last digit, and a learner take that for a preference.

        Args:
            groups: What to score.
            on_batch: Called after each forward pass with the groups and tokens done.
        """
        distinct = [tuple(dict.fromkeys(group.completions_G)) for group in groups]
        with self._one_at_a_time:
            prepared = self._encode(
                [replace(group, completions_G=c) for group, c in zip(groups, distinct, strict=True)]
            )
            values_NK = score_tokens(
                self.model,
                [tokens for tokens, _ in prepared if tokens is not None],
                batch_tokens=self.batch_tokens,
                pad_id=self._pad_id,
                on_batch=on_batch,
            )
        rows = iter(values_NK.tolist())
        scores: list[tuple[Score, ...]] = []
        for group, completions, (tokens, failures) in zip(groups, distinct, prepared, strict=True):
            scored = iter(self._verdicts(tokens, rows))
            score_of = {
                completion: next(scored) if failure is None else Score(value=None, failure=failure)
                for completion, failure in zip(completions, failures, strict=True)
            }
            scores.append(tuple(score_of[completion] for completion in group.completions_G))
        return scores

    def _encode(
        self, groups: Sequence[Group]
    ) -> list[tuple[TokenGroup | None, tuple[str | None, ...]]]:
        """The tokens of the completions that can be rendered, and why each other one cannot."""
        groups_left = [group for group in groups if group.completions_G]
        try:
            encoded = iter(self.contract.encode(groups_left) if groups_left else ())
        except DataError:
            return [self._encode_one_by_one(group) for group in groups]
        return [
            (next(encoded) if group.completions_G else None, (None,) * len(group.completions_G))
            for group in groups
        ]

    def _encode_one_by_one(self, group: Group) -> tuple[TokenGroup | None, tuple[str | None, ...]]:
        failures: list[str | None] = []
        for completion in group.completions_G:
            alone = replace(group, completions_G=(completion,))
            try:
                self.contract.encode([alone])
            except DataError as error:
                failures.append(str(error))
            else:
                failures.append(None)
        renderable = tuple(
            completion
            for completion, failure in zip(group.completions_G, failures, strict=True)
            if failure is None
        )
        if not renderable:
            return None, tuple(failures)
        (tokens,) = self.contract.encode([replace(group, completions_G=renderable)])
        return tokens, tuple(failures)

    def _verdicts(
        self, tokens: TokenGroup | None, rows: Iterator[Sequence[float]]
    ) -> Iterator[Score]:
        """The scores of a group, in order; takes as many rows as it has completions."""
        if tokens is None:
            return
        for num_tokens, truncated in zip(tokens.lengths_G, tokens.truncated_G, strict=True):
            yield self._verdict(next(rows), num_tokens, truncated)

    @property
    def _pad_id(self) -> int:
        return self.contract.rules.pad_id or 0

    def _verdict(self, values_K: Sequence[float], num_tokens: int, truncated: bool) -> Score:
        if not all(math.isfinite(value) for value in values_K):
            return Score(
                value=None, num_tokens=num_tokens, truncated=truncated, failure="not finite"
            )
        return Score(
            value=self.contract.scalar(values_K),
            values_K=tuple(values_K),
            num_tokens=num_tokens,
            truncated=truncated,
        )


def score_tokens(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    batch_tokens: int,
    pad_id: int,
    on_batch: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Score tokenised groups, without gradients, in token-budget batches.

    Returns:
        float32 `[N, K]`, in the order of the groups whatever the batches were.
    """
    offsets = np.cumsum([0, *(len(group.branches_ids_G) for group in groups)])
    values_NK = np.empty((offsets[-1], model.num_outputs), dtype=np.float32)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for indices in divide(model, groups, batch_tokens):
                chosen = [groups[i] for i in indices]
                batch = lay_out(model, chosen, pad_id=pad_id)
                scores_NK = model(batch).cpu().numpy()
                rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])
                values_NK[rows] = scores_NK
                if on_batch is not None:
                    on_batch(len(chosen), sum(group.num_tokens for group in chosen))
    finally:
        model.train(was_training)
    return values_NK


def divide(model: RewardModel, groups: Sequence[TokenGroup], batch_tokens: int) -> list[list[int]]:
    """Indices of the groups of each micro-batch, by the model's path."""
    if model.path == "forest":
        return pack([group.num_tokens for group in groups], batch_tokens)
    return pack_padded([group.lengths_G for group in groups], batch_tokens)


def lay_out(
    model: RewardModel, groups: Sequence[TokenGroup], *, pad_id: int, share_prompts: bool = True
) -> TokenForest | PaddedRows:
    """One micro-batch in the form that the model's path reads."""
    if model.path == "forest":
        return plant(groups, share_prompts=share_prompts)
    return pad(groups, pad_id=pad_id)


# ---------------------------------------------------------------------------------- before use


def golden_scores(
    model: RewardModel, contract: ScoringContract, groups: Sequence[Group]
) -> tuple[GoldenScore, ...]:
    """Conversations with their scores, for `scoring.json`.

    Each is scored by itself and in the dtype of the weights, so that the check at load can be
    strict whatever precision either run computes in.
    """
    golden = []
    for group in groups:
        for index in range(len(group.completions_G)):
            conversation = group.conversation(index)
            values_K, num_tokens = _score_alone(model, contract, conversation_group(conversation))
            golden.append(
                GoldenScore(messages=conversation, values_K=values_K, num_tokens=num_tokens)
            )
    return tuple(golden)


def check_golden(model: RewardModel, contract: ScoringContract) -> float:
    """Recompute the golden scores of a loaded model, in the precision they were made in.

    Returns:
        The largest difference.

    Raises:
        ScoringContractError: A score is not the one the model was saved with.
    """
    worst = 0.0
    dtypes = (str(model.weights_dtype).removeprefix("torch."), contract.rules.golden_dtype)
    tolerance = max(GOLDEN_TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE) for dtype in dtypes)
    for golden in contract.rules.golden:
        values_K, num_tokens = _score_alone(model, contract, conversation_group(golden.messages))
        if num_tokens != golden.num_tokens:
            raise ScoringContractError(
                f"a golden conversation has {num_tokens} tokens here and had {golden.num_tokens} "
                "when the model was saved: the tokenizer or its template has changed"
            )
        for value, expected in zip(values_K, golden.values_K, strict=True):
            difference = abs(value - expected) / max(1.0, abs(expected))
            if not difference <= tolerance:
                raise ScoringContractError(
                    f"a golden conversation scores {value:.6g} here and scored {expected:.6g} when "
                    "the model was saved: weights, head or library behave differently"
                )
            worst = max(worst, difference)
    return worst


def conversation_group(messages: Conversation) -> Group:
    """A whole conversation as a group of one completion: its last message."""
    return Group(id="", prompt=messages[:-1], completions_G=(Completion(messages=messages[-1:]),))


def _score_alone(
    model: RewardModel, contract: ScoringContract, group: Group
) -> tuple[tuple[float, ...], int]:
    (tokens,) = contract.encode([group])
    with model.in_full_precision():
        values_NK = score_tokens(model, [tokens], batch_tokens=1, pad_id=contract.rules.pad_id or 0)
    return tuple(float(v) for v in values_NK[0]), tokens.lengths_G[0]
