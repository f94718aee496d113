"""A backend without a model, to measure everything that is around one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from laurel.errors import DataError
from laurel.rewards.rendered import Rendered
from laurel.types import Conversation, Group, Message, Score, SentTurn, TokenGroup, group_of

if TYPE_CHECKING:
    from laurel.rewards.to_tokens import Prepared
    from laurel.types import TokenIds


class NullScorer:
    """A token is a byte of the text, and the score the mean of the bytes of the answer's end."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `merging.Encoder`."""
        return [_prepared(group) for group in groups]

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """See `merging.Encoder`."""
        if isinstance(row, SentTurn):
            if not row.is_rendered:
                said = group_of((Message("user", row.prompt),), (row.response,), group_id="")
                tokens, _ = _prepared(said)
                assert tokens is not None
                return tokens
            row = row.prompt + row.response
        ids = _bytes(row) if isinstance(row, str) else np.asarray(row, dtype=np.int32)
        if not len(ids):
            raise DataError("a conversation without a single token has no score")
        return TokenGroup(id="", trunk_ids=ids[:0], branches_ids_G=(ids,), truncated_G=(False,))

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """See `batcher.Backend`."""
        return [
            tuple(_score(group.trunk_ids, branch) for branch in group.branches_ids_G)
            for group in tokens
        ]

    def sleep(self) -> None:
        """There is no memory to give back."""

    def wake(self) -> None:
        """There is nothing to take again."""

    def close(self) -> None:
        """There is nothing to free."""


def _bytes(text: str) -> TokenIds:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def _text(conversation: Conversation) -> str:
    return "".join(f"{message.role}\n{message.content}\n" for message in conversation)


def _prepared(group: Group) -> Prepared:
    if not group.completions_G:
        return None, ()
    size = len(group.completions_G)
    tokens = TokenGroup(
        id=group.id,
        trunk_ids=_bytes(_text(group.prompt)),
        branches_ids_G=tuple(_bytes(_text(one.messages)) for one in group.completions_G),
        truncated_G=(False,) * size,
    )
    return tokens, (None,) * size


_END = 16
"""Bytes that the score reads."""


def _score(trunk_ids: TokenIds, branch_ids: TokenIds) -> Score:
    end = branch_ids[-_END:]
    if len(end) < _END:
        end = np.concatenate([trunk_ids, end])[-_END:]
    value = sum(end.tolist()) / (128 * len(end)) - 1.0
    return Score(value=value, values_K=(value,), num_tokens=len(trunk_ids) + len(branch_ids))
