"""A reward model in this process as a Scorer, and the checks it must pass before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from laurel.data.forest import pack, pack_padded, pad, plant
from laurel.errors import ScoringContractError
from laurel.models.decoder import Path
from laurel.models.higher_precision import weights_as
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import GoldenScore, ScoringContract
from laurel.rewards.contract_scorer import ContractScorer, OnBatch
from laurel.types import Completion, Conversation, Group, PaddedRows, TokenForest, TokenGroup

GOLDEN_TOLERANCE = {"float64": 1e-4, "float32": 1e-4}
"""Allowed difference from a golden score, in units of max(1, |score|), by the dtype of the weights.
They and the arithmetic are the same; what differs is the order of sums on another machine or
library version."""
LOW_PRECISION_TOLERANCE = 5e-2
"""The same where the weights were, or now are, in bfloat16 or float16."""


class LocalScorer(ContractScorer):
    """Scores groups with a model held here."""

    def __init__(
        self,
        model: RewardModel,
        contract: ScoringContract,
        *,
        batch_tokens: int = 8192,
        batch_size: int | None = None,
    ) -> None:
        """Hold a model; see `ContractScorer` for the rest."""
        super().__init__(contract, batch_tokens=batch_tokens, batch_size=batch_size)
        self.model = model
        self._home: torch.device | None = None
        """Where the weights belong while they rest on the host."""

    @property
    def path(self) -> Path:
        """See `ContractScorer`."""
        return self.model.path

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        with in_higher_precision(self.model, wanted=exactly):
            return score_tokens(
                self.model,
                tokens,
                batch_tokens=self.batch_tokens,
                batch_size=self.batch_size,
                pad_id=self.pad_id,
                on_batch=on_batch,
            )

    def sleep(self) -> None:
        """Move the weights to the host. On a CPU they stay where they are."""
        device = next(self.model.parameters()).device
        if device.type != "cpu":
            self._home = device
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the weights back."""
        if self._home is not None:
            self.model.to(self._home)
            self._home = None


@contextmanager
def in_higher_precision(model: RewardModel, *, wanted: bool = True) -> Iterator[None]:
    """Compute with the same weights in a precision that rounds far less; several times slower."""
    if not wanted:
        yield
        return
    rounded = (torch.bfloat16, torch.float16)
    is_rough = model.precision in rounded or model.weights_dtype in rounded
    dtype = torch.float32 if is_rough else torch.float64
    with model.in_full_precision(), weights_as(model, dtype):
        yield


def score_tokens(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    batch_tokens: int,
    pad_id: int,
    batch_size: int | None = None,
    on_batch: OnBatch | None = None,
) -> np.ndarray:
    """Score tokenised groups, without gradients, in token-budget batches.

    Returns:
        float32 `[N, K]`, in the order of the groups whatever the batches were.
    """
    parts = divide(model.path, groups, batch_tokens, batch_size)
    batches = [[groups[i] for i in part] for part in parts]
    values = score_batches(model, batches, pad_id=pad_id, on_batch=on_batch)
    return in_order(groups, parts, values, num_outputs=model.num_outputs)


def score_batches(
    model: RewardModel,
    batches: Sequence[Sequence[TokenGroup]],
    *,
    pad_id: int,
    on_batch: OnBatch | None = None,
) -> list[np.ndarray]:
    """Score micro-batches, without gradients.

    Returns:
        float32 `[N, K]` of each.
    """
    values = []
    was_training = model.training
    model.eval()
    try:
        with model.without_gradients():
            for batch in batches:
                values.append(model(lay_out(model, batch, pad_id=pad_id)).cpu().numpy())
                if on_batch is not None:
                    on_batch(len(batch), sum(group.num_tokens for group in batch))
    finally:
        model.train(was_training)
    return values


def in_order(
    groups: Sequence[TokenGroup],
    parts: Sequence[Sequence[int]],
    values: Sequence[np.ndarray],
    *,
    num_outputs: int,
) -> np.ndarray:
    """Scores of micro-batches in the order of the groups, `[N, K]`.

    Args:
        groups: All of them.
        parts: Indices of the groups of each micro-batch.
        values: Scores of each micro-batch.
        num_outputs: K.
    """
    offsets = np.cumsum([0, *(len(group.branches_ids_G) for group in groups)])
    values_NK = np.empty((offsets[-1], num_outputs), dtype=np.float32)
    for indices, scores_NK in zip(parts, values, strict=True):
        rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])
        values_NK[rows] = scores_NK
    return values_NK


def divide(
    path: Path,
    groups: Sequence[TokenGroup],
    batch_tokens: int,
    batch_size: int | None = None,
) -> list[list[int]]:
    """Indices of the groups of each micro-batch, by the model's path."""
    if path == "forest":
        return pack([group.num_tokens for group in groups], batch_tokens)
    lengths = [group.lengths_G for group in groups]
    if batch_size is not None:
        return _pack_rows(lengths, batch_size)
    return pack_padded(lengths, batch_tokens)


def _pack_rows(lengths: Sequence[tuple[int, ...]], batch_size: int) -> list[list[int]]:
    """Groups of similar lengths, so many rows at a time; a larger group travels alone."""
    bins: list[list[int]] = []
    rows = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-max(lengths[i]), i)):
        more = len(lengths[index])
        if not bins or rows + more > batch_size:
            bins.append([])
            rows = 0
        bins[-1].append(index)
        rows += more
    return bins


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
    return golden_by(partial(_score_alone, model, pad_id=contract.rules.pad_id), contract, groups)


def golden_by(
    score_alone: Callable[[Sequence[TokenGroup]], np.ndarray],
    contract: ScoringContract,
    groups: Sequence[Group],
) -> tuple[GoldenScore, ...]:
    """`golden_scores` of a model that is elsewhere.

    Args:
        score_alone: Scores `[N, K]` of whole conversations, as `golden_scores` says.
        contract: The contract.
        groups: What is scored.
    """
    conversations = [
        group.conversation(index) for group in groups for index in range(len(group.completions_G))
    ]
    tokens = contract.encode([conversation_group(messages) for messages in conversations])
    return tuple(
        GoldenScore(messages=messages, values_K=tuple(values_K), num_tokens=one.lengths_G[0])
        for messages, one, values_K in zip(
            conversations, tokens, score_alone(tokens).tolist(), strict=True
        )
    )


def check_golden(model: RewardModel, contract: ScoringContract) -> float:
    """Recompute the golden scores of a loaded model, in the precision they were made in.

    Returns:
        The largest difference.

    Raises:
        ScoringContractError: A score is not the one the model was saved with.
    """
    return check_golden_by(
        partial(_score_alone, model, pad_id=contract.rules.pad_id),
        contract,
        dtype=str(model.exact_dtype).removeprefix("torch."),
        why=lambda values_K, expected_K: "weights, head or library behave differently",
    )


def check_golden_by(
    score_alone: Callable[[Sequence[TokenGroup]], np.ndarray],
    contract: ScoringContract,
    *,
    dtype: str,
    why: Callable[[Sequence[float], Sequence[float]], str],
) -> float:
    """`check_golden` of a model that is elsewhere.

    Args:
        score_alone: Scores `[N, K]` of whole conversations.
        contract: The contract.
        dtype: What they are computed in.
        why: What may be the cause, for the error, from what came out and what should have, `[K]`.
    """
    worst = 0.0
    tolerance = golden_tolerance(contract, dtype)
    for golden in contract.rules.golden:
        tokens = contract.encode([conversation_group(golden.messages)])
        num_tokens = tokens[0].lengths_G[0]
        if num_tokens != golden.num_tokens:
            raise ScoringContractError(
                f"a golden conversation has {num_tokens} tokens here and had {golden.num_tokens} "
                "when the model was saved: the tokenizer or its template has changed"
            )
        values_K = score_alone(tokens)[0].tolist()
        for value, expected in zip(values_K, golden.values_K, strict=True):
            difference = abs(value - expected) / max(1.0, abs(expected))
            if not difference <= tolerance:
                raise ScoringContractError(
                    f"a golden conversation scores {value:.6g} here and scored {expected:.6g} when "
                    f"the model was saved: {why(values_K, golden.values_K)}"
                )
            worst = max(worst, difference)
    return worst


def golden_tolerance(contract: ScoringContract, dtype: str) -> float:
    """Allowed difference from golden scores, in units of max(1, |score|)."""
    dtypes = (dtype, contract.rules.golden_dtype)
    return max(GOLDEN_TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE) for dtype in dtypes)


def conversation_group(messages: Conversation) -> Group:
    """A whole conversation as a group of one completion: its last message."""
    return Group(id="", prompt=messages[:-1], completions_G=(Completion(messages=messages[-1:]),))


def _score_alone(
    model: RewardModel, groups: Sequence[TokenGroup], *, pad_id: int | None
) -> np.ndarray:
    """Scores `[N, K]`, each group by itself and in the dtype of the weights."""
    with model.in_full_precision():
        return score_tokens(model, groups, batch_tokens=1, pad_id=pad_id or 0)
