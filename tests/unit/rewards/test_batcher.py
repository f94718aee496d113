import asyncio
import contextlib
import gc
import weakref

import pytest

from event_loops import in_loop
from laurel.errors import BusyError, EngineError
from laurel.rewards.batching import BatcherLimits, BatchingScorer
from laurel.rewards.preparing import rendered_group
from laurel.rewards.scorer import LocalScorer
from laurel.types import Group, Message, SentTurn, group_of
from process_models import process_model
from scripted_backend import ScriptedBackend, holds, null_scores

AT_ONCE = BatcherLimits(max_delay=0.0)


def asked(prompt, *answers):
    return group_of((Message("user", prompt),), answers, group_id=prompt)


@contextlib.contextmanager
def batcher(backend, limits=AT_ONCE, **options):
    scorer = BatchingScorer(backend, model_version="1", limits=limits, **options)
    try:
        yield scorer
    finally:
        backend.may_go.set()
        scorer.close()


def begun(backend):
    return asyncio.to_thread(backend.begun.acquire, timeout=20)


async def while_busy(scorer, backend):
    """A batch that is under way, and will be until `may_go` is set."""
    backend.may_go.clear()
    first = asyncio.create_task(scorer.score([asked("the first", "of all")]))
    assert await begun(backend)
    return first


async def arrived(scorer, requests):
    while scorer.stats().requests < requests:
        await asyncio.sleep(0)


@in_loop
async def test_requests_of_many_clients_share_a_batch_and_each_gets_its_own():
    groups = [asked(f"question {i}", f"answer {i}", f"other {i}") for i in range(40)]
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        first = await while_busy(scorer, backend)
        others = [asyncio.create_task(scorer.score([group])) for group in groups]
        await arrived(scorer, 41)
        backend.may_go.set()
        found = [(await task)[0] for task in others]
        await first
    assert found == [null_scores(group) for group in groups]
    assert [len(batch) for batch in backend.batches] == [1, 40]


@in_loop
async def test_a_batch_keeps_to_its_budget_and_an_overlong_group_travels_alone():
    small = [asked(f"q{i}", "a" * 30) for i in range(10)]
    large = asked("large", "b" * 500)
    backend = ScriptedBackend()
    with batcher(backend, BatcherLimits(max_delay=0, batch_tokens=200)) as scorer:
        await scorer.score([*small[:5], large, *small[5:]])
    sizes = [sum(tree.num_tokens for tree in batch) for batch in backend.batches]
    assert len(sizes) > 3
    assert sum(size > 200 for size in sizes) == 1
    (alone,) = (batch for batch in backend.batches if len(batch[0].branches_ids_G[0]) > 500)
    assert len(alone) == 1


@in_loop
async def test_an_idle_model_waits_for_company():
    backend = ScriptedBackend()
    with batcher(backend, BatcherLimits(max_delay=5.0, batch_tokens=200)) as scorer:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(scorer.score([asked(f"q{i}", "a" * 60)]) for i in range(12)))
        # The moment is over as soon as there is enough for a batch.
        assert loop.time() - began < 5.0
    assert len(backend.batches[0]) > 1


@in_loop
async def test_what_is_equal_is_computed_once_whoever_asks():
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        first = await while_busy(scorer, backend)
        same = [asyncio.create_task(scorer.score([asked("q", "a", "a", "b")])) for _ in range(5)]
        await arrived(scorer, 6)
        backend.may_go.set()
        (scores,) = {tuple((await task)[0]) for task in same}
        assert scores == null_scores(asked("q", "a", "a", "b"))
        await scorer.score([asked("q", "b")])
        await first
        assert scorer.stats().scored == 1 + 15 + 1
    assert backend.computed == 1 + 2


@in_loop
async def test_what_is_remembered_is_bounded():
    backend = ScriptedBackend()
    with batcher(backend, BatcherLimits(max_delay=0, cache_entries=2)) as scorer:
        for name in ("one", "two", "three", "two", "three", "one"):
            await scorer.score([asked(name, "a")])
    assert backend.computed == 4


@in_loop
async def test_a_full_queue_says_when_to_come_again():
    backend = ScriptedBackend()
    with batcher(backend, BatcherLimits(max_delay=0, max_waiting=4)) as scorer:
        first = await while_busy(scorer, backend)
        second = asyncio.create_task(scorer.score([asked("q", "a", "b", "c")]))
        await arrived(scorer, 2)
        with pytest.raises(BusyError) as caught:
            await scorer.score([asked("one", "more")])
        assert caught.value.retry_after > 0
        assert scorer.stats().refused == 1
        backend.may_go.set()
        await asyncio.gather(first, second)
        assert scorer.stats().waiting == 0
        # More than the queue holds is taken where nothing waits.
        assert len((await scorer.score([asked("q", *"abcdefgh")]))[0]) == 8


@in_loop
async def test_a_queue_full_of_text_is_full():
    backend = ScriptedBackend()
    with batcher(backend, BatcherLimits(max_delay=0, max_waiting_characters=1000)) as scorer:
        first = await while_busy(scorer, backend)
        with pytest.raises(BusyError):
            await scorer.score([asked("q", "a" * 1000)])
        backend.may_go.set()
        await first


@in_loop
async def test_a_cancelled_request_leaves():
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        first = await while_busy(scorer, backend)
        leaving = [asyncio.create_task(scorer.score([asked(f"q{i}", "gone")])) for i in range(9)]
        staying = asyncio.create_task(scorer.score([asked("stays", "a")]))
        await arrived(scorer, 11)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        assert scorer.stats().waiting == 2
        backend.may_go.set()
        assert await staying == [null_scores(asked("stays", "a"))]
        await first
        assert scorer.stats().cancelled == 9
    assert backend.computed == 2


@in_loop
async def test_only_what_makes_the_model_fail_fails():
    groups = [asked(f"q{i}", f"answer {i}", "poison" if i == 3 else "fine") for i in range(8)]
    backend = ScriptedBackend(fails=holds("poison"))
    with batcher(backend) as scorer:
        found = await scorer.score(groups)
        assert not scorer.is_broken
        assert scorer.stats().failed == 1
        # A failure is not remembered: the next time it may not fail.
        backend.fails = lambda _: False
        assert await scorer.score([groups[3]]) == [null_scores(groups[3])]
    for i, (group, scores) in enumerate(zip(groups, found, strict=True)):
        alone = null_scores(group)
        assert scores[0] == alone[0]
        if i == 3:
            assert scores[1].value is None
            assert scores[1].failure == "the model failed: RuntimeError"
        else:
            assert scores[1] == alone[1]


@pytest.mark.parametrize("scored_before", [True, False])
@in_loop
async def test_many_bad_ones_in_a_row_do_not_make_their_mates_fail(scored_before):
    groups = [asked(f"q{i}", "poison" if i < 40 else "fine", "good") for i in range(64)]
    backend = ScriptedBackend(fails=holds("poison"))
    with batcher(backend) as scorer:
        if scored_before:
            await scorer.score([asked("before", "a")])
        found = await scorer.score(groups)
        assert not scorer.is_broken
        assert scorer.stats().failed == 40
    for i, (group, scores) in enumerate(zip(groups, found, strict=True)):
        bad = 1 if i < 40 else 0
        assert [score.failure for score in scores[:bad]] == ["the model failed: RuntimeError"] * bad
        assert scores[bad:] == null_scores(group)[bad:]


@in_loop
async def test_a_model_that_fails_at_everything_is_told_and_comes_back():
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        await scorer.score([asked("before", "a")])
        backend.fails = lambda _: True
        with pytest.raises(EngineError, match="the device is gone"):
            await scorer.score([asked(f"q{i}", "a", "b") for i in range(64)])
        assert scorer.is_broken
        # The last one was what it could score before.
        assert len(backend.batches) == 1 + 16 + 1
        assert [len(tree.branches_ids_G) for tree in backend.batches[-1]] == [1]
        with pytest.raises(EngineError):
            await scorer.score([asked("q", "a")])
        backend.fails = lambda _: False
        assert await scorer.score([asked("q", "a")]) == [null_scores(asked("q", "a"))]
        assert not scorer.is_broken


@in_loop
async def test_a_model_that_never_scored_anything_is_broken_once_each_has_been_tried():
    backend = ScriptedBackend(fails=lambda _: True)
    groups = [asked(f"q{i}", "a", "b") for i in range(16)]
    with batcher(backend) as scorer:
        ((one,),) = await scorer.score([asked("q", "a")])
        assert one.failure == "the model failed: RuntimeError"
        assert not scorer.is_broken
        found = await scorer.score(groups)
        assert [score.failure for row in found for score in row] == [one.failure] * 32
        assert scorer.is_broken
        backend.fails = lambda _: False
        assert await scorer.score(groups) == [null_scores(group) for group in groups]
        assert not scorer.is_broken


@in_loop
async def test_an_error_of_the_engine_is_the_fault_of_no_input():
    def died(tokens):
        raise EngineError("the engine died")

    backend = ScriptedBackend()
    backend.score_tokens = died
    with batcher(backend) as scorer:
        with pytest.raises(EngineError, match="the engine died"):
            await scorer.score([asked("q", "a", "b"), asked("r", "a")])
        assert scorer.is_broken


@in_loop
async def test_a_backend_that_gives_too_few_scores_fails_and_nobody_waits_for_ever():
    backend = ScriptedBackend()
    backend.score_tokens = lambda tokens: []
    with batcher(backend) as scorer:
        ((score,),) = await scorer.score([asked("q", "a")])
    assert score.value is None


@in_loop
async def test_requests_wait_while_it_sleeps():
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        for _ in range(2):  # the backend is told once
            await scorer.sleep()
        assert scorer.is_asleep
        waiting = asyncio.create_task(scorer.score([asked("q", "a")]))
        await arrived(scorer, 1)
        assert backend.batches == []
        assert not waiting.done()
        for _ in range(2):
            await scorer.wake()
        assert await waiting == [null_scores(asked("q", "a"))]
    assert backend.said == ["sleep", "wake", "close"]


class Text(str):
    """One that can be seen to go."""


@in_loop
async def test_what_is_cancelled_while_it_sleeps_is_counted_and_let_go():
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        await scorer.sleep()
        leaving = asyncio.create_task(scorer.score([asked("q", text := Text("gone"))]))
        staying = asyncio.create_task(scorer.score([asked("q", "stays")]))
        await arrived(scorer, 2)
        left = weakref.ref(text)
        leaving.cancel()
        await asyncio.wait([leaving])
        del leaving, text
        gc.collect()
        assert left() is None
        assert (scorer.stats().waiting, scorer.stats().cancelled) == (1, 1)
        await scorer.wake()
        assert await staying == [null_scores(asked("q", "stays"))]
    assert backend.computed == 1


@in_loop
async def test_a_backend_that_cannot_sleep_scores_on():
    backend = ScriptedBackend()

    def sleep():
        raise MemoryError("no room on the host")

    backend.sleep = sleep
    with batcher(backend) as scorer:
        with pytest.raises(MemoryError):
            await scorer.sleep()
        assert await scorer.score([asked("q", "a")]) == [null_scores(asked("q", "a"))]


@in_loop
async def test_closing_ends_the_batch_and_refuses_the_rest():
    backend = ScriptedBackend()
    with batcher(backend) as scorer:
        first = await while_busy(scorer, backend)
        waiting = asyncio.create_task(scorer.score([asked("q", "a")]))
        await arrived(scorer, 2)
        closing = asyncio.create_task(asyncio.to_thread(scorer.close))
        while not scorer._is_closed:
            await asyncio.sleep(0)
        backend.may_go.set()
        await closing
        assert await first == [null_scores(asked("the first", "of all"))]
        with pytest.raises(BusyError):
            await waiting
        with pytest.raises(BusyError):
            await scorer.score([asked("q", "a")])
        scorer.close()


def test_callers_of_several_loops():
    backend = ScriptedBackend()

    async def ask(name):
        return await scorer.score([asked(name, "a")])

    with batcher(backend) as scorer:
        for name in ("one", "two"):
            assert asyncio.run(ask(name)) == [null_scores(asked(name, "a"))]


@in_loop
async def test_what_cannot_be_read_fails_alone():
    half = "\ud800"
    rows = rendered_group(["a text", half, (1, 2, 3), ()])
    bad = Group(id="bad", prompt=(), completions_G=rows.completions_G[:1] * 2)
    with batcher(ScriptedBackend()) as scorer:
        found = await scorer.score(
            [asked("q", "a", half), asked(half, "a"), rows, bad, asked("no completion")]
        )
    assert [[score.failure is None for score in scores] for scores in found] == [
        [True, False],
        [False],
        [True, False, True, False],
        [True, True],
        [],
    ]
    assert all("surrogate" in found[i][j].failure for i, j in ((0, 1), (1, 0), (2, 1)))


def test_rendered_conversations_share_what_they_begin_with():
    prompt = "a long prompt that all of them have in common, word for word. "
    rows = [prompt + answer for answer in ("one", "two", "three")]
    backend = ScriptedBackend()

    async def score():
        with batcher(backend) as scorer:
            return await scorer.score([rendered_group([*rows, "another one"])])

    (found,) = asyncio.run(score())
    assert [score.num_tokens for score in found] == [len(row) for row in [*rows, "another one"]]
    assert sorted(len(tree.branches_ids_G) for tree in backend.batches[0]) == [1, 3]


def test_a_process_model_reads_the_steps_of_a_prompt_that_is_sent_as_text():
    loaded = process_model(max_length=64)
    backend = LocalScorer(loaded.model, loaded.contract)
    answers = ["add 5\n\nSo 9.", "add 5\n\nadd 1\n\n10", "add 5\n\n" * 40]
    turns = rendered_group([SentTurn("how much?", answer, None) for answer in answers])

    async def score():
        scorer = BatchingScorer(backend, model_version="1", limits=AT_ONCE)
        with contextlib.closing(scorer):
            return await scorer.score([turns, asked("how much?", *answers)])

    sent, messages = asyncio.run(score())
    assert [len(score.values_K) for score in sent] == [2, 3, 0]
    assert sent[2].value is None
    assert "not all of its steps can be read" in sent[2].failure
    for one, other in zip(sent[:2], messages[:2], strict=True):
        assert one.values_K == pytest.approx(other.values_K, abs=1e-6)
