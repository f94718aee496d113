"""Keys and values while completions are drawn: those of each prompt once for all its completions.

Sequences of about the same length share a shelf. A completion that outgrows its shelf moves to one
twice as long, so memory follows what has been written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laurel.models.decoding import Branches, DecodePlan, Layout, PrefillPlan, Trunks
from laurel.models.shelves import Shelf

SHORTEST = 64
"""Tokens of the shortest shelf."""


@dataclass(slots=True)
class _Prompt:
    length: int
    shelf: Shelf


@dataclass(slots=True)
class _Completion:
    prompt: int
    born: int
    """What the clock said when it had no token: its length is the time since then."""
    shelf: Shelf


class KeyValueStore:
    """Keys and values of prompts, and of the completions that are being drawn to them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._trunk_shelves: dict[int, Shelf] = {}
        self._branch_shelves: dict[int, Shelf] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._completions: dict[int, _Completion] = {}
        self._clock = 0
        self._layout: Layout | None = None

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        shelves = [*self._trunk_shelves.values(), *self._branch_shelves.values()]
        return sum(shelf.num_bytes for shelf in shelves)

    def add_prompts(self, lengths: dict[int, int]) -> PrefillPlan:
        """Make room for prompts.

        Args:
            lengths: Tokens of each, by an id of the caller's choice.

        Returns:
            The plan of the forward pass that must follow: the prompts in one row, in this order.
        """
        for prompt, length in lengths.items():
            size = _trunk_size(length)
            shelf = self._trunk_shelves.setdefault(size, Shelf(size))
            shelf.add([prompt])
            self._prompts[prompt] = _Prompt(length, shelf)
        return PrefillPlan([(p, self._prompts[p].shelf, length) for p, length in lengths.items()])

    def remove_prompt(self, prompt: int) -> None:
        """Forget a prompt that has no completion any more."""
        self._prompts.pop(prompt).shelf.remove(prompt)
        self._layout = None

    def add_completions(self, prompt: int, completions: Sequence[int]) -> None:
        """Begin completions of a prompt that has been read; ids are of the caller's choice."""
        shelf = self._branch_shelves.setdefault(SHORTEST, Shelf(SHORTEST))
        shelf.add(completions)
        for completion in completions:
            self._completions[completion] = _Completion(prompt, self._clock, shelf)
        self._layout = None

    def remove_completion(self, completion: int) -> None:
        """Forget a completion."""
        self._completions.pop(completion).shelf.remove(completion)
        self._layout = None

    def next_step(self) -> DecodePlan:
        """The plan of a forward pass over one new token of every completion.

        That pass must follow: the completions count as one token longer from now on.
        """
        self._make_room()
        if self._layout is None:
            self._layout = self._lay_out()
        plan = DecodePlan(self._layout, self._clock)
        self._clock += 1
        return plan

    def _make_room(self) -> None:
        """Move completions that fill their shelf to a longer one."""
        for size in sorted(self._branch_shelves, reverse=True):
            shelf = self._branch_shelves[size]
            born = self._clock - size
            full = [owner for owner in shelf.owners if self._completions[owner].born == born]
            if not full:
                continue
            longer = self._branch_shelves.setdefault(2 * size, Shelf(2 * size))
            longer.add(full)
            longer.take(shelf, full)
            for owner in full:
                shelf.remove(owner)
                self._completions[owner].shelf = longer
            self._layout = None

    def _lay_out(self) -> Layout:
        ids: list[int] = []
        branches = []
        for _, shelf in sorted(self._branch_shelves.items()):
            if shelf.owners:
                born = {self._completions[owner].born for owner in shelf.owners}
                start, end = len(ids), len(ids) + len(shelf.owners)
                branches.append(Branches(shelf, start, end, min(born), len(born) == 1))
                ids.extend(shelf.owners)
        rows_of: dict[int, list[int]] = {}
        for row, completion in enumerate(ids):
            rows_of.setdefault(self._completions[completion].prompt, []).append(row)
        trunks, order = self._lay_trunks(rows_of)
        places = [0] * len(ids)
        for place, entry in enumerate(order):
            if entry is not None:
                places[entry] = place
        owners = [self._completions[completion] for completion in ids]
        return Layout(
            ids=tuple(ids),
            born_N=self._numbers([owner.born for owner in owners]),
            prompt_lengths_N=self._numbers([self._prompts[o.prompt].length for o in owners]),
            branches=tuple(branches),
            trunks=trunks,
            places_N=self._numbers(places),
            is_in_order=order == list(range(len(ids))),
        )

    def _lay_trunks(
        self, rows_of: dict[int, list[int]]
    ) -> tuple[tuple[Trunks, ...], list[int | None]]:
        """The prompts of each shelf, and the row of each of their entries (None: filled up)."""
        trunks = []
        order: list[int | None] = []
        for _, shelf in sorted(self._trunk_shelves.items()):
            rows = [rows_of.get(owner, []) for owner in shelf.owners]
            width = max(map(len, rows), default=0)
            if not width:
                continue
            lengths = [self._prompts[owner].length for owner in shelf.owners]
            entries: list[int | None] = []
            for mine in rows:
                entries += [*mine, *([None] * (width - len(mine)))]
            order += entries
            trunks.append(
                Trunks(
                    shelf,
                    self._numbers([row or 0 for row in entries]).view(-1, width),
                    self._numbers(lengths),
                    max(lengths),
                    len(set(lengths)) == 1,
                )
            )
        return tuple(trunks), order

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device)


def _trunk_size(length: int) -> int:
    """Shelves for prompts: 64, 96, 128, 192, 256, 384, ... tokens."""
    size = SHORTEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
