"""Keeps ranks in step that compute different numbers of parts.

A pass over a sharded model gathers weights from all ranks, and a backward pass sums gradients over
them. So all ranks make the same passes in the same order. Each has passes of its own, which are
part of that order; for the others it computes a single token that nobody reads, with gradients of
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from laurel.models.forest.attention import AttentionPlan, ForestPlan
from laurel.types import Span, Tree

FORWARD, BACKWARD = "f", "b"
"""A pass without gradients; and one with gradients, followed by its backward pass."""


class ComputesRows(Protocol):
    """A model that is called with a function, so that its hooks run, such as a `Decoder`."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    def __call__(self, compute: Callable[[], Any], /) -> Any:
        """Return what the function returns, which computes with the model."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the layers compute."""

    def hidden_of_row(self, ids_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute the hidden states `[T, D]` of one row of tokens."""

    def read(self, hidden_XD: Tensor, targets_X: Tensor) -> Any:
        """Apply the head to hidden states, which predict the tokens `targets_X`."""


def common_order(orders: Sequence[str]) -> str:
    """Return an order of passes that contains the passes of each rank, in their own order."""
    places = [0] * len(orders)
    common: list[str] = []
    while waiting := {o[at] for o, at in zip(orders, places, strict=True) if at < len(o)}:
        # Passes without gradients first: they take less, and those with gradients wait for them.
        kind = FORWARD if FORWARD in waiting else BACKWARD
        common.append(kind)
        for rank, (order, place) in enumerate(zip(orders, places, strict=True)):
            places[rank] += place < len(order) and order[place] == kind
    return "".join(common)


class InStep:
    """The passes that a rank still has to make, with those of the other ranks."""

    def __init__(self, model: ComputesRows, order: Iterable[str]) -> None:
        """Take the model and the order of passes that all ranks agreed on."""
        self._model = model
        self._order: Iterator[str] = iter(order)

    def before(self, kind: str) -> None:
        """Make the passes of other ranks that come before this rank's next one, of this kind."""
        for other in self._order:
            if other == kind:
                return
            fill(self._model, other)
        raise AssertionError("a pass that the ranks did not agree on")

    def finish(self) -> None:
        """Make the passes of other ranks that are left."""
        for other in self._order:
            fill(self._model, other)


def fill(model: ComputesRows, kind: str) -> None:
    """Make a pass that changes nothing, because other ranks make one."""

    def compute() -> Tensor:
        nothing_1 = torch.zeros(1, dtype=torch.int64)
        with model.autocast():
            hidden_1D = model.hidden_of_row(
                nothing_1, nothing_1, ForestPlan([Tree.of(Span(0, 1), [])])
            )
        return anchor_of(model, hidden_1D)

    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.set_grad_enabled(kind == BACKWARD):
        anchor = model(compute)
        if kind == BACKWARD:
            anchor.backward(torch.zeros_like(anchor))


def anchor_of(model: ComputesRows, hidden_TD: Tensor) -> Tensor:
    """Return an output of the head, to which a gradient of zero is passed.

    Ranks sum the gradients of those weights that have some. With this output every pass gives some
    to every weight, also where it reads no hidden state.
    """
    first, *_ = columns_of(model.read(hidden_TD[:1], torch.zeros(1, dtype=torch.int64)))[0]
    return first  # type: ignore[no-any-return]


def columns_of(outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the tensors of a model's outputs, and how they are put together again.

    The first has gradients; others may be None.
    """
    if isinstance(outputs, tuple):  # of a policy
        return list(outputs), lambda columns: type(outputs)(*columns)
    return [outputs], lambda columns: columns[0]
