"""Attention during generation, under unmodified Hugging Face decoders.

The plans of two kinds of forward pass, both through `laurel_forest` (models/forest/attention.py).
`PrefillPlan` reads whole prompts, several in one row, and keeps their keys and values.
`DecodePlan` reads one new token of every completion, all in one row: the queries of all
completions of a prompt meet its keys in one product, and each meets the keys of its own
completion; the two halves of the softmax are joined by their totals. Sliding windows, soft-capping
and attention sinks are honoured by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laurel.models.forest.attention import (
    AttentionOptions,
    ForestPlan,
    as_computed,
    hidden_keys,
)
from laurel.types import Span, Tree

# --------------------------------------------------------------------------------------------------
# Memory for keys and values: sequences of about the same length side by side in one tensor.


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Keys and values of consecutive tokens, copied out of the store to be used again."""

    length: int
    layers: dict[int, tuple[Tensor, Tensor]]
    """By layer: `[H_kv, length, D]` and `[H_kv, length, D_v]`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)


class KVBlock:
    """Keys and values of sequences of at most `length` tokens, slot by slot without gaps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.owners: list[int] = []
        """Owner of each slot; removal moves the last one into the gap."""
        self._slots: dict[int, int] = {}
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of all layers."""
        return sum(t.nbytes for pair in self._layers.values() for t in pair)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the used slots of one layer, allocated at the first call.

        Args:
            index: Number of the layer.
            key: `[..., H_kv, D]`, of the dtype and on the device to use.
            value: `[..., H_kv, D_v]`, likewise.

        Returns:
            Views `[slots, H_kv, length, D]` and `[slots, H_kv, length, D_v]`.
        """
        if index not in self._layers:
            # Zeros: what a mask hides is still multiplied, by 0, and must be finite.
            self._layers[index] = (self._empty(key), self._empty(value))
        keys, values = self._layers[index]
        return keys[: len(self.owners)], values[: len(self.owners)]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros((self._capacity, like.shape[-2], self.length, like.shape[-1]))

    def add(self, owners: Sequence[int]) -> None:
        """Assign each owner a slot after those in use."""
        for owner in owners:
            self._slots[owner] = len(self.owners)
            self.owners.append(owner)
        if len(self.owners) > self._capacity:
            self._resize(max(len(self.owners), 2 * self._capacity))

    def remove(self, owner: int) -> None:
        """Free a slot, and memory when most of it is free."""
        slot, last = self._slots.pop(owner), self.owners.pop()
        if last != owner:
            self.owners[slot] = last
            self._slots[last] = slot
            for pair in self._layers.values():
                for tensor in pair:
                    tensor[slot] = tensor[len(self.owners)]
        if not self.owners:
            self._layers.clear()
            self._capacity = 0
        elif 4 * len(self.owners) <= self._capacity:
            self._resize(2 * len(self.owners))

    def slot(self, owner: int) -> int:
        """Find the slot of a sequence."""
        return self._slots[owner]

    def copy(self, owner: int, length: int) -> KeptTokens:
        """Copy the first tokens of a sequence out of the block."""
        slot = self._slots[owner]
        return KeptTokens(
            length,
            {
                index: (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
                for index, (keys, values) in self._layers.items()
                if length
            },
        )

    def take(self, other: KVBlock, owners: Sequence[int]) -> None:
        """Copy the contents of a shorter block for sequences that have slots in both."""
        theirs = torch.tensor([other.slot(owner) for owner in owners])
        mine = torch.tensor([self.slot(owner) for owner in owners])
        for index, (keys, values) in other._layers.items():
            places = mine.to(keys.device)
            sources = theirs.to(keys.device)
            own = self.layer(index, keys[0].transpose(0, 1), values[0].transpose(0, 1))
            for target, source in zip(own, (keys, values), strict=True):
                target[places, :, : other.length] = source[sources]

    def _resize(self, capacity: int) -> None:
        used = min(len(self.owners), self._capacity)
        self._capacity = capacity
        for index, pair in self._layers.items():
            resized = []
            for tensor in pair:
                larger = tensor.new_zeros((capacity, *tensor.shape[1:]))
                larger[:used] = tensor[:used]
                resized.append(larger)
            self._layers[index] = (resized[0], resized[1])


class Branches(NamedTuple):
    """Completions of one block: rows `start` to `end` of the step, in the order of its slots."""

    block: KVBlock
    start: int
    end: int
    oldest: int
    """Birth of its longest completion."""
    is_even: bool
    """Whether all completions have the same length."""


class Trunks(NamedTuple):
    """Prompts of one block, and the rows of their completions."""

    block: KVBlock
    rows_SC: Tensor
    """int64 [prompts, most completions of one]: filled up with row 0."""
    lengths_S: Tensor
    longest: int
    is_even: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The owner of each row of a step. Valid until a completion is added, removed or moved."""

    ids: tuple[int, ...]
    born_N: Tensor
    prompt_lengths_N: Tensor
    branches: tuple[Branches, ...]
    trunks: tuple[Trunks, ...]
    places_N: Tensor
    """Index of each row among the concatenated entries of all `rows_SC`."""
    is_in_order: bool
    """Whether `places_N` is simply 0, 1, 2, ..."""


class _NewPrompt(NamedTuple):
    owner: int
    block: KVBlock
    length: int
    # Keys and values of its first tokens, where they have been computed before.
    kept: Sequence[KeptTokens]

    @property
    def num_kept(self) -> int:
        return sum(part.length for part in self.kept)


class PrefillPlan(ForestPlan):
    """Prompts in one row, each causal; their keys and values are kept.

    Of a prompt that continues a conversation, only the tokens after the kept ones are in the row.
    """

    def __init__(self, prompts: Sequence[_NewPrompt]) -> None:
        """Lay the prompts side by side; those that continue a conversation come last."""
        trees, self._spans, end = [], [], 0
        for prompt in prompts:
            self._spans.append(slice(end, end + prompt.length - prompt.num_kept))
            if not prompt.kept:
                trees.append(Tree(Span(end, end + prompt.length), ()))
            end = self._spans[-1].stop
        super().__init__(trees)
        self._prompts = tuple(prompts)

    @property
    def positions_T(self) -> Tensor:
        """int64 [T]: position of each token in its prompt."""
        return torch.cat([torch.arange(p.num_kept, p.length) for p in self._prompts])

    @property
    def last_B(self) -> list[int]:
        """Index in the row of the last token of each prompt."""
        return [span.stop - 1 for span in self._spans]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend as `AttentionPlan.attend`, each prompt to itself."""
        query, key, value = as_computed(query, key, value)
        layer, num_fresh = _layer_of(module), sum(self.lengths)
        found = []
        if num_fresh:
            q, k, v = (tensor[:, :, :num_fresh] for tensor in (query, key, value))
            found.append(super().attend(module, q, k, v, options))
        for prompt, span in zip(self._prompts, self._spans, strict=True):
            keys, values = prompt.block.layer(
                layer, key[0].transpose(0, 1), value[0].transpose(0, 1)
            )
            slot, start = prompt.block.slot(prompt.owner), 0
            own_keys, own_values = keys[slot, :, : prompt.length], values[slot, :, : prompt.length]
            for part in prompt.kept:
                if part.length:
                    end = start + part.length
                    own_keys[:, start:end], own_values[:, start:end] = part.layers[layer]
                    start = end
            own_keys[:, start:], own_values[:, start:] = key[0, :, span], value[0, :, span]
            if prompt.kept:
                found.append(
                    self.attend_last(query[:, :, span], own_keys[None], own_values[None], options)
                )
        return torch.cat(found, dim=2) if len(found) > 1 else found[0]


class _Half(NamedTuple):
    sums: Tensor
    """`[rows, H_kv, R, D_v]`: values, weighted by `exp(logit - top)`."""
    totals: Tensor
    """`[rows, H_kv, R, 1]`: of those weights."""
    tops: Tensor
    """`[rows, H_kv, R, 1]`."""


@dataclass(slots=True)
class DecodePlan:
    """One new token of every completion, all in one row.

    In the shapes, R query heads share one of H_kv key heads, and C completions share a prompt.
    """

    _layout: Layout
    _clock: int
    _hidden: dict[tuple[int, bool, int | None], Tensor | None] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """Owner of each row."""
        return self._layout.ids

    @property
    def positions_N(self) -> Tensor:
        """int64 [N]: position of each token in its sequence."""
        return self._layout.prompt_lengths_N + self._lengths_N

    @property
    def _lengths_N(self) -> Tensor:
        return self._clock - self._layout.born_N

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend as `AttentionPlan.attend`, each completion to its prompt and itself."""
        dtype = query.dtype
        query, key, value = as_computed(query, key, value)
        scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
        key_NKD, value_NKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        num_rows, num_kv_heads = key_NKD.shape[:2]
        query_NKRD = (
            (query[0] * scaling)
            .transpose(0, 1)
            .reshape(num_rows, num_kv_heads, -1, query.shape[-1])
        )
        layer = _layer_of(module)
        with torch.autocast(query.device.type, enabled=False):
            own = self._to_branches(layer, query_NKRD, key_NKD, value_NKD, options)
            shared = self._to_trunks(layer, query_NKRD, key_NKD, value_NKD, options)
            # Attention to both halves of the keys, joined by their totals. A sink takes its share
            # of the weights and adds nothing.
            sinks = options.s_aux
            tops = torch.maximum(own.tops, shared.tops)
            if sinks is not None:
                sinks = sinks.to(tops.dtype).view(1, tops.shape[1], -1, 1)
                tops = torch.maximum(tops, sinks)
            mine, theirs = (own.tops - tops).exp_(), (shared.tops - tops).exp_()
            totals = own.totals * mine + shared.totals * theirs
            if sinks is not None:
                totals = totals + (sinks - tops).exp_()
            joined_NKRD = (own.sums * mine + shared.sums * theirs) / totals
        return joined_NKRD.to(dtype).reshape(num_rows, -1, value.shape[-1]).transpose(0, 1)[None]

    def _to_branches(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> _Half:
        halves = []
        for number, part in enumerate(self._layout.branches):
            rows = slice(part.start, part.end)
            keys, values = part.block.layer(layer, key, value)
            longest = self._clock - part.oldest
            if part.is_even:
                keys[:, :, longest], values[:, :, longest] = key[rows], value[rows]
            else:
                slots = torch.arange(part.end - part.start, device=key.device)
                ends = self._lengths_N[rows]
                keys[slots, :, ends], values[slots, :, ends] = key[rows], value[rows]
            hidden = self._hidden_of_branches(number, part, options.sliding_window)
            keys, values = keys[:, :, : longest + 1], values[:, :, : longest + 1]
            halves.append(_attend(query[rows, :, None], keys, values, hidden, options.softcap))
        return _stack(halves)

    def _to_trunks(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> _Half:
        # All completions of a prompt in one product.
        halves = []
        for number, part in enumerate(self._layout.trunks):
            num_prompts, width = part.rows_SC.shape
            if self._layout.is_in_order and len(self._layout.trunks) == 1:
                mine = query.view(num_prompts, width, *query.shape[1:])
            else:
                mine = query[part.rows_SC]
            keys, values = part.block.layer(layer, key, value)
            hidden = self._hidden_of_trunks(number, part, options.sliding_window)
            keys, values = keys[:, :, : part.longest], values[:, :, : part.longest]
            halves.append(_attend(mine.transpose(1, 2), keys, values, hidden, options.softcap))
        stacked = _stack(halves)
        if self._layout.is_in_order:
            return stacked
        return _Half(*(tensor[self._layout.places_N] for tensor in stacked))

    def _hidden_of_branches(self, number: int, part: Branches, window: int | None) -> Tensor | None:
        # bool `[rows, 1, 1, 1, keys]`: the keys each row must not see; None where it sees all.
        longest = self._clock - part.oldest
        if window is not None and window > longest:
            window = None
        if part.is_even and window is None:
            return None
        known = (number, True, window)
        if known not in self._hidden:
            ends = self._lengths_N[part.start : part.end, None]
            keys = torch.arange(longest + 1, device=ends.device)
            self._hidden[known] = hidden_keys(keys, ends, window)[:, None, None, None]
        return self._hidden[known]

    def _hidden_of_trunks(self, number: int, part: Trunks, window: int | None) -> Tensor | None:
        # bool `[prompts, 1, C or 1, 1, keys]`, as for branches.
        if part.is_even and window is None:
            return None
        known = (number, False, window)
        if known not in self._hidden:
            lengths = part.lengths_S[:, None, None]
            keys = torch.arange(part.longest, device=lengths.device)
            hidden = keys >= lengths
            if window is not None:
                hidden = hidden | (keys <= self.positions_N[part.rows_SC][..., None] - window)
            self._hidden[known] = hidden[:, None, :, None]
        return self._hidden[known]


def _layer_of(module: nn.Module) -> int:
    # transformers numbers the attention layers.
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, softcap: float | None
) -> _Half:
    # Attention before its division by the total.
    shape = query.shape[:-1]
    queries = query.flatten(2, 3)
    if query.dtype.itemsize < 4:  # half precision has too few digits for exponents
        queries, keys = queries.float(), keys.float()
    logits = queries @ keys.transpose(2, 3)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        logits.view(*shape, -1).masked_fill_(hidden, float("-inf"))
    tops = logits.amax(dim=-1, keepdim=True)
    if hidden is not None:
        tops = tops.clamp_min_(torch.finfo(tops.dtype).min)  # a window may have left the prompt
    weights = logits.sub_(tops).exp_()
    totals = weights.sum(dim=-1, keepdim=True)
    sums = (weights.to(values.dtype) @ values).to(weights.dtype)

    def by_row(tensor: Tensor) -> Tensor:
        by_prompt = tensor.view(*shape, -1).transpose(1, 2)
        return by_prompt.reshape(-1, shape[1], shape[3], tensor.shape[-1])

    return _Half(by_row(sums), by_row(totals), by_row(tops))


def _stack(halves: Sequence[_Half]) -> _Half:
    if len(halves) == 1:
        return halves[0]
    return _Half(*(torch.cat(tensors) for tensors in zip(*halves, strict=True)))


# --------------------------------------------------------------------------------------------------
# Keys and values during generation: those of each prompt once for all its completions.
#
# Sequences of about the same length share a block. A completion that outgrows its block moves to
# one
# twice as long, so memory follows what has been written.

SHORTEST = 64
"""Tokens of the shortest block."""


@dataclass(slots=True)
class _Prompt:
    length: int
    block: KVBlock


@dataclass(slots=True)
class _Completion:
    prompt: int
    # Value of the clock when it had no token: its length is the time since then.
    born: int
    block: KVBlock


class KeyValueStore:
    """Keys and values of prompts and of the completions in progress."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._trunk_blocks: dict[int, KVBlock] = {}
        self._branch_blocks: dict[int, KVBlock] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._completions: dict[int, _Completion] = {}
        self._clock = 0
        self._layout: Layout | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        blocks = [*self._trunk_blocks.values(), *self._branch_blocks.values()]
        return sum(block.num_bytes for block in blocks)

    def add_prompts(
        self, lengths: dict[int, int], kept: Mapping[int, Sequence[KeptTokens]] | None = None
    ) -> PrefillPlan:
        """Allocate slots for prompts.

        Args:
            lengths: Tokens of each, by an id of the caller's choice.
            kept: Keys and values of the first tokens of some prompts, but not of all their tokens.
                These prompts are the last of `lengths`.

        Returns:
            The plan of the forward pass that must follow: the prompts in one row, in this order,
            without the tokens that were kept.
        """
        kept = kept or {}
        for prompt, length in lengths.items():
            # Blocks of prompts hold 64, 96, 128, 192, 256, 384, ... tokens.
            size = SHORTEST
            while size < length:
                size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
            block = self._trunk_blocks.setdefault(size, KVBlock(size))
            block.add([prompt])
            self._prompts[prompt] = _Prompt(length, block)
        return PrefillPlan(
            [
                _NewPrompt(prompt, self._prompts[prompt].block, length, kept.get(prompt, ()))
                for prompt, length in lengths.items()
            ]
        )

    def copy_prompt(self, prompt: int) -> KeptTokens:
        """Copy the keys and values of a prompt."""
        stored = self._prompts[prompt]
        return stored.block.copy(prompt, stored.length)

    def copy_completion(self, completion: int) -> KeptTokens:
        """Copy the keys and values of the tokens of a completion that have been computed.

        The token that was sampled last has not: no step has read it yet.
        """
        stored = self._completions[completion]
        return stored.block.copy(completion, self._clock - stored.born)

    def remove_prompt(self, prompt: int) -> None:
        """Forget a prompt that has no completion left."""
        self._prompts.pop(prompt).block.remove(prompt)
        self._layout = None

    def add_completions(self, prompt: int, completions: Sequence[int]) -> None:
        """Begin completions of a prompt that has been read; the caller chooses their ids."""
        block = self._branch_blocks.setdefault(SHORTEST, KVBlock(SHORTEST))
        block.add(completions)
        for completion in completions:
            self._completions[completion] = _Completion(prompt, self._clock, block)
        self._layout = None

    def remove_completion(self, completion: int) -> None:
        """Forget a completion."""
        self._completions.pop(completion).block.remove(completion)
        self._layout = None

    def next_step(self) -> DecodePlan:
        """Plan a forward pass over one new token of every completion.

        That pass must follow: the completions count as one token longer from now on.
        """
        self._make_room()
        if self._layout is None:
            self._layout = self._lay_out()
        plan = DecodePlan(self._layout, self._clock)
        self._clock += 1
        return plan

    def _make_room(self) -> None:
        # Completions that fill their block move to a longer one.
        for size in sorted(self._branch_blocks, reverse=True):
            block = self._branch_blocks[size]
            born = self._clock - size
            full = [owner for owner in block.owners if self._completions[owner].born == born]
            if not full:
                continue
            longer = self._branch_blocks.setdefault(2 * size, KVBlock(2 * size))
            longer.add(full)
            longer.take(block, full)
            for owner in full:
                block.remove(owner)
                self._completions[owner].block = longer
            self._layout = None

    def _lay_out(self) -> Layout:
        ids: list[int] = []
        branches = []
        for _, block in sorted(self._branch_blocks.items()):
            if block.owners:
                born = {self._completions[owner].born for owner in block.owners}
                start, end = len(ids), len(ids) + len(block.owners)
                branches.append(Branches(block, start, end, min(born), len(born) == 1))
                ids.extend(block.owners)
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
        # The prompts of each block, and the row of each of their entries (None: filling).
        trunks = []
        order: list[int | None] = []
        for _, block in sorted(self._trunk_blocks.items()):
            rows = [rows_of.get(owner, []) for owner in block.owners]
            width = max(map(len, rows), default=0)
            if not width:
                continue
            lengths = [self._prompts[owner].length for owner in block.owners]
            entries: list[int | None] = []
            for mine in rows:
                entries += [*mine, *([None] * (width - len(mine)))]
            order += entries
            trunks.append(
                Trunks(
                    block,
                    self._numbers([row or 0 for row in entries]).view(-1, width),
                    self._numbers(lengths),
                    max(lengths),
                    len(set(lengths)) == 1,
                )
            )
        return tuple(trunks), order

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device)
