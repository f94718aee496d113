"""What many clients asked, as the trees that a model computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from laurel.errors import DataError, is_lost_worker
from laurel.rewards.rendered import Rendered, rendered_rows
from laurel.rewards.score_cache import Key, ScoreCache, keys_of
from laurel.rewards.to_tokens import Prepared, sifted
from laurel.types import Group, Message, Score, SentTurn, TokenGroup

if TYPE_CHECKING:
    from laurel.types import TokenIds

_SHORTEST_TRUNK = 16
"""Tokens; sharing fewer is not worth a tree."""


class Encoder(Protocol):
    """Turns what clients send into tokens."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer.prepare`."""

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `ContractScorer.prepare_rendered`."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One group of one client, as tokens."""

    tokens: TokenGroup | None
    """Of the completions that can be rendered; None where none can."""
    failures: tuple[str | None, ...]
    """Of each completion."""
    keys: tuple[Key, ...]
    """Of each that can be rendered."""
    is_loose: bool
    """Whether its completions have nothing in common that is known of."""

    @classmethod
    def of(cls, prepared: Prepared, *, is_loose: bool = False) -> Unit:
        """What a scorer made of a group."""
        tokens, failures = prepared
        if tokens is None:
            return cls(None, failures, (), is_loose)
        keys = keys_of(tokens)
        return cls(tokens, failures, keys, is_loose or len(keys) == 1)

    @property
    def num_tokens(self) -> int:
        """What it adds to a batch, if nothing of it is known."""
        return 0 if self.tokens is None else self.tokens.num_tokens

    def verdicts(self, cache: ScoreCache) -> tuple[Score, ...]:
        """The scores of all completions, once the cache has them."""
        known = iter(self.keys)
        return tuple(
            cache.get(next(known)) if failure is None else Score(value=None, failure=failure)
            for failure in self.failures
        )


@dataclass(frozen=True, slots=True, eq=False)
class KeyedTree:
    """A tree to be computed, and the key of each of its branches."""

    tokens: TokenGroup
    keys: tuple[Key, ...]

    def part(self, chosen: Sequence[int]) -> KeyedTree:
        """The same trunk with some of the branches."""
        tokens = replace(
            self.tokens,
            branches_ids_G=tuple(self.tokens.branches_ids_G[i] for i in chosen),
            truncated_G=tuple(self.tokens.truncated_G[i] for i in chosen),
        )
        return KeyedTree(tokens, tuple(self.keys[i] for i in chosen))


def planned(units: Iterable[Unit], cache: ScoreCache) -> list[KeyedTree]:
    """What has to be computed for units: nothing that the cache knows, and nothing twice.

    A group stays one tree. Conversations that came alone become trees by what they share.
    """
    seen: set[Key] = set()
    trees: list[KeyedTree] = []
    loners: list[KeyedTree] = []
    for unit in units:
        if unit.tokens is None:
            continue
        wanted: list[int] = []
        for index, key in enumerate(unit.keys):
            if key not in seen and key not in cache:
                seen.add(key)
                wanted.append(index)
        tree = KeyedTree(unit.tokens, unit.keys)
        if unit.is_loose:
            loners += [tree.part([index]) for index in wanted]
        elif wanted:
            trees.append(tree.part(wanted) if len(wanted) < len(unit.keys) else tree)
    return [*trees, *joined(loners)]


def joined(loners: Sequence[KeyedTree]) -> list[KeyedTree]:
    """Trees of one branch each, joined where their sequences begin alike.

    In sorted order, neighbours are joined where they share at least half of what either shares
    with its other neighbour: so the prompts that have a system message in common stay apart, and
    the completions of one prompt find each other.
    """
    if len(loners) < 2:
        return list(loners)
    ids = {id(tree): _whole(tree.tokens) for tree in loners}
    ordered = sorted(loners, key=lambda tree: ids[id(tree)].tobytes())
    rows = [ids[id(tree)] for tree in ordered]
    shared = [_num_shared(rows[i], rows[i + 1]) for i in range(len(rows) - 1)]
    trees: list[KeyedTree] = []
    first = 0
    for i, common in enumerate(shared):
        around = max(shared[max(i - 1, 0) : i + 2])
        if common < _SHORTEST_TRUNK or 2 * common < around:
            trees.append(_one_tree(ordered[first : i + 1], rows[first : i + 1], shared[first:i]))
            first = i + 1
    trees.append(_one_tree(ordered[first:], rows[first:], shared[first:]))
    return trees


def _whole(tokens: TokenGroup) -> TokenIds:
    return np.concatenate([tokens.trunk_ids, tokens.branches_ids_G[0]])


def _num_shared(one: TokenIds, other: TokenIds) -> int:
    """Tokens that both begin with, so that each has one more."""
    size = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else max(size, 0)


def _one_tree(
    trees: Sequence[KeyedTree], rows: Sequence[TokenIds], shared: Sequence[int]
) -> KeyedTree:
    trunk = min(shared, default=0)
    tokens = TokenGroup(
        id="",
        trunk_ids=rows[0][:trunk],
        branches_ids_G=tuple(row[trunk:] for row in rows),
        truncated_G=tuple(tree.tokens.truncated_G[0] for tree in trees),
    )
    return KeyedTree(tokens, tuple(tree.keys[0] for tree in trees))


def halves(trees: Sequence[KeyedTree]) -> tuple[list[KeyedTree], list[KeyedTree]] | None:
    """Trees in two parts; None where there is only one branch."""
    if len(trees) > 1:
        middle = len(trees) // 2
        return list(trees[:middle]), list(trees[middle:])
    (tree,) = trees
    count = len(tree.keys)
    if count == 1:
        return None
    return [tree.part(range(count // 2))], [tree.part(range(count // 2, count))]


# ------------------------------------------------------------------------------------- to tokens


def units_of(encoder: Encoder, groups: Sequence[Group]) -> list[Unit]:
    """The tokens of groups; whatever is wrong with a completion is a failure of that one alone.

    Raises:
        WorkerError: Too many of those who render were lost.
    """
    rows_of = [rendered_rows(group) for group in groups]
    said = [group for group, rows in zip(groups, rows_of, strict=True) if rows is None]
    prepared = iter(_prepared(encoder, said) if said else ())
    return [
        Unit.of(next(prepared))
        if rows is None
        else Unit.of(_prepare_rows(encoder, rows), is_loose=True)
        for rows in rows_of
    ]


def _prepared(encoder: Encoder, groups: Sequence[Group]) -> list[Prepared]:
    if all(_is_text(message.content) for group in groups for message in _messages(group)):
        try:
            return encoder.prepare(groups)
        except Exception as error:  # whose fault it is is found below
            if is_lost_worker(error):
                raise
    return [_prepare_carefully(encoder, group) for group in groups]


def _prepare_rows(encoder: Encoder, rows: Sequence[Rendered | None]) -> Prepared:
    """Conversations that their client has rendered, as branches without a trunk."""
    found: list[TokenGroup] = []
    failures: list[str | None] = []
    for row in rows:
        failure = None
        try:
            found.append(_prepare_row(encoder, row))
        except DataError as error:
            failure = str(error)
        except Exception as error:
            failure = _unreadable(error)
        failures.append(failure)
    if not found:
        return None, tuple(failures)
    tokens = TokenGroup(
        id="",
        trunk_ids=found[0].trunk_ids[:0],
        branches_ids_G=tuple(map(_whole, found)),
        truncated_G=tuple(one.truncated_G[0] for one in found),
    )
    return tokens, tuple(failures)


def _prepare_row(encoder: Encoder, row: Rendered | None) -> TokenGroup:
    if row is None:
        raise DataError("it is neither a list of token ids nor a prompt with its response")
    texts = [row] if isinstance(row, str) else row[:2] if isinstance(row, SentTurn) else []
    if not all(map(_is_text, texts)):
        raise DataError(_HALF_A_CHARACTER)
    return encoder.prepare_rendered(row)


_HALF_A_CHARACTER = "it holds half a character (a lone surrogate)"


def _unreadable(error: Exception) -> str:
    """Why a completion has no tokens; the error itself where that is the fault of none."""
    if is_lost_worker(error):
        raise error
    return f"it cannot be read: {type(error).__name__}: {error}"


def _prepare_carefully(encoder: Encoder, group: Group) -> Prepared:
    sound, failures = sifted(group, partial(_why_not, encoder))
    if not sound.completions_G:
        return None, failures
    try:
        ((tokens, _),) = encoder.prepare([sound])
    except Exception as error:
        failed = _unreadable(error)
        return None, tuple(failure or failed for failure in failures)
    return tokens, failures


def _why_not(encoder: Encoder, alone: Group) -> str | None:
    """Why a group of one completion cannot be rendered."""
    if not all(_is_text(message.content) for message in _messages(alone)):
        return _HALF_A_CHARACTER
    try:
        ((_, (failure,)),) = encoder.prepare([alone])
    except Exception as error:
        return _unreadable(error)
    return failure


def _messages(group: Group) -> Iterator[Message]:
    yield from group.prompt
    for one in group.completions_G:
        yield from one.messages


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
