"""Chooses the rows of a step, and divides their tokens into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, TypeVar

import numpy as np
from torch import Tensor

from laurel.config.policy import BatchLimits
from laurel.data.forest import (
    bin_pack,
    least_worth_sharing,
    pack_evenly,
    pack_padded,
    shared_parts,
    to_forest,
    to_padded,
)
from laurel.training.learner import MicroBatch
from laurel.types import Conversation, PaddedRows, PreferenceSample, TokenForest, TokenGroup

Label = TypeVar("Label")


class Batcher:
    """Divides batches into micro-batches for one model."""

    def __init__(
        self,
        path: Literal["forest", "padded"],
        limits: BatchLimits,
        *,
        pad_id: int,
        dp_size: int = 1,
    ) -> None:
        """Choose the layout and limits of micro-batches.

        Args:
            limits: The size limits of micro-batches. A larger group is computed in parts, unless
                prompts are not shared.
            dp_size: The number of data-parallel ranks, `Learner.dp_size`.
        """
        self.path: Literal["forest", "padded"] = path
        self.limits = limits
        self._pad_id = pad_id
        self._dp_size = dp_size

    def cut(self, tokens: Sequence[TokenGroup], labels: Sequence[Label]) -> list[MicroBatch[Label]]:
        """Divide all groups into micro-batches.

        Forests are filled up to the token budget, evenly over several ranks. Batches of padded rows
        are filled too if dynamic batching is on, or if packing is on and the model cannot read
        forests; otherwise each holds `padded_groups` groups, in order.
        """
        limits, least = self.limits, None
        if self._is_forest:
            least = least_worth_sharing(
                tokens, limits.least_shared if limits.share_prompts else None
            )
            parts = self._fill_forests(tokens, least)
        elif limits.padded_tokens is not None:
            parts = pack_padded([t.lengths_G for t in tokens], limits.padded_tokens)
        else:
            size = limits.padded_groups
            starts = range(0, len(tokens), size)
            parts = [list(range(s, min(s + size, len(tokens)))) for s in starts]
        return [
            self._lay_out([tokens[i] for i in indices], [labels[i] for i in indices], least)
            for indices in parts
        ]

    def _fill_forests(self, tokens: Sequence[TokenGroup], least: int | None) -> list[list[int]]:
        limits = self.limits
        if least is None:
            share = limits.share_prompts
            sizes = [t.num_tokens if share else sum(t.lengths_G) for t in tokens]
            return pack_evenly(sizes, limits.forest_tokens, dp_size=self._dp_size)
        # Large parts share most, smaller ones divide more evenly over ranks.
        dp = self._dp_size
        divisors = [2**power for power in range((4 * dp).bit_length())] if dp > 1 else [1]
        ways = [
            self._pack(shared_parts(tokens, max(1, limits.forest_tokens // by), least))
            for by in divisors
        ]
        return min(ways, key=lambda way: way[0])[1]

    def _pack(self, parts: Sequence[tuple[list[int], int]]) -> tuple[int, list[list[int]]]:
        """Divide parts over micro-batches; return the tokens that pass one after another, too."""
        sizes = [size for _, size in parts]
        packed = pack_evenly(sizes, self.limits.forest_tokens, dp_size=self._dp_size)
        totals = sorted((sum(sizes[number] for number in some) for some in packed), reverse=True)
        indices = [sorted(i for number in some for i in parts[number][0]) for some in packed]
        return sum(totals[:: self._dp_size]), indices

    def filled(self) -> Batcher:
        """Return one that fills padded batches too, where no gradients are kept."""
        limits = replace(self.limits, padded_tokens=self.limits.forest_tokens)
        return self._limited(limits)

    def of_singles(self) -> Batcher:
        """Return one whose micro-batches hold a single conversation each."""
        return self._limited(
            replace(self.limits, forest_tokens=1, padded_tokens=1, share_prompts=False)
        )

    def _limited(self, limits: BatchLimits) -> Batcher:
        return Batcher(self.path, limits, pad_id=self._pad_id, dp_size=self._dp_size)

    @property
    def _is_forest(self) -> bool:
        return self.path == "forest"

    def divide(
        self,
        tokens: Sequence[TokenGroup],
        labels: Sequence[Label],
        subset: Callable[[Label, Sequence[int]], Label],
    ) -> tuple[list[TokenGroup], list[Label]]:
        """Divide groups into smaller ones, for losses in which completions are independent.

        A group that exceeds the share of a data-parallel rank, for whose end the others would wait,
        is divided into several, in which fewer completions share the prompt. Without prompt
        sharing, and for padded rows, each completion becomes a group.

        Args:
            subset: Returns the label of some completions of a group.
        """
        parts: list[TokenGroup] = []
        their_labels: list[Label] = []
        budget: int | None = None
        if self._is_forest and self.limits.share_prompts:
            total = sum(group.num_tokens for group in tokens)
            budget = max(self.limits.forest_tokens, -(-total // self._dp_size))
        for group, label in zip(tokens, labels, strict=True):
            for indices in shares(group, budget=budget):
                parts.append(select_completions(group, indices))
                whole = len(indices) == len(group.branches_of_G)
                their_labels.append(label if whole else subset(label, indices))
        return parts, their_labels

    def _lay_out(
        self, tokens: Sequence[TokenGroup], labels: Sequence[Label], least: int | None
    ) -> MicroBatch[Label]:
        if self._is_forest:
            share = self.limits.share_prompts
            forest = to_forest(tokens, share_prompts=share, least_shared=least)
            if share:
                forest = replace(forest, part_tokens=self.limits.forest_tokens)
            return MicroBatch(
                inputs=forest,
                labels=labels,
                num_tokens=len(forest.ids_T),
                branches_of_N=_branches_of(tokens),
            )
        rows = to_padded(tokens, pad_id=self._pad_id)
        return MicroBatch(inputs=rows, labels=labels, num_tokens=rows.ids_NL.numel())


def _branches_of(tokens: Sequence[TokenGroup]) -> list[range]:
    if not any(group.sequences_G for group in tokens):
        return []
    counts = [len(own) for group in tokens for own in group.branches_of_G]
    ends = accumulate(counts)
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


Outputs = Callable[[Sequence[TokenForest | PaddedRows]], Iterable[Tensor]]
"""A function that computes a reward model's outputs, such as `Learner.outputs`."""


def reward_values(
    outputs: Outputs,
    groups: Sequence[TokenGroup],
    batcher: Batcher,
    on_batch: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Compute every output of a reward model at every token at which completions are read.

    Args:
        groups: At least one group, as the contract encodes it.
        batcher: Divides them; lists of answers may be larger than a micro-batch.
        on_batch: Called after each micro-batch with the number of groups that it begins, and of
            its tokens.

    Returns:
        float32 `[N, K]`, in the order of the groups.
    """
    counts = [count for group in groups for count in group.num_reads_G]
    ends = np.cumsum(counts).tolist()
    spans = iter(zip([0, *ends[:-1]], ends, strict=True))
    rows = [[range(*next(spans)) for _ in group.branches_ids_G] for group in groups]
    micro_batches = batcher.cut(
        *batcher.divide(groups, rows, lambda of, some: [of[i] for i in some])
    )
    computed = outputs([one.inputs for one in micro_batches])
    begun = {some[0].start for some in rows}
    values_NK: np.ndarray | None = None
    for micro_batch, outputs_NK in zip(micro_batches, computed, strict=True):
        scores_NK = outputs_NK.float().cpu().numpy()
        if values_NK is None:
            values_NK = np.full((ends[-1], scores_NK.shape[1]), np.nan, dtype=np.float32)
        values_NK[[row for some in micro_batch.labels for own in some for row in own]] = scores_NK
        if on_batch is not None:
            num_groups = sum(some[0].start in begun for some in micro_batch.labels)
            on_batch(num_groups, micro_batch.num_tokens)
    assert values_NK is not None
    return values_NK


def shares(group: TokenGroup, *, budget: int | None) -> list[list[int]]:
    """Choose which completions of a group are computed together, as indices of its completions.

    These are all completions if they and the prompt fit into `budget` tokens, otherwise as many as
    fit. Without a budget each is computed alone, because no prompt is shared then.
    """
    sizes = group.num_own_tokens_G
    if budget is None:
        return [[i] for i in range(len(sizes))]
    if group.num_tokens <= budget:
        return [list(range(len(sizes)))]
    # A prompt that fills the budget leaves each completion by itself.
    return bin_pack(sizes, max(1, budget - len(group.trunk_ids)))


def select_completions(group: TokenGroup, indices: Sequence[int]) -> TokenGroup:
    """Return a group with only the completions at these indices."""
    return replace(group.select(indices), truncated_G=())


def global_batches(
    groups: Sequence[TokenGroup],
    labels: Sequence[Label],
    subset: Callable[[Label, Sequence[int]], Label],
    *,
    size: int,
) -> list[tuple[list[TokenGroup], list[Label]]]:
    """Divide groups into batches of `size` completions each, in order; groups may be split.

    Args:
        subset: Returns the label of some completions of a group.
        size: The number of completions of one optimizer step; the last batch may have fewer.
    """
    batches: list[tuple[list[TokenGroup], list[Label]]] = []
    room = 0
    for group, label in zip(groups, labels, strict=True):
        first, count = 0, len(group.branches_of_G)
        while first < count:
            if room == 0:
                batches.append(([], []))
                room = size
            chosen = range(first, min(first + room, count))
            batches[-1][0].append(select_completions(group, chosen))
            batches[-1][1].append(subset(label, chosen))
            room, first = room - len(chosen), chosen.stop
    return batches


# The choice of the rows of a step.


class StepOrder:
    """Chooses the rows of every step as a pure function of the step and a seed.

    There is no state to save: a resumed run reads at step `n` what an uninterrupted run reads at
    step `n`. Each epoch has its own permutation, and its last step takes the remaining rows.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        units: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Choose the order.

        Args:
            batch_size: The number of rows of a step.
            shuffle: Whether each epoch has its own order; otherwise it is that of the rows.
            units: Rows that stay together, each row in one unit; the units are shuffled instead.
                The rows of a unit may be divided where a step ends. None: each row by itself.
        """
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.steps_per_epoch = math.ceil(num_rows / batch_size)
        self._units = units
        self._epoch = -1
        self._order = self._together(np.arange(num_rows if units is None else len(units)))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of step `step`; both count from 0."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Return the indices of the rows of step `step`, which counts from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.shuffle and epoch != self._epoch:
            count = self.num_rows if self._units is None else len(self._units)
            self._order = self._together(permutation(count, self.seed, epoch))
            self._epoch = epoch
        first = within * self.batch_size
        return [int(row) for row in self._order[first : first + self.batch_size]]

    def _together(self, order: np.ndarray) -> np.ndarray:
        if self._units is None:
            return order
        return np.array([row for unit in order for row in self._units[unit]], dtype=np.int64)

    def samples_before(self, step: int) -> int:
        """Return the number of rows read before step `step`, which counts from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_rows + within * self.batch_size


class Stream:
    """An endless stream of the rows of all epochs, as a pure function of position and seed.

    It serves steps that need different numbers of rows. Each epoch has its own permutation, and a
    step may take the end of one epoch and the beginning of the next.
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> list[int]:
        """Return the indices of the rows at positions `start` to `start + count`."""
        return [self._row(*divmod(place, self.num_rows)) for place in range(start, start + count)]

    def _row(self, epoch: int, within: int) -> int:
        if not self.shuffle:
            return within
        if epoch not in self._orders:
            # Only the latest epoch is kept, as positions rise.
            self._orders = {epoch: permutation(self.num_rows, self.seed, epoch)}
        return int(self._orders[epoch][within])


def rows_of_dialogues(rows: Sequence[PreferenceSample]) -> list[list[int]]:
    """Divide rows into those with the same messages up to the first question, by their indices."""
    units: dict[Conversation, list[int]] = {}
    for index, row in enumerate(rows):
        prompt = row.preference.group.prompt
        first = next((i for i, m in enumerate(prompt) if m.role == "user"), len(prompt) - 1)
        units.setdefault(prompt[: first + 1], []).append(index)
    return list(units.values())


def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random order of the rows of an epoch."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    # Sorting random keys depends only on the bit generator, unlike numpy's `permutation`.
    return np.argsort(generator.random(num_rows), kind="stable")
