"""Any scorer, asked by callers that have no event loop."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes import WordScorer
from laurel.errors import EnvironmentFailedError
from laurel.rewards import blocking
from laurel.rewards.blocking import BlockingScorer
from laurel.types import Message, group_of

GROUPS = [group_of((Message("user", "Where?"),), ("By the gate.", "No."), group_id="a")]


class Endless:
    """A scorer that never answers."""

    def __init__(self):
        self.asked = threading.Event()
        self.gave_up = threading.Event()

    async def score(self, groups):
        self.asked.set()
        try:
            await asyncio.sleep(1000)
        finally:
            self.gave_up.set()


def test_what_is_under_way_when_it_is_closed_fails_at_once():
    inner = Endless()
    scorer = BlockingScorer(inner)
    told = []

    def ask():
        with pytest.raises(EnvironmentFailedError, match="closed meanwhile") as caught:
            scorer.score_now(GROUPS)
        told.append(caught.value)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert inner.asked.wait(30)
    scorer.close()
    thread.join(30)
    assert len(told) == 1
    assert inner.gave_up.is_set()


class Stubborn(Endless):
    """Does not end when it is told to, before it is let go."""

    def __init__(self, *, holds_up_the_loop):
        super().__init__()
        self.may_end = threading.Event()
        self._holds_up_the_loop = holds_up_the_loop

    async def score(self, groups):
        self.asked.set()
        if self._holds_up_the_loop:
            assert self.may_end.wait(30)
        while not self.may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)


@pytest.mark.parametrize("holds_up_the_loop", [False, True])
def test_what_does_not_end_when_it_is_closed_is_left_behind(monkeypatch, caplog, holds_up_the_loop):
    monkeypatch.setattr(blocking, "_CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(blocking, "_CLOSE_SECONDS", 0.05)
    inner = Stubborn(holds_up_the_loop=holds_up_the_loop)
    scorer = BlockingScorer(inner)
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(scorer.score_now, GROUPS)
        try:
            assert inner.asked.wait(30)
            threads.submit(scorer.close).result(30)
            with pytest.raises(EnvironmentFailedError, match="it is abandoned"):
                asking.result(30)
            assert "did not end when it was cancelled" in caplog.text
        finally:
            inner.may_end.set()


def test_a_scorer_that_does_not_end_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(blocking, "_CLOSE_SECONDS", 0.05)
    may_end = threading.Event()

    class Unending(WordScorer):
        async def aclose(self):
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)

    scorer = BlockingScorer(Unending())
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(scorer.close).result(30)
            assert "did not close within 0.05 s" in caplog.text
        finally:
            may_end.set()


def test_a_closed_scorer_is_not_asked():
    scorer = BlockingScorer(WordScorer())
    (scores_G,) = scorer.score_now(GROUPS)
    assert len(scores_G) == 2
    scorer.close()
    scorer.close()
    with pytest.raises(EnvironmentFailedError, match=r"was closed$"):
        scorer.score_now(GROUPS)
