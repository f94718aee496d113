"""Computes attention during generation, with unmodified Hugging Face decoders.

The attention plans of this module compute the attention of one forward pass, and store new keys and
values in the KV cache. The layers of a model call a plan through the attention function of
`models/forest/attention.py`.

`PrefillPlan` is for a forward pass over prompts, several in one row. `DecodePlan` is for one new
token of every completion, all in one row. One batched matrix product computes the attention of all
completions of a prompt to the prompt, another that of each completion to itself, and the two
partial softmaxes are merged by their normalisers. Sliding windows, soft-capping and attention sinks
are supported.

A store with static shapes rounds the shapes of steps up, so that many steps share one: then a CUDA
graph of a step serves them all (`models/forest/static_step.py`).
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
from laurel.planning.memory import power_of_two
from laurel.types import Span, Tree

# Memory for keys and values: sequences of about the same length side by side in one tensor.


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """A copy of the keys and values of a sequence's first tokens, for use in a later prompt."""

    length: int
    layers: dict[int, tuple[Tensor, Tensor]]
    """The keys `[H_kv, length, D]` and values `[H_kv, length, D_v]` of each layer."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all layers."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)


class KVBlock:
    """A block of the KV cache, for sequences of at most `length` tokens.

    Each sequence, which is named by an `owner` id, has one slot. The slots in use have no gaps.
    """

    def __init__(self, length: int, *, rounds: bool = False) -> None:
        """Create an empty block; `rounds`: its number of slots is a power of two."""
        self.length = length
        self.version = 0
        """Changes whenever the memory of the block does."""
        self._rounds = rounds
        self.owners: list[int] = []
        """The owner of each slot; removing one moves the last into its slot."""
        self._slots: dict[int, int] = {}
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes that the block's keys and values take, of all layers together."""
        return sum(t.nbytes for pair in self._layers.values() for t in pair)

    def layer(
        self, index: int, key: Tensor, value: Tensor, num_slots: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer in the first slots.

        The first call for a layer allocates its memory.

        Args:
            key: A tensor `[..., H_kv, D]` with the dtype and the device of the keys.
            value: A tensor `[..., H_kv, D_v]` with the dtype and the device of the values.
            num_slots: The number of slots; None for those in use.

        Returns:
            Views `[slots, H_kv, length, D]` and `[slots, H_kv, length, D_v]`.
        """
        if index not in self._layers:
            # Hidden entries are multiplied by 0 and must be finite, so they begin as zeros.
            self._layers[index] = (self._empty(key), self._empty(value))
        keys, values = self._layers[index]
        count = len(self.owners) if num_slots is None else num_slots
        return keys[:count], values[:count]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros((self._capacity, like.shape[-2], self.length, like.shape[-1]))

    def add(self, owners: Sequence[int]) -> None:
        """Assign each owner a new slot after the slots in use, and allocate memory if needed."""
        for owner in owners:
            self._slots[owner] = len(self.owners)
            self.owners.append(owner)
        if len(self.owners) > self._capacity:
            self._resize(max(len(self.owners), 2 * self._capacity))

    def remove(self, owner: int) -> None:
        """Free the slot of an owner, and shrink the memory if at most a quarter is in use."""
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
        """Return the number of the slot of an owner's sequence."""
        return self._slots[owner]

    def copy(self, owner: int, length: int) -> KeptTokens:
        """Return a copy of the keys and values of an owner's first `length` tokens."""
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
        """Copy the sequences of `owners` from a shorter block; they have slots in both blocks."""
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
        self._capacity = power_of_two(capacity) if self._rounds else capacity
        self.version += 1
        for index, pair in self._layers.items():
            resized = []
            for tensor in pair:
                larger = tensor.new_zeros((self._capacity, *tensor.shape[1:]))
                larger[:used] = tensor[:used]
                resized.append(larger)
            self._layers[index] = (resized[0], resized[1])


class Branches(NamedTuple):
    """The completions whose keys and values are in one block of the KV cache.

    They are rows `start` to `end` of a decoding step, in the order of the block's slots.
    """

    block: KVBlock
    start: int
    end: int
    oldest: int
    """The clock at the start of the longest completion; its length is the time since then."""
    is_even: bool
    """Whether all completions have the same length."""


class Trunks(NamedTuple):
    """The prompts whose keys and values are in one block of the KV cache, in a decoding step.

    A row of the step is the latest token of one completion, which attends to its prompt.
    """

    block: KVBlock
    rows_SC: Tensor
    """int64 [prompts, most completions of one]: the rows of each prompt's completions, padded with
    row 0."""
    lengths_S: Tensor
    longest: int
    is_even: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The completion of each row of a decoding step, and where its keys and values are cached.

    A layout is valid until a completion is added, removed or moved to another block. Its numbers
    are on the device, or on the host if the store has static shapes.
    """

    ids: tuple[int, ...]
    prompt_lengths_N: Tensor
    branches: tuple[Branches, ...]
    trunks: tuple[Trunks, ...]
    places_N: Tensor
    """The index of each row among the concatenated entries of all `rows_SC`."""
    is_in_order: bool
    """Whether `places_N` is 0, 1, 2, ..."""


class _NewPrompt(NamedTuple):
    owner: int
    block: KVBlock
    length: int
    # The keys and values of its first tokens, if they were computed before.
    kept: Sequence[KeptTokens]

    @property
    def num_kept(self) -> int:
        return sum(part.length for part in self.kept)


class PrefillPlan(ForestPlan):
    """The attention plan of a forward pass over several prompts in one row.

    Each prompt attends causally to itself, and its keys and values are cached. If the first tokens
    of a prompt are cached already, as in a conversation that continues, the row has only its other
    tokens.
    """

    def __init__(self, prompts: Sequence[_NewPrompt]) -> None:
        """Arrange the prompts in one row; those with cached tokens must come last."""
        trees, self._spans, end = [], [], 0
        for prompt in prompts:
            self._spans.append(slice(end, end + prompt.length - prompt.num_kept))
            if not prompt.kept:
                trees.append(Tree.of(Span(end, end + prompt.length), ()))
            end = self._spans[-1].stop
        super().__init__(trees, read_X=torch.tensor(self.last_B))
        self._prompts = tuple(prompts)

    @property
    def positions_T(self) -> Tensor:
        """int64 [T]: the position of each token of the row, counted within its own prompt."""
        return torch.cat([torch.arange(p.num_kept, p.length) for p in self._prompts])

    @property
    def last_B(self) -> list[int]:
        """The index in the row of the last token of each prompt, the only ones that are read."""
        return [span.stop - 1 for span in self._spans]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention as `AttentionPlan.attend` describes; each prompt attends to itself."""
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
    """`[rows, H_kv, R, D_v]`: the sums of values, weighted by `exp(logit - top)`."""
    totals: Tensor
    """`[rows, H_kv, R, 1]`: the sums of these weights."""
    tops: Tensor
    """`[rows, H_kv, R, 1]`: the largest logits."""


@dataclass(slots=True)
class DecodePlan:
    """The plan of a decoding step: one new token of every completion, all in one row.

    In the shapes, R query heads share one of H_kv key heads, and C completions share a prompt.
    """

    layout: Layout
    lengths_N: Tensor
    """int64 [N]: the number of tokens of each completion before the new one."""
    longest: tuple[int, ...]
    """An upper bound of these lengths for each of the layout's `branches`."""
    _hidden: dict[tuple[int, bool, int | None], Tensor | None] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """The id of the completion in each row."""
        return self.layout.ids

    @property
    def positions_N(self) -> Tensor:
        """int64 [N]: the position of each new token, counted from the start of its prompt."""
        return self.layout.prompt_lengths_N + self.lengths_N

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention as `AttentionPlan.attend` describes.

        Each completion attends to its prompt and to itself.
        """
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
            # The attention to both halves of the keys is combined by their totals. A sink takes its
            # share of the weights, and adds nothing.
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
        for number, part in enumerate(self.layout.branches):
            rows, longest = slice(part.start, part.end), self.longest[number]
            keys, values = part.block.layer(layer, key, value, part.end - part.start)
            if part.is_even:
                keys[:, :, longest], values[:, :, longest] = key[rows], value[rows]
            else:
                slots = torch.arange(part.end - part.start, device=key.device)
                ends = self.lengths_N[rows]
                keys[slots, :, ends], values[slots, :, ends] = key[rows], value[rows]
            hidden = self._hidden_of_branches(number, part, options.sliding_window)
            keys, values = keys[:, :, : longest + 1], values[:, :, : longest + 1]
            halves.append(_attend(query[rows, :, None], keys, values, hidden, options.softcap))
        return _stack(halves)

    def _to_trunks(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> _Half:
        # One product computes all completions of a prompt.
        halves = []
        for number, part in enumerate(self.layout.trunks):
            num_prompts, width = part.rows_SC.shape
            if self.layout.is_in_order and len(self.layout.trunks) == 1:
                mine = query.view(num_prompts, width, *query.shape[1:])
            else:
                mine = query[part.rows_SC]
            keys, values = part.block.layer(layer, key, value, num_prompts)
            hidden = self._hidden_of_trunks(number, part, options.sliding_window)
            keys, values = keys[:, :, : part.longest], values[:, :, : part.longest]
            halves.append(_attend(mine.transpose(1, 2), keys, values, hidden, options.softcap))
        stacked = _stack(halves)
        if self.layout.is_in_order:
            return stacked
        return _Half(*(tensor[self.layout.places_N] for tensor in stacked))

    def _hidden_of_branches(self, number: int, part: Branches, window: int | None) -> Tensor | None:
        # bool `[rows, 1, 1, 1, keys]`: the keys each row must not see; None where it sees all.
        longest = self.longest[number]
        if window is not None and window > longest:
            window = None
        if part.is_even and window is None:
            return None
        known = (number, True, window)
        if known not in self._hidden:
            ends = self.lengths_N[part.start : part.end, None]
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
    # Returns attention before it is divided by the total.
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


# The KV cache during generation, which holds each prompt once for all its completions.
#
# Sequences of about the same length share a block. A completion that outgrows its block moves to
# one that is twice as long, so memory follows the number of tokens. With static shapes all prompts
# share one block, and all completions another: each is as long as its longest sequence needs.

SHORTEST = 64
"""The number of tokens of the shortest block."""


@dataclass(slots=True)
class _Prompt:
    length: int
    block: KVBlock


@dataclass(slots=True)
class _Completion:
    prompt: int
    # The clock when the completion had no token; its length is the time since then.
    born: int
    block: KVBlock


class KeyValueStore:
    """The KV cache of all prompts and completions in progress."""

    def __init__(self, device: torch.device, *, is_static: bool = False) -> None:
        """Create an empty cache; `is_static`: the shapes of steps are rounded up."""
        self.device = device
        self.is_static = is_static
        self._trunk_blocks: dict[int, KVBlock] = {}
        self._branch_blocks: dict[int, KVBlock] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._completions: dict[int, _Completion] = {}
        self._clock = 0
        self._layout: Layout | None = None
        # The clock when the completion of each row of the layout had no token.
        self._born_N = torch.zeros(0)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of memory in use."""
        blocks = [*self._trunk_blocks.values(), *self._branch_blocks.values()]
        return sum(block.num_bytes for block in blocks)

    def add_prompts(
        self, lengths: dict[int, int], kept: Mapping[int, Sequence[KeptTokens]] | None = None
    ) -> PrefillPlan:
        """Allocate cache slots for prompts.

        Args:
            lengths: The number of tokens of each prompt, by an id that the caller chooses.
            kept: The copied keys and values of the first tokens of some prompts, which must be the
                last ones of `lengths`. At least one token of each prompt must be left to compute.

        Returns:
            The plan of the forward pass that must follow, over the prompts in this order, without
            the tokens in `kept`.
        """
        kept = kept or {}
        for prompt, length in lengths.items():
            # Blocks of prompts hold 64, 96, 128, 192, 256, 384, ... tokens.
            size = SHORTEST
            while size < length:
                size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
            block = self._block(self._trunk_blocks, self._prompts, size)
            block.add([prompt])
            self._prompts[prompt] = _Prompt(length, block)
        return PrefillPlan(
            [
                _NewPrompt(prompt, self._prompts[prompt].block, length, kept.get(prompt, ()))
                for prompt, length in lengths.items()
            ]
        )

    def copy_prompt(self, prompt: int) -> KeptTokens:
        """Return a copy of the keys and values of the prompt with this id."""
        stored = self._prompts[prompt]
        return stored.block.copy(prompt, stored.length)

    def copy_completion(self, completion: int) -> KeptTokens:
        """Return a copy of the keys and values of the completion with this id.

        The token that was sampled last is not included, because no forward pass has read it yet.
        """
        stored = self._completions[completion]
        return stored.block.copy(completion, self._clock - stored.born)

    def remove_prompt(self, prompt: int) -> None:
        """Free the cache slot of a prompt that has no completions left."""
        self._prompts.pop(prompt).block.remove(prompt)
        self._layout = None

    def add_completions(self, prompt: int, completions: Sequence[int]) -> None:
        """Allocate cache slots for completions of a prompt that was computed.

        The caller chooses the ids of the completions.
        """
        block = self._block(self._branch_blocks, self._completions, SHORTEST)
        block.add(completions)
        for completion in completions:
            self._completions[completion] = _Completion(prompt, self._clock, block)
        self._layout = None

    def remove_completion(self, completion: int) -> None:
        """Free the cache slot of the completion with this id."""
        self._completions.pop(completion).block.remove(completion)
        self._layout = None

    def next_step(self) -> DecodePlan:
        """Return the plan of a forward pass over one new token of every completion.

        The forward pass must follow, because from now on each completion counts as one token
        longer.
        """
        self._make_room()
        if self._layout is None:
            self._layout = self._lay_out()
        layout, clock = self._layout, self._clock
        longest = tuple(
            part.block.length - 1 if self.is_static else clock - part.oldest
            for part in layout.branches
        )
        self._clock += 1
        return DecodePlan(layout, clock - self._born_N, longest)

    def _block(
        self,
        blocks: dict[int, KVBlock],
        stored: Mapping[int, _Prompt] | Mapping[int, _Completion],
        size: int,
    ) -> KVBlock:
        # The block for another sequence of at most `size` tokens.
        used = [block for block in blocks.values() if block.owners] if self.is_static else []
        if used and used[0].length >= size:
            return used[0]
        found = blocks.setdefault(size, KVBlock(size, rounds=self.is_static))
        for shorter in used:
            self._move(list(shorter.owners), stored, shorter, found)
        return found

    def _move(
        self,
        owners: Sequence[int],
        stored: Mapping[int, _Prompt] | Mapping[int, _Completion],
        block: KVBlock,
        longer: KVBlock,
    ) -> None:
        longer.add(owners)
        longer.take(block, owners)
        for owner in reversed(owners):  # the last slot is freed without a copy
            block.remove(owner)
            stored[owner].block = longer
        self._layout = None

    def _make_room(self) -> None:
        # Completions that fill their block move to a longer one.
        for size in sorted(self._branch_blocks, reverse=True):
            block = self._branch_blocks[size]
            born = self._clock - size
            full = [owner for owner in block.owners if self._completions[owner].born == born]
            if not full:
                continue
            longer = self._branch_blocks.setdefault(
                2 * size, KVBlock(2 * size, rounds=self.is_static)
            )
            moved = list(block.owners) if self.is_static else full
            self._move(moved, self._completions, block, longer)

    def _lay_out(self) -> Layout:
        ids: list[int] = []
        branches = []
        for _, block in sorted(self._branch_blocks.items()):
            if block.owners:
                born = {self._completions[owner].born for owner in block.owners}
                start, end = len(ids), len(ids) + len(block.owners)
                is_even = len(born) == 1 and not self.is_static
                branches.append(Branches(block, start, end, min(born), is_even))
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
        self._born_N = self._numbers([owner.born for owner in owners])
        return Layout(
            ids=tuple(ids),
            prompt_lengths_N=self._numbers([self._prompts[o.prompt].length for o in owners]),
            branches=tuple(branches),
            trunks=trunks,
            places_N=self._numbers(places),
            is_in_order=order == list(range(len(ids))) and not self.is_static,
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
            if self.is_static:
                width = power_of_two(width)
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
                    block.length if self.is_static else max(lengths),
                    len(set(lengths)) == 1 and not self.is_static,
                )
            )
        return tuple(trunks), order

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        made = torch.tensor(numbers, dtype=torch.int64)
        return made if self.is_static else made.to(self.device)
