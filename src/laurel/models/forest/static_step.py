"""Lays all numbers of a decoding step into one tensor, so that steps of one shape are one program.

Python starts every kernel of a decoding step, which takes longer on a GPU than the kernels do. A
CUDA graph starts them all at once, but it repeats the addresses and the shapes that it was captured
with. So a step must find whatever changes from token to token in memory that stays: the keys and
values in blocks of the cache, everything else in this tensor. Rows and prompts are filled up to
powers of two. Rows of the filling write into free slots, and nobody reads their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from laurel.models.forest.decoding import (
    Branches,
    DecodePlan,
    KVBlock,
    Layout,
    Trunks,
)
from laurel.planning.memory import power_of_two

PLAN_COLUMNS = 3
"""How many numbers of each row the plan has: its length, that of its prompt, and its place."""


class StepShape(NamedTuple):
    """All that a decoding step depends on, besides the values of tensors."""

    branches: KVBlock
    trunks: KVBlock
    versions: tuple[int, int]
    """The versions of both blocks: their memory."""
    num_rows: int
    num_prompts: int
    width: int
    """The number of completions of a prompt, with filling."""

    @classmethod
    def of(cls, plan: DecodePlan) -> StepShape:
        """Return the shape of a step of a store with static shapes."""
        (branches,), (trunks,) = plan.layout.branches, plan.layout.trunks
        num_prompts, width = trunks.rows_SC.shape
        return cls(
            branches=branches.block,
            trunks=trunks.block,
            versions=(branches.block.version, trunks.block.version),
            num_rows=power_of_two(len(plan.ids)),
            num_prompts=power_of_two(num_prompts),
            width=width,
        )

    @property
    def memory(self) -> tuple[KVBlock, KVBlock, tuple[int, int]]:
        """The memory of keys and values that steps of this shape read and write."""
        return self.branches, self.trunks, self.versions

    def pack(self, plan: DecodePlan, columns: Sequence[Tensor]) -> Tensor:
        """Return the numbers of a step as an int64 tensor on the host.

        Args:
            plan: The plan of a store with static shapes.
            columns: Further numbers of each row: int64 or float64, whose bits are kept.
        """
        layout = plan.layout
        (trunks,) = layout.trunks
        rows = [plan.lengths_N, layout.prompt_lengths_N, layout.places_N, *columns]
        sizes = [self.num_rows] * len(rows) + [self.num_prompts * self.width, self.num_prompts]
        packed = np.zeros(sum(sizes), np.int64)
        start = 0
        parts = [*rows, trunks.rows_SC.flatten(), trunks.lengths_S]
        for size, numbers in zip(sizes, parts, strict=True):
            packed[start : start + len(numbers)] = numbers.numpy().view(np.int64)
            start += size
        return torch.from_numpy(packed)

    def unpack(self, packed: Tensor, num_columns: int) -> tuple[DecodePlan, tuple[Tensor, ...]]:
        """Return the plan and the columns of `pack` as views, on the device of the tensor."""
        count = (PLAN_COLUMNS + num_columns) * self.num_rows
        lengths_N, prompt_lengths_N, places_N, *columns = packed[:count].view(-1, self.num_rows)
        grid = self.num_prompts * self.width
        trunks = Trunks(
            self.trunks,
            rows_SC=packed[count : count + grid].view(self.num_prompts, self.width),
            lengths_S=packed[count + grid :],
            longest=self.trunks.length,
            is_even=False,
        )
        layout = Layout(
            ids=(),
            prompt_lengths_N=prompt_lengths_N,
            branches=(Branches(self.branches, 0, self.num_rows, oldest=0, is_even=False),),
            trunks=(trunks,),
            places_N=places_N,
            is_in_order=False,
        )
        return DecodePlan(layout, lengths_N, (self.branches.length - 1,)), tuple(columns)
