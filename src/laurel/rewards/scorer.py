"""The base of all scorers with a scoring contract: tokens in, scores out."""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch

from laurel.config.policy import LEAST_SHARED
from laurel.data.forest import (
    bin_pack,
    least_worth_sharing,
    pack_padded,
    shared_parts,
    to_forest,
    to_padded,
)
from laurel.errors import ScoringContractError, setting_of
from laurel.models.forest.decoder import Path, RewardModel, weights_as
from laurel.models.scoring import GoldenScore, ScoringContract
from laurel.rewards.preparing import Prepared, Preparing, Rendered, fill_in, prepared_by
from laurel.rewards.version import model_version
from laurel.types import Completion, Conversation, Group, PaddedRows, Score, TokenForest, TokenGroup

OnBatch = Callable[[int, int], None]
"""Called with the groups and the tokens of each micro-batch that is done."""


class ModelScorer(ABC):
    """Scores by the contract of a model, for callers with and without an event loop."""

    def __init__(self, contract: ScoringContract) -> None:
        self.contract = contract
        self.preparers: Preparing | None = None
        """Workers that render and tokenise instead; they end with the scorer's context."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """Form in which batches reach the model."""

    @property
    def pad_id(self) -> int:
        """Token that fills up padded rows."""
        return self.contract.rules.pad_id or 0

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups (`protocols.Scorer`); the model computes in a thread."""
        return await asyncio.to_thread(self.score_now, groups)

    @abstractmethod
    def score_now(
        self, groups: Sequence[Group], on_batch: OnBatch | None = None
    ) -> list[tuple[Score, ...]]:
        """Score groups from a thread without an event loop.

        Args:
            on_batch: Called with the progress after each micro-batch.
        """

    @abstractmethod
    def encode(self, groups: Sequence[Group]) -> list[TokenGroup]:
        """Tokenise groups with at least one completion each.

        Raises:
            DataError: A conversation cannot be rendered.
        """

    @abstractmethod
    def resting(self) -> AbstractContextManager[None]:
        """Free the memory of devices within the context, once running calls are done.

        Calls for scores block until the context ends, so make none in the same thread.
        """

    def close(self) -> None:  # noqa: B027  a model in this process is freed with the scorer
        """Free processes and memory. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the scorer and its tokenizer workers."""
        try:
            self.close()
        finally:
            if self.preparers is not None:
                self.preparers.close()


class _Once(NamedTuple):
    tokens: TokenGroup
    index_G: list[int]
    """The index in `tokens` of each completion of the original group."""


def _each_once(tokens: TokenGroup) -> _Once:
    # Computed twice, equal completions would differ in the last digit by the order of sums, and a
    # learner would take that for a preference. Where they are cut, other texts are equal, too.
    first: dict[tuple[bytes, bool], int] = {}
    keys = [
        (ids.tobytes(), is_cut)
        for ids, is_cut in zip(tokens.branches_ids_G, tokens.truncated_G, strict=True)
    ]
    kept = [index for index, key in enumerate(keys) if first.setdefault(key, index) == index]
    place = {index: number for number, index in enumerate(kept)}
    return _Once(
        tokens if len(kept) == len(keys) else tokens.select(kept),
        [place[first[key]] for key in keys],
    )


class ContractScorer(ModelScorer):
    """Renders groups by a contract and turns outputs of a model, here or elsewhere, into scores."""

    has_exact_scores = True
    """Whether `score_exactly` can compute in a higher precision."""
    source: str | None = None
    """Directory or name of the model; None if it was made in this process."""

    def __init__(self, contract: ScoringContract, *, batch_tokens: int) -> None:
        """Hold a contract.

        Args:
            batch_tokens: Token budget of one forward pass.
        """
        super().__init__(contract)
        self.batch_tokens = batch_tokens
        # Calls run in threads of their own. A tokenizer is not thread-safe, and the first call to
        # end would switch dropout on again under the others.
        self._one_at_a_time = threading.Lock()

    @abstractmethod
    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        """Compute the outputs of all completions, float32 `[N, K]`, in order.

        With `exactly`, the same weights compute in a higher precision.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of devices; call `resting`, which locks the scorer meanwhile."""

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep`."""

    @property
    def is_ended(self) -> bool:
        """Whether the workers are gone, so that every call raises their error."""
        return False

    @property
    def version(self) -> str:
        """Version of the model, for which its files are read; empty without a `source`."""
        return "" if self.source is None else model_version(self.source, self.contract.rules)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Let the model sleep within the context, once running calls are done."""
        with self._one_at_a_time:
            self.sleep()
            try:
                yield
            finally:
                self.wake()

    def score_now(
        self, groups: Sequence[Group], on_batch: OnBatch | None = None
    ) -> list[tuple[Score, ...]]:
        """Score groups from a thread without an event loop; the same tokens get the same score."""
        with self._one_at_a_time:
            return self._scored(groups, on_batch)

    def score_exactly(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups with the same weights in a higher precision; several times slower.

        The rounding error of `score_now` is measured against it.
        """
        with self._one_at_a_time:
            return self._scored(groups, None, exactly=True)

    def _scored(
        self, groups: Sequence[Group], on_batch: OnBatch | None, *, exactly: bool = False
    ) -> list[tuple[Score, ...]]:
        prepared = self._encode(groups)
        found = [None if tokens is None else _each_once(tokens) for tokens, _ in prepared]
        values_NK = self._values(
            [one.tokens for one in found if one is not None], on_batch, exactly=exactly
        )
        rows = iter(values_NK.tolist())
        scores: list[tuple[Score, ...]] = []
        for once, (_, failures) in zip(found, prepared, strict=True):
            verdicts = list(self._verdicts(once.tokens, rows)) if once is not None else []
            scores.append(fill_in(failures, [verdicts[i] for i in once.index_G] if once else []))
        return scores

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Render and tokenise groups, as `score_now` does first; equal completions stay."""
        with self._one_at_a_time:
            return self._encode(groups)

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """Tokenise one conversation that its client has rendered."""
        with self._one_at_a_time:
            return self.contract.encode_rendered(row)

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """Score tokenised groups, the second half of `score_now`."""
        with self._one_at_a_time:
            rows = iter(self._values(tokens, None, exactly=False).tolist())
            return [tuple(self._verdicts(group, rows)) for group in tokens]

    def encode(self, groups: Sequence[Group]) -> list[TokenGroup]:
        """Tokenise groups with at least one completion each, one call at a time."""
        with self._one_at_a_time:
            return self.contract.encode(groups)

    def _encode(self, groups: Sequence[Group]) -> list[Prepared]:
        if self.preparers is not None:
            return self.preparers.prepare(groups)
        return prepared_by(self.contract, groups)

    def _verdicts(self, tokens: TokenGroup, rows: Iterator[Sequence[float]]) -> Iterator[Score]:
        """Return the scores of a group, in order; consumes one row for each token that is read."""
        for num_tokens, truncated, num_reads in zip(
            tokens.lengths_G, tokens.truncated_G, tokens.num_reads_G, strict=True
        ):
            outputs_K = [output for _ in range(num_reads) for output in next(rows)]
            value: float | None = None
            values: tuple[float, ...] = ()
            failure: str | None = None
            if not outputs_K:
                most = self.contract.rules.max_length
                failure = f"longer than {most:,} tokens, so not all of its steps can be read"
            elif not all(map(math.isfinite, outputs_K)):
                failure = "not finite"
            else:
                value = self.contract.scalar(outputs_K)
                values = self.contract.values(outputs_K)
            yield Score(
                value=value,
                values_K=values,
                num_tokens=num_tokens,
                truncated=truncated,
                failure=failure,
            )


# A reward model in this process as a Scorer, and the check of its golden scores.

GOLDEN_TOLERANCE = {"float64": 1e-4, "float32": 1e-4}
"""Allowed difference from a golden score, in units of max(1, |score|), by the dtype of the weights.

Weights and arithmetic are the same; the order of sums differs between machines and versions.
"""
LOW_PRECISION_TOLERANCE = 5e-2
"""Allowed difference where the weights were, or now are, in bfloat16 or float16."""


class LocalScorer(ContractScorer):
    """Scores groups with a model held in this process."""

    def __init__(
        self, model: RewardModel, contract: ScoringContract, *, batch_tokens: int = 8192
    ) -> None:
        """Hold a model; `ContractScorer` describes the other arguments."""
        super().__init__(contract, batch_tokens=batch_tokens)
        self.model = model
        # The device that the weights return to when they sleep on the host.
        self._home: torch.device | None = None

    @property
    def path(self) -> Path:
        """Form in which batches reach the model."""
        return self.model.path

    def _values(
        self, tokens: Sequence[TokenGroup], on_batch: OnBatch | None, *, exactly: bool
    ) -> np.ndarray:
        with in_higher_precision(self.model, wanted=exactly):
            return score_tokens(
                self.model,
                tokens,
                batch_tokens=self.batch_tokens,
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
    on_batch: OnBatch | None = None,
) -> np.ndarray:
    """Score tokenised groups, without gradients, in token-budget batches.

    A larger group is computed in parts of this size.

    Returns:
        float32 `[N, K]`, in the order of the groups whatever the batches were.
    """
    parts, least_shared = divide_into_micro_batches(model.path, groups, batch_tokens)
    values = score_batches(
        model,
        [[groups[i] for i in part] for part in parts],
        pad_id=pad_id,
        least_shared=least_shared,
        part_tokens=batch_tokens,
        on_batch=on_batch,
    )
    return in_order(groups, parts, values, num_outputs=model.num_outputs)


CPU_PASS_TOKENS = 1024
"""Tokens that a CPU computes at a time: the widest activations of more leave its cache, and a pass
takes 10 to 15 % longer for each token (docs/benchmarks.md)."""


def score_batches(
    model: RewardModel,
    batches: Sequence[Sequence[TokenGroup]],
    *,
    pad_id: int,
    least_shared: int | None = None,
    part_tokens: int | None = None,
    on_batch: OnBatch | None = None,
) -> list[np.ndarray]:
    """Score micro-batches, without gradients.

    Args:
        batches: The groups of each micro-batch.
        least_shared: The fewest tokens that sequences share beyond prompts, with which the
            micro-batches were divided (`divide_into_micro_batches`).
        part_tokens: Most tokens of one pass, where the model reads forests; a group with more is
            computed in parts. None: any number.
        on_batch: Called after each micro-batch with the number of its groups and of its tokens.

    Returns:
        float32 `[N, K]` of each micro-batch.
    """
    values = []
    was_training = model.training
    model.eval()
    try:
        with model.without_gradients():
            for batch in batches:
                parts = _passes(model, batch, least_shared)
                inputs = (
                    model_batch(
                        model,
                        [batch[i] for i in part],
                        pad_id=pad_id,
                        least_shared=least_shared,
                        part_tokens=part_tokens,
                    )
                    for part in parts
                )
                passes = [model(one).cpu().numpy() for one in inputs]
                values.append(in_order(batch, parts, passes, num_outputs=model.num_outputs))
                if on_batch is not None:
                    on_batch(len(batch), sum(group.num_tokens for group in batch))
    finally:
        model.train(was_training)
    return values


def _passes(
    model: RewardModel, batch: Sequence[TokenGroup], least_shared: int | None
) -> Sequence[Sequence[int]]:
    """The groups of a micro-batch that are computed together, by their indices."""
    if model.device.type != "cpu" or model.path != "forest" or model.mesh is not None:
        return [range(len(batch))]
    if least_shared is not None:
        return _pack_shared(batch, CPU_PASS_TOKENS, least_shared)
    parts: list[list[int]] = []
    num_tokens = CPU_PASS_TOKENS
    for index, group in enumerate(batch):
        if num_tokens + group.num_tokens > CPU_PASS_TOKENS:
            parts.append([])
            num_tokens = 0
        parts[-1].append(index)
        num_tokens += group.num_tokens
    return parts


LEAST_PART = 256
"""Fewer tokens are no part of a group: the passes would only cost time."""


def by_completion(values_NK: np.ndarray, counts: Iterable[int]) -> list[list[float]]:
    """Return the outputs of each completion, given the number of tokens at which it is read."""
    rows = iter(values_NK.tolist())
    return [[output for _ in range(count) for output in next(rows)] for count in counts]


def in_order(
    groups: Sequence[TokenGroup],
    parts: Sequence[Sequence[int]],
    values: Sequence[np.ndarray],
    *,
    num_outputs: int,
) -> np.ndarray:
    """Return the scores of micro-batches in the order of the groups, `[N, K]`.

    Args:
        parts: Indices of the groups of each micro-batch.
        values: Scores of each micro-batch.
        num_outputs: K, the outputs of the model.
    """
    offsets = np.cumsum([0, *(sum(group.num_reads_G) for group in groups)])
    values_NK = np.empty((offsets[-1], num_outputs), dtype=np.float32)
    for indices, scores_NK in zip(parts, values, strict=True):
        rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])
        values_NK[rows] = scores_NK
    return values_NK


def divide_into_micro_batches(
    path: Path, groups: Sequence[TokenGroup], batch_tokens: int
) -> tuple[list[list[int]], int | None]:
    """Divide groups into micro-batches, by the model's path.

    Returns:
        The indices of the groups of each micro-batch, and the fewest tokens that sequences share
        beyond prompts in all of them; None: they share prompts alone.
    """
    if path == "padded":
        return pack_padded([group.lengths_G for group in groups], batch_tokens), None
    least = least_worth_sharing(groups, LEAST_SHARED)
    if least is None:
        return bin_pack([group.num_tokens for group in groups], batch_tokens), None
    return _pack_shared(groups, batch_tokens, least), least


def _pack_shared(
    groups: Sequence[TokenGroup], batch_tokens: int, least_shared: int
) -> list[list[int]]:
    parts = shared_parts(groups, batch_tokens, least_shared)
    packed = bin_pack([size for _, size in parts], batch_tokens)
    return [sorted(index for number in some for index in parts[number][0]) for some in packed]


def model_batch(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    pad_id: int,
    least_shared: int | None = None,
    part_tokens: int | None = None,
) -> TokenForest | PaddedRows:
    """Build one micro-batch in the form that the model's path reads, as for `score_batches`."""
    if model.path == "padded":
        return to_padded(groups, pad_id=pad_id)
    forest = to_forest(groups, least_shared=least_shared)
    if part_tokens is None:
        return forest
    return replace(forest, part_tokens=max(part_tokens, LEAST_PART))


def golden_scores(
    model: RewardModel, contract: ScoringContract, groups: Sequence[Group]
) -> tuple[GoldenScore, ...]:
    """Score conversations for the golden scores of `scoring.json`."""
    # Each is scored by itself and in the dtype of the weights, so that the check at load can be
    # strict in whatever precision either run computes.
    return golden_by(partial(_score_alone, model, pad_id=contract.rules.pad_id), contract, groups)


def golden_by(
    score_alone: Callable[[Sequence[TokenGroup]], np.ndarray],
    contract: ScoringContract,
    groups: Sequence[Group],
) -> tuple[GoldenScore, ...]:
    """Compute golden scores with a model outside this process.

    Args:
        score_alone: Scores each conversation by itself, `[N, K]`, in the dtype of the weights.
    """
    conversations = [
        group.conversation(index) for group in groups for index in range(len(group.completions_G))
    ]
    tokens = contract.encode([conversation_group(messages) for messages in conversations])
    values = by_completion(score_alone(tokens), [one.num_reads_G[0] for one in tokens])
    return tuple(
        GoldenScore(messages=messages, values_K=tuple(values_K), num_tokens=one.lengths_G[0])
        for messages, one, values_K in zip(conversations, tokens, values, strict=True)
        if values_K
    )


def check_golden(model: RewardModel, contract: ScoringContract) -> float:
    """Recompute the golden scores of a loaded model, in the precision they were made in.

    Returns:
        The largest difference, in units of max(1, |score|).

    Raises:
        ScoringContractError: A score differs from the one the model was saved with.
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
    """Check the golden scores of a model outside this process.

    Args:
        score_alone: Scores each conversation by itself, `[N, K]`.
        why: Names a possible cause for the error message, from the actual and the expected
            outputs `[K]`.
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
        values_K = score_alone(tokens).flatten().tolist()
        for value, expected in zip(values_K, golden.values_K, strict=True):
            difference = abs(value - expected) / max(1.0, abs(expected))
            if not difference <= tolerance:
                cause = why(values_K, golden.values_K)
                if dtype != (saved := contract.rules.golden_dtype):
                    cause = (
                        f"it was saved in {saved} and is loaded in {dtype}; load it with "
                        f"{setting_of('policy.precision', saved)}. If that does not help, {cause}"
                    )
                raise ScoringContractError(
                    f"a golden conversation scores {value:.6g} here and scored {expected:.6g} when "
                    f"the model was saved: {cause}"
                )
            worst = max(worst, difference)
    return worst


def golden_tolerance(contract: ScoringContract, dtype: str) -> float:
    """Return the allowed difference from golden scores, in units of max(1, |score|)."""
    dtypes = (dtype, contract.rules.golden_dtype)
    return max(GOLDEN_TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE) for dtype in dtypes)


def conversation_group(messages: Conversation) -> Group:
    """Convert a whole conversation into a group of one completion: its last message."""
    return Group(id="", prompt=messages[:-1], completions_G=(Completion(messages=messages[-1:]),))


def _score_alone(
    model: RewardModel, groups: Sequence[TokenGroup], *, pad_id: int | None
) -> np.ndarray:
    # By themselves and in the dtype of the weights, so that any machine can check the scores
    # strictly.
    with model.in_full_precision():
        alone = [[group] for group in groups]
        return np.concatenate(score_batches(model, alone, pad_id=pad_id or 0))
