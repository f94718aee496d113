"""A backend of a batcher that computes when it is let, fails where it is told, and remembers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from null_server import NullScorer

from laurel.types import Group, Score, TokenGroup


class ScriptedBackend(NullScorer):
    """As `NullScorer`, besides."""

    def __init__(self, *, fails: Callable[[Sequence[TokenGroup]], bool] = lambda _: False) -> None:
        self.fails = fails
        self.batches: list[list[TokenGroup]] = []
        """What was computed, also where it failed."""
        self.begun = threading.Semaphore(0)
        """Released when a batch begins."""
        self.may_go = threading.Event()
        self.may_go.set()
        self.said: list[str] = []

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        self.batches.append(list(tokens))
        self.begun.release()
        assert self.may_go.wait(20), "nobody let it go on"
        if self.fails(tokens):
            raise RuntimeError("the device is gone")
        return super().score_tokens(tokens)

    def sleep(self) -> None:
        self.said.append("sleep")

    def wake(self) -> None:
        self.said.append("wake")

    def close(self) -> None:
        self.said.append("close")

    @property
    def computed(self) -> int:
        """Completions."""
        return sum(len(tree.branches_ids_G) for batch in self.batches for tree in batch)


def holds(text: str) -> Callable[[Sequence[TokenGroup]], bool]:
    """Whether any completion of a batch holds a text."""
    wanted = text.encode()

    def check(tokens: Sequence[TokenGroup]) -> bool:
        return any(
            wanted in bytes(branch.tolist()) for tree in tokens for branch in tree.branches_ids_G
        )

    return check


def null_scores(group: Group) -> tuple[Score, ...]:
    """What the backend says of a group by itself."""
    ((tokens, _),) = NullScorer().prepare([group])
    assert tokens is not None
    return NullScorer().score_tokens([tokens])[0]
