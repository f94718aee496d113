"""The dtype in which an engine holds its weights, in which they travel to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class HeldDtype(NamedTuple):
    """The dtype of an engine's weights. Wider values are rounded to it before they travel.

    The engine would round them in the same way when it copies them to its own. So it computes with
    exactly what is sent, and half the bytes travel.
    """

    name: str
    """Such as `bfloat16`."""
    wider: frozenset[str] = frozenset()
    """The weights that the engine holds in a wider dtype, such as the bias of a router: they travel
    as they are. Each is named by the last two parts of its name, because engines use other names
    before them."""


@runtime_checkable
class HoldsRounded(Protocol):
    """A generator whose weights may have another dtype than the learner's."""

    @property
    def held_dtype(self) -> HeldDtype | None:
        """The dtype of its weights; None: it wants the values that the learner has."""


def tail(name: str) -> str:
    """Return the last two parts of a weight's name."""
    return ".".join(name.rsplit(".", 2)[-2:])


def held_dtype(name: str, wider: Iterable[str], saved: Mapping[str, object]) -> HeldDtype | None:
    """Describe the weights of an engine.

    Args:
        wider: The engine's names of the weights that it holds in a wider dtype.
        saved: The names of all weights that travel, as keys.

    Returns:
        None if a wider weight has no name that travels, because it is computed from others: then
        all weights have to travel as the learner has them.
    """
    tails = {tail(one) for one in wider}
    return HeldDtype(name, frozenset(tails)) if tails <= {tail(one) for one in saved} else None


def as_held(
    tensors: Iterable[tuple[str, Tensor]], held: HeldDtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, each rounded once to the dtype in which the engine holds it.

    A weight that is not wider than that is yielded as it is, and so are integers.
    """
    dtype: torch.dtype | None = None if held is None else getattr(torch, held.name)
    for name, tensor in tensors:
        is_wider = dtype is not None and tensor.itemsize > dtype.itemsize
        if is_wider and tensor.is_floating_point() and tail(name) not in held.wider:  # type: ignore[union-attr]
            yield name, tensor.detach().to(dtype)
        else:
            yield name, tensor


def common_dtype(held: Iterable[HeldDtype | None]) -> HeldDtype | None:
    """Return the dtype that several engines hold; None if they differ."""
    found = set(held)
    return found.pop() if len(found) == 1 else None
