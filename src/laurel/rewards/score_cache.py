"""Scores that a model gave before, by what it read."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from laurel.types import Score, TokenGroup

Key = bytes


def keys_of(tokens: TokenGroup) -> tuple[Key, ...]:
    """What the sequences of a group are known by, however each is divided."""
    trunk = hashlib.blake2b(np.ascontiguousarray(tokens.trunk_ids).data, digest_size=16)
    keys = []
    for branch_ids, is_cut in zip(tokens.branches_ids_G, tokens.truncated_G, strict=True):
        digest = trunk.copy()
        digest.update(np.ascontiguousarray(branch_ids).data)
        if is_cut:
            digest.update(b"cut")  # no whole number of tokens
        keys.append(digest.digest())
    return tuple(keys)


class ScoreCache:
    """The scores that were wanted last. It belongs to one version of one model."""

    def __init__(self, max_entries: int) -> None:
        """Hold so many scores after each `trim`."""
        self._max_entries = max_entries
        self._scores: OrderedDict[Key, Score] = OrderedDict()
        self._failures: dict[Key, Score] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._scores or key in self._failures

    def __len__(self) -> int:
        return len(self._scores) + len(self._failures)

    def get(self, key: Key) -> Score:
        """A score that is there; it is now the one wanted last."""
        if key in self._failures:
            return self._failures[key]
        self._scores.move_to_end(key)
        return self._scores[key]

    def put(self, key: Key, score: Score) -> None:
        """Remember a score."""
        (self._scores if score.failure is None else self._failures)[key] = score

    def trim(self) -> None:
        """Forget failures, which may not come again, and then the scores wanted longest ago."""
        self._failures.clear()
        while len(self._scores) > self._max_entries:
            self._scores.popitem(last=False)
