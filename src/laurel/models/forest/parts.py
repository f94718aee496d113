"""Computes forests that exceed one pass of a model in parts, with the outputs and gradients of one.

`models/forest/tree_parts.py` divides a forest. Every part attends to the keys and values of its
path, the tokens above it, which earlier passes have computed. Without gradients that is all: a part
is computed once, and its keys and values are kept until the last part below it is done.

With gradients, the keys and values of a path, and the hidden states that predict the first tokens
below it, are leaves: the backward pass of each part below adds to their gradients. When the last of
them is done, the part that they belong to is computed again, now with gradients. Its backward pass
is an ordinary one, that begins at its hidden states; in each layer the gradients of its keys and
values by the parts below are added to its own. So the activations of one part are in memory at a
time, and the keys and values of one path. Parts that no other part continues, such as the
completions of a prompt, are computed once.

The loss of some completions is computed from all their tokens at once. Completions within one part
have theirs with the outputs of this part. The outputs of others, such as answers that are longer
than a part, are computed without gradients first; their loss gives the gradients by these outputs.

The order of passes depends on the forest alone. Ranks that share a model, each with forests of its
own, agree on an order that contains those of all (`models/forest/lockstep.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from laurel.models.forest.attention import (
    AttentionOptions,
    ForestPlan,
    as_computed,
)
from laurel.models.forest.lockstep import (
    BACKWARD,
    FORWARD,
    ComputesRows,
    anchor_of,
    columns_of,
)
from laurel.models.forest.tree_parts import Part, parts_of
from laurel.types import TokenForest

Result = TypeVar("Result")
KeysValues = tuple[Tensor, Tensor]
"""The keys `[1, H_kv, T, D]` and the values `[1, H_kv, T, D_v]` of a layer."""
Action = tuple[str, Callable[[], object]]
"""A pass, or what is done between passes, whose kind is empty; and the function that does it."""


class Readings(NamedTuple):
    """The hidden states of a forest that a model's head reads, and what its outputs belong to."""

    index_X: Tensor
    """int64 [X]: the token whose hidden state is read."""
    holder_X: Tensor
    """int64 [X]: the token that the output is about: this one, or the next, which it predicts."""
    targets_X: Tensor
    """int64 [X]: the predicted token; of heads that predict none, not read."""
    label_M: Tensor
    """int64 [M]: the output of each label, completion after completion."""
    lengths_N: Sequence[int]
    """The number of labels of each completion; where a completion is read at several tokens, 1 for
    each of them."""


class ComputesParts(ComputesRows, Protocol):
    """A model whose forests may be computed in parts, such as a `Decoder`."""

    training: bool
    skips_unread: bool
    mesh: DeviceMesh | None

    def readings(self, forest: TokenForest) -> Readings:
        """Return which hidden states of a forest the head reads."""


def outputs_in_parts(model: ComputesParts, forest: TokenForest) -> Any:
    """Compute what `model(forest)` gives in one pass, without gradients.

    Args:
        forest: The tokens, with the size of parts.
    """
    assert not torch.is_grad_enabled(), "gradients of parts need backward_in_parts"
    work = _Work(model, forest)
    for _, act in work.reading(range(len(work.parts)), set()):
        act()
    return work.outputs(range(len(work.readings.lengths_N)))


def passes_of_outputs(model: ComputesParts, forest: TokenForest) -> str:
    """Return the passes of `outputs_in_parts`, in order."""
    work = _Work(model, forest)
    return "".join(kind for kind, _ in work.reading(range(len(work.parts)), set()))


def passes_of_backward(
    model: ComputesParts, forest: TokenForest, units: Sequence[Sequence[int]] | None
) -> str:
    """Return the passes of `backward_in_parts`, in order."""
    work = _Work(model, forest)
    return "".join(kind for kind, _ in _Training(work, units, _no_loss).actions())


def backward_in_parts(
    model: ComputesParts,
    forest: TokenForest,
    units: Sequence[Sequence[int]] | None,
    loss_of: Callable[[Any, list[int]], tuple[Tensor, Result]],
    *,
    before: Callable[[str], None] | None = None,
) -> list[Result]:
    """Compute a loss and add its gradients to those of the parameters.

    Args:
        units: The completions whose losses cannot be divided, all completions once, in order; None:
            the loss of the forest is one.
        loss_of: Computes the sum of the losses of some units, given the outputs of the model for
            their completions and their indices; and what is returned of it.
        before: Called before each pass with its kind, such as `InStep.before` of ranks that agreed
            on their passes.

    Returns:
        What `loss_of` returned with each loss.
    """
    training = _Training(_Work(model, forest), units, loss_of)
    for kind, act in training.actions():
        if kind and before is not None:
            before(kind)
        act()
    return training.results


def _no_loss(_outputs: Any, _units: list[int]) -> tuple[Tensor, Any]:
    raise AssertionError("the passes are only counted")


class _Owed(torch.autograd.Function):
    """Passes keys or values on, and in the backward pass adds the gradient by other parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, owed: Tensor) -> Tensor:
        ctx.owed = owed
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad + ctx.owed).to(grad.dtype), None


class PartPlan(ForestPlan):
    """Decides which keys each query of a part attends to: its own tokens, and those of its path."""

    def __init__(
        self,
        part: Part,
        *,
        read_X: Tensor | None,
        given: Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor]]],
        kept: dict[int, KeysValues] | None,
        owed: Mapping[int, KeysValues],
    ) -> None:
        """Arrange the tokens of a part.

        Args:
            read_X: The tokens whose hidden states are read, as in `ForestPlan`.
            given: Returns the keys and the values of the path in a layer, piece by piece.
            kept: Takes the part's own keys and values by layer; None: they are not kept.
            owed: The gradients of the part's own keys and values by other parts, by layer.
        """
        super().__init__(part.trees, read_X=read_X, has_root=not part.path)
        self._given, self._kept, self._owed = given, kept, owed

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention as `AttentionPlan.attend` describes."""
        query, key, value = as_computed(query, key, value)
        layer: Any = module.layer_idx
        if self._kept is not None:
            self._kept[layer] = (key, value)
        if layer in self._owed:
            by_key, by_value = self._owed[layer]
            key = _Owed.apply(key, by_key)  # type: ignore[no-untyped-call]
            value = _Owed.apply(value, by_value)  # type: ignore[no-untyped-call]
        if self.num_given:
            keys, values = self._given(layer)
            key, value = torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)
        return super().attend(module, query, key, value, options)


@dataclass(eq=False)
class _Held:
    """What the parts below a part need of it."""

    keys: dict[int, KeysValues]
    hidden_XD: Tensor
    """The hidden states of its tokens that parts hang below."""
    owed: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """The gradients of keys and values so far."""

    def learn(self) -> None:
        """Make all tensors leaves; those of keys and values sum gradients in float32 or wider."""
        self.hidden_XD = self.hidden_XD.detach().requires_grad_()
        for layer, tensors in self.keys.items():
            self.owed[layer] = [None, None]
            leaves = []
            for place, tensor in enumerate(tensors):
                leaf = tensor.detach().requires_grad_()
                adding = _adding(self.owed[layer], place)
                leaf.register_post_accumulate_grad_hook(adding)  # type: ignore[no-untyped-call]
                leaves.append(leaf)
            self.keys[layer] = (leaves[0], leaves[1])

    def debts(self) -> dict[int, KeysValues]:
        """Return the gradients of keys and values by layer."""
        found: dict[int, KeysValues] = {}
        for layer, (key, value) in self.keys.items():
            by_key, by_value = self.owed[layer]
            found[layer] = (
                torch.zeros_like(key) if by_key is None else by_key,
                torch.zeros_like(value) if by_value is None else by_value,
            )
        return found


def _adding(owed: list[Tensor | None], place: int) -> Callable[[Tensor], None]:
    # Knows the sums alone: with what holds the leaves, they would be in memory until Python looks
    # for circles of references.
    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        before = owed[place]
        if before is None:
            owed[place] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
        else:
            before += leaf.grad
        leaf.grad = None

    return add


class _Work:
    """The parts of a forest, and what has been computed of them."""

    def __init__(self, model: ComputesParts, forest: TokenForest) -> None:
        assert forest.part_tokens is not None
        self.model = model
        self.readings: Readings = model.readings(forest)
        self.parts = parts_of(forest.trees, forest.part_tokens)
        self.children: list[list[int]] = [[] for _ in self.parts]
        num_tokens = len(forest.ids_T)
        self._part_T = torch.empty(num_tokens, dtype=torch.int64)
        self._local_T = torch.empty(num_tokens, dtype=torch.int64)
        self._rows: list[Tensor] = []
        for number, part in enumerate(self.parts):
            if part.parent >= 0:
                self.children[part.parent].append(number)
            rows = torch.cat([torch.arange(*span) for span in part.spans])
            self._rows.append(rows)
            self._part_T[rows], self._local_T[rows] = number, torch.arange(len(rows))
        self.ends = list(range(1, len(self.parts) + 1))
        """The first part after each that is not below it: parts are in depth-first order."""
        for number in reversed(range(len(self.parts))):
            if (above := self.parts[number].parent) >= 0:
                self.ends[above] = max(self.ends[above], self.ends[number])
        self._ids_T, self._positions_T = forest.ids_T.long(), forest.positions_T
        self._label_MN = torch.split(self.readings.label_M, list(self.readings.lengths_N))
        # The outputs of each part, by the place of their holders.
        self.part_X = self._part_T[self.readings.holder_X]
        self.reads: list[Tensor] = [
            (self.part_X == number).nonzero()[:, 0] for number in range(len(self.parts))
        ]
        # The tokens of each part that other parts hang below.
        self._hung: list[Tensor] = []
        for children in self.children:
            last = {self.parts[child].path[-1].span.end - 1 for child in children}
            self._hung.append(torch.tensor(sorted(last), dtype=torch.int64))
        self.held: dict[int, _Held] = {}
        self._noise: dict[int, list[Tensor]] = {}
        self.columns: list[Tensor | None] = []
        """The outputs [X, ...] that were computed without gradients, as far as they were."""
        self._shape_of: Any = None

    def reading(self, parts: range, held: set[int], *, keeps: bool = False) -> Iterator[Action]:
        """Yield what computes the outputs of a part and all below it, without gradients.

        Args:
            parts: The part and all below it, or all parts.
            held: The parts that are held, as far as the actions so far were done; updated.
            keeps: Whether the keys and values of the last path are kept.
        """
        path: list[int] = []
        for number in parts:
            while path and path[-1] != self.parts[number].parent:
                yield from self._dropping(path.pop(), held)
            yield from self.reading_one(number, held)
            path.append(number)
        if not keeps:
            for number in path:
                yield from self._dropping(number, held)

    def reading_one(self, number: int, held: set[int]) -> Iterator[Action]:
        """Yield what computes a part's outputs, and what the parts below it need of it."""
        if self.children[number]:
            held.add(number)
        if self.children[number] or len(self.reads[number]):
            yield FORWARD, partial(self._compute_without_gradient, number)

    def _dropping(self, number: int, held: set[int]) -> Iterator[Action]:
        if number in held:
            held.remove(number)
            yield "", partial(self.held.pop, number)

    def _compute_without_gradient(self, number: int) -> None:
        children, reads_X = self.children[number], self.reads[number]
        kept: dict[int, KeysValues] | None = {} if children else None
        with torch.no_grad():
            hidden, found, _ = self.compute(number, kept=kept)
        if kept is not None:
            self.held[number] = _Held(kept, hidden)
        if found is not None:
            self._store(reads_X, found)

    def compute(
        self,
        number: int,
        *,
        kept: dict[int, KeysValues] | None = None,
        owed: Mapping[int, KeysValues] | None = None,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """Compute a part.

        Returns:
            The hidden states of its tokens that parts hang below; its outputs, None if it has none;
            and with gradients over several ranks what `anchor_of` describes.
        """
        part, rows, reads_X = self.parts[number], self._rows[number], self.reads[number]
        index_X = self.readings.index_X[reads_X]
        is_own_X = self._part_T[index_X] == number
        own_X = self._local_T[index_X]
        wanted = [own_X[is_own_X], self._hung[number]]
        has_anchor = self.model.mesh is not None and torch.is_grad_enabled()
        if has_anchor:
            wanted.append(torch.zeros(1, dtype=torch.int64))
        plan = PartPlan(
            part,
            read_X=torch.unique(torch.cat(wanted)) if self.model.skips_unread else None,
            given=lambda layer: self._path_in(part, layer),
            kept=kept,
            owed=owed or {},
        )

        def forward() -> tuple[Tensor, Any, Tensor | None]:
            with self.model.autocast():
                hidden_TD = self.model.hidden_of_row(
                    self._ids_T[rows], self._positions_T[rows], plan
                )
            anchor = anchor_of(self.model, hidden_TD) if has_anchor else None
            hung_XD = hidden_TD[self._there(self._hung[number])]
            if not len(reads_X):
                return hung_XD, None, anchor
            if part.path:
                # The last token of the path predicts the first tokens of all subtrees.
                above, place = part.parent, part.path[-1].span.end - 1
                row = int((self._hung[above] == place).nonzero())
                hidden_TD = torch.cat((hidden_TD, self.held[above].hidden_XD[row : row + 1]))
            hidden_XD = hidden_TD[self._there(own_X.where(is_own_X, len(rows)))]
            return hung_XD, self.model.read(hidden_XD, self.readings.targets_X[reads_X]), anchor

        with self._same_noise(number):
            found: tuple[Tensor, Any, Tensor | None] = self.model(forward)
        return found

    def outputs(self, completions: Sequence[int]) -> Any:
        """Return the outputs of all labels of some completions, computed without gradients."""
        label_M = self._there(self.labels(completions))
        return self._shape_of([None if c is None else c[label_M] for c in self.columns])

    def labels(self, completions: Sequence[int]) -> Tensor:
        """Return the index of the output of each label of some completions."""
        return torch.cat([self._label_MN[n] for n in completions])

    def _store(self, reads_X: Tensor, found: Any) -> None:
        columns, self._shape_of = columns_of(found)
        there = self._there(reads_X)
        if not self.columns:
            size = len(self.readings.index_X)
            self.columns = [
                None if c is None else c.new_zeros((size, *c.shape[1:])) for c in columns
            ]
        for whole, column in zip(self.columns, columns, strict=True):
            if whole is not None:
                whole[there] = column.detach()

    def _path_in(self, part: Part, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = [], []
        for above, span in part.path:
            key, value = self.held[above].keys[layer]
            keys.append(key[:, :, span.start : span.end])
            values.append(value[:, :, span.start : span.end])
        return keys, values

    def _there(self, index: Tensor) -> Tensor:
        return index.to(self.model.device, non_blocking=True)

    @contextmanager
    def _same_noise(self, number: int) -> Iterator[None]:
        # All passes over a part sample the same dropout.
        if not self.model.training:
            yield
            return
        device = self.model.device
        is_gpu = device.type == "cuda"
        state = self._noise.get(number)
        if state is None:
            self._noise[number] = [torch.get_rng_state()]
            if is_gpu:
                self._noise[number].append(torch.cuda.get_rng_state(device))
            yield
            return
        with torch.random.fork_rng([device] if is_gpu else []):
            torch.set_rng_state(state[0])
            if is_gpu:
                torch.cuda.set_rng_state(state[1], device)
            yield


class _Training:
    """The order of passes that gives the gradients of a loss."""

    def __init__(
        self,
        work: _Work,
        units: Sequence[Sequence[int]] | None,
        loss_of: Callable[[Any, list[int]], tuple[Tensor, Any]],
    ) -> None:
        self._work = work
        self._units = units = units or [range(len(work.readings.lengths_N))]
        self._loss_of = loss_of
        self.results: list[Any] = []
        # Units whose labels are in one part, by the part; others by the last part above them all,
        # and at the end those that none is above.
        self._whole: list[list[int]] = [[] for _ in work.parts]
        self._divided: list[list[int]] = [[] for _ in range(len(work.parts) + 1)]
        for number, unit in enumerate(units):
            holders = torch.unique(work.part_X[work.labels(unit)]).tolist()
            if len(holders) == 1:
                self._whole[holders[0]].append(number)
            else:
                self._divided[self._common(holders)].append(number)
        self._by_X: Tensor | None = None
        """The gradients by the outputs of divided units."""

    def actions(self) -> Iterator[Action]:
        """Yield what computes all losses, and the gradients of the parameters.

        Kinds and order depend on the parts alone, whether the actions are done or not.
        """
        work, held = self._work, set[int]()
        divided = [list(some) for some in self._divided]

        def learning(parts: range) -> Iterator[Action]:
            yield from work.reading(
                range(parts.start, min(parts.stop, len(work.parts))), held, keeps=True
            )
            units = sorted(unit for part in parts for unit in divided[part])
            for part in parts:
                divided[part] = []
            yield "", partial(self._learn_divided, units)

        if divided[-1]:
            yield from learning(range(len(divided)))
        stack = [number for number, part in enumerate(work.parts) if part.parent < 0]
        while stack:
            number = stack.pop()
            if number < 0:
                held.discard(~number)
                if work.children[~number] or len(work.reads[~number]):
                    yield BACKWARD, partial(self._backward, ~number)
                continue
            # What the parts below need.
            if divided[number]:
                yield from learning(range(number, work.ends[number]))
            if work.children[number] and number not in held:
                yield from work.reading_one(number, held)
            if number in held:
                yield "", partial(self._make_leaves, number)
            # Its last child is next: reading keeps the last path.
            stack += [~number, *work.children[number]]

    def _make_leaves(self, number: int) -> None:
        self._work.held[number].learn()

    def _backward(self, number: int) -> None:
        work, reads_X = self._work, self._work.reads[number]
        held = work.held.pop(number, None)
        owed = None if held is None else held.debts()
        hung_XD, found, anchor = work.compute(number, owed=owed)
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if anchor is not None:
            roots.append(anchor)
            gradients.append(torch.zeros_like(anchor))
        if held is not None:
            by_hidden = held.hidden_XD.grad
            roots.append(hung_XD)
            gradients.append(torch.zeros_like(hung_XD) if by_hidden is None else by_hidden)
        if found is not None:
            columns, shape_of = columns_of(found)
            if units := self._whole[number]:
                # The place of each output among those of the part.
                place_X = torch.empty(len(work.readings.index_X), dtype=torch.int64)
                place_X[reads_X] = torch.arange(len(reads_X))
                completions = [n for unit in units for n in self._units[unit]]
                label_M = place_X[work.labels(completions)].to(columns[0].device)
                outputs = shape_of([None if c is None else c[label_M] for c in columns])
                loss, result = self._loss_of(outputs, units)
                self.results.append(result)
                roots.append(loss)
                gradients.append(None)
            if self._by_X is not None:
                roots.append(columns[0])
                gradients.append(self._by_X[reads_X.to(self._by_X.device)])
        torch.autograd.backward(roots, gradients)

    def _learn_divided(self, units: list[int]) -> None:
        # Their parts have been read.
        work = self._work
        completions = [n for unit in units for n in self._units[unit]]
        outputs = work.outputs(completions)
        columns, shape_of = columns_of(outputs)
        leaf = columns[0].detach().requires_grad_()
        loss, result = self._loss_of(shape_of([leaf, *columns[1:]]), units)
        self.results.append(result)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._by_X is None:
            first = work.columns[0]
            assert first is not None
            self._by_X = torch.zeros_like(first)
        label_M = work.labels(completions).to(leaf.device)
        if leaf.grad is not None:
            self._by_X.index_put_((label_M,), leaf.grad, accumulate=True)

    def _common(self, holders: Sequence[int]) -> int:
        # The last part that is above all of these, or one of them; -1: there is none.
        above = min(holders, default=-1)
        while above >= 0 and max(holders) >= self._work.ends[above]:
            above = self._work.parts[above].parent
        return above
