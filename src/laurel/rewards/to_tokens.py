"""Groups on their way to tokens: which completions can be rendered, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from laurel.errors import DataError
from laurel.types import Group, TokenGroup

if TYPE_CHECKING:
    from laurel.models.scoring import ScoringContract

Prepared = tuple[TokenGroup | None, tuple[str | None, ...]]
"""The tokens of the completions of a group that can be rendered, and of each completion why it
cannot; None where none can."""


class Preparing(Protocol):
    """Renders and tokenises, in other processes. May be asked from several threads."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `prepared_by`.

        Raises:
            WorkerError: The processes are lost for good (`is_lost`).
        """

    def close(self) -> None:
        """End the processes. Idempotent."""


def prepared_by(contract: ScoringContract, groups: Sequence[Group]) -> list[Prepared]:
    """The tokens of the completions that can be rendered, and why each other one cannot."""
    groups_left = [group for group in groups if group.completions_G]
    try:
        encoded = iter(contract.encode(groups_left) if groups_left else ())
    except DataError:
        return [_one_by_one(contract, group) for group in groups]
    return [
        (next(encoded) if group.completions_G else None, (None,) * len(group.completions_G))
        for group in groups
    ]


def _one_by_one(contract: ScoringContract, group: Group) -> Prepared:
    def why_not(alone: Group) -> str | None:
        try:
            contract.encode([alone])
        except DataError as error:
            return str(error)
        return None

    sound, failures = sifted(group, why_not)
    return (contract.encode([sound])[0] if sound.completions_G else None), failures


def sifted(
    group: Group, why_not: Callable[[Group], str | None]
) -> tuple[Group, tuple[str | None, ...]]:
    """The group with the completions that can be used, and of each completion why it cannot.

    Args:
        group: Any.
        why_not: Told of each completion as a group of its own.
    """
    failures = tuple(why_not(replace(group, completions_G=(one,))) for one in group.completions_G)
    sound = tuple(
        completion
        for completion, failure in zip(group.completions_G, failures, strict=True)
        if failure is None
    )
    return replace(group, completions_G=sound), failures
