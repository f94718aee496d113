"""What every `Generator` promises, asked of each of them."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

import threads
from generators import (
    MAKERS,
    collect,
    draw,
    endless,
    full_logits,
    full_logprobs,
    request,
    run,
    talk,
)
from laurel.errors import ConfigError, DataError, EngineError
from laurel.types import Weights

pytestmark = pytest.mark.slow_parameters("replicas-ray")


one_thread_of_module = threads.one_thread_of_module


OF_EVERY_ONE = (
    "test_there_is_one_completion_for_each_seed",
    "test_new_weights_are_drawn_from_and_closing_ends_what_is_open",
    "test_weights_that_have_not_changed_are_not_read_and_the_version_goes_on",
    "test_an_update_waits_for_what_is_under_way",
    "test_asleep_requests_wait_until_it_wakes",
)
"""Asked of those as well that differ from another one only in whose weights they hold, in how many
share the requests, or in where those are."""
LIKE_ANOTHER = ("transformers-own-weights", "replicas-1", "replicas-ray")


def pytest_generate_tests(metafunc):
    if "make" in metafunc.fixturenames:
        is_of_all = metafunc.function.__name__ in OF_EVERY_ONE
        names = [name for name in MAKERS if is_of_all or name not in LIKE_ANOTHER]
        metafunc.parametrize("make", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def make(request):
    return MAKERS[request.param]


@pytest.fixture(scope="module")
def setup(make):
    with make() as made:
        yield made


BLOCK = 32
"""Tokens of a block of vLLM's cache on a CPU (`vllm_cfg`)."""


def near(values, setup):
    return pytest.approx(values, abs=setup.tolerance)


def same(one, other, setup):
    assert one.ids_L.tolist() == other.ids_L.tolist()
    assert one.logprobs_L == near(other.logprobs_L, setup)
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


def test_there_is_one_completion_for_each_seed(setup):
    wanted = request(seeds=(5, 6, 7, 8))
    none, found = draw(setup.generator, request(seeds=(), request_id="none"), wanted)
    assert none == []
    assert [one.index for one in found] == [0, 1, 2, 3]
    for one in found:
        assert 1 <= len(one.ids_L) <= 20
        assert one.ids_L.dtype == np.int32
        assert one.logprobs_L.dtype == np.float32
        assert one.ids_L.shape == one.logprobs_L.shape
        assert one.weight_version == setup.generator.weight_version
        assert one.text == setup.tokenizer.decode(one.ids_L, skip_special_tokens=True)
    assert len({tuple(one.ids_L) for one in found}) == 4, "different seeds, different completions"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_whole_sequence(setup, temperature):
    wanted = [
        request("Bread?", seeds=range(4), temperature=temperature),
        request("a longer prompt " * 9, seeds=range(4), temperature=temperature, max_new_tokens=90),
        request([7], seeds=(3,), temperature=temperature),
    ]
    for asked, found in zip(wanted, draw(setup.generator, *wanted), strict=True):
        for one in found:
            assert one.logprobs_L == near(full_logprobs(setup.policy, asked, one), setup)


def test_tokens_come_as_often_as_their_probability_says(setup):
    """The first token of 600 seeds, against the distribution over the four likeliest."""
    wanted = request(seeds=range(600), max_new_tokens=1, top_k=4, temperature=2.0)
    (found,) = draw(setup.generator, wanted)
    logits = full_logits(setup.policy, wanted, [0])[0] / 2.0
    best = logits.topk(4)
    share = best.values.softmax(-1).tolist()
    drawn = [int(one.ids_L[0]) for one in found]
    assert set(drawn) <= set(best.indices.tolist())
    for token, probability in zip(best.indices.tolist(), share, strict=True):
        spread = (600 * probability * (1 - probability)) ** 0.5
        assert abs(drawn.count(token) - 600 * probability) <= 4.5 * spread
    # Log-probabilities are of the distribution before its tail was cut off.
    everywhere = logits.log_softmax(-1)
    for one in found[:20]:
        assert one.logprobs_L[0] == near(float(everywhere[one.ids_L[0]]), setup)


def test_top_p_keeps_the_likeliest_that_make_up_the_share(setup):
    wanted = request(seeds=range(200), max_new_tokens=1, top_p=0.5, temperature=2.0)
    (found,) = draw(setup.generator, wanted)
    probabilities = (full_logits(setup.policy, wanted, [0])[0] / 2.0).softmax(-1)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept = set(order[before < 0.5].tolist())
    drawn = {int(one.ids_L[0]) for one in found}
    assert drawn <= kept
    assert len(drawn) > 1


def test_temperature_0_takes_the_likeliest_and_reports_at_temperature_1(setup):
    wanted = request(seeds=(1, 2), temperature=0.0)
    (found,) = draw(setup.generator, wanted)
    same(found[0], found[1], setup)
    logits = full_logits(setup.policy, wanted, found[0].ids_L.tolist())
    assert found[0].ids_L.tolist() == logits.argmax(-1).tolist()
    assert found[0].logprobs_L == near(full_logprobs(setup.policy, wanted, found[0]), setup)


def test_the_turns_of_a_conversation_are_those_of_separate_requests(setup):
    prompt = [20 + i % 150 for i in range(40)]
    named = talk(setup.generator, prompt, name="c", num_turns=4)
    for (wanted, one), (_, other) in zip(
        named, talk(setup.generator, prompt, name=None, num_turns=4), strict=True
    ):
        same(one, other, setup)
        assert one.logprobs_L == near(full_logprobs(setup.policy, wanted, one), setup)
        assert 0 <= one.num_cached < len(wanted.prompt_ids)
    assert named[0][1].finish_reason == "stop"
    setup.generator.end_conversations(["c", "never heard of"])
    ((after, said),) = talk(setup.generator, prompt, name="c", num_turns=1)
    assert said.logprobs_L == near(full_logprobs(setup.policy, after, said), setup)


def test_what_branches_off_a_conversation_is_that_of_a_separate_request(setup):
    prompt = [20 + i % 150 for i in range(40)]
    *_, (first, said) = talk(setup.generator, prompt, name="source", num_turns=3)
    whole = [*first.prompt_ids.tolist(), *said.ids_L.tolist()]
    for number, length in enumerate((len(prompt) - 3, len(first.prompt_ids) - 1, len(whole) - 1)):
        asked = request(whole[:length], seeds=(5, 6), request_id="plain")
        (plain,) = draw(setup.generator, asked)
        for seed, expected in zip((5, 6), plain, strict=True):
            name = f"branch-{number}-{seed}"
            wanted = request(whole[:length], seeds=(seed,), request_id=name, conversations=(name,))
            wanted = dataclasses.replace(wanted, branch_of="source")
            ((one,),) = draw(setup.generator, wanted)
            same(one, expected, setup)
            assert one.logprobs_L == near(full_logprobs(setup.policy, wanted, one), setup)
            # All but the last token, or all of vLLM's whole blocks, was computed before.
            assert length - BLOCK <= one.num_cached < length
            setup.generator.end_conversations([name])
    setup.generator.end_conversations(["source"])


def test_a_completion_depends_on_its_own_seed_alone(setup):
    others = [
        request("something else", seeds=(7, 1), request_id="a", temperature=0.8),
        request("and a long one " * 6, seeds=range(5), request_id="b", max_new_tokens=40),
    ]
    asked = request(seeds=(11, 12, 13, 14), request_id="c")
    (alone,) = draw(setup.generator, asked)
    together = draw(setup.generator, others[0], asked, others[1])[1]
    for one, other in zip(alone, together, strict=True):
        same(one, other, setup)
    for index, seed in enumerate(asked.seeds_G):
        ((single,),) = draw(setup.generator, request(seeds=(seed,)))
        same(single, alone[index], setup)


def test_more_requests_than_there_is_room_for(setup):
    wanted = [
        request(f"prompt {i}", seeds=range(i, i + 1 + i % 4), max_new_tokens=3 + 7 * (i % 3))
        for i in range(9)
    ]
    for asked, found in zip(wanted, draw(setup.generator, *wanted), strict=True):
        assert [one.index for one in found] == list(range(len(asked.seeds_G)))
        ((first, *_),) = draw(setup.generator, asked)
        same(first, found[0], setup)


def test_length_ends_a_completion(setup):
    (found,) = draw(setup.generator, request(seeds=range(8), max_new_tokens=5))
    for one in found:
        assert (one.finish_reason == "length") == (one.ids_L[-1] != setup.end_id)
        assert len(one.ids_L) == 5 or one.finish_reason == "stop"


def test_an_end_token_ends_a_completion_and_is_kept(setup):
    (found,) = draw(setup.generator, request(seeds=range(48), max_new_tokens=40, temperature=2.0))
    ended = [one for one in found if setup.end_id in one.ids_L]
    assert len(ended) > 2
    for one in found:
        if one in ended:
            assert one.ids_L.tolist().index(setup.end_id) == len(one.ids_L) - 1
            assert setup.tokenizer.decode([setup.end_id]) not in one.text
        assert one.finish_reason == ("stop" if one in ended else "length")


def test_stop_tokens_end_a_completion_and_are_kept(setup):
    (whole,) = draw(setup.generator, request(seeds=(1, 2)))
    stop = int(whole[0].ids_L[7])
    (found,) = draw(setup.generator, request(seeds=(1, 2), stop_token_ids=(stop,)))
    for one, other in zip(found, whole, strict=True):
        ids_L = other.ids_L.tolist()
        count = ids_L.index(stop) + 1 if stop in ids_L else len(ids_L)
        assert one.ids_L.tolist() == ids_L[:count]
        assert one.logprobs_L == near(other.logprobs_L[:count], setup)
        assert one.finish_reason == ("stop" if stop in ids_L else other.finish_reason)


def test_stop_strings_end_a_completion_and_are_kept(setup):
    """Of tokens that are bytes, a string of several characters always spans several."""
    asked = request(seeds=range(6), max_new_tokens=40)
    (whole,) = draw(setup.generator, asked)
    stops = {
        one.index: text for one in whole for text in [_plain_pair(one.text)] if text is not None
    }
    assert stops, "a test of stop strings needs text"
    for index, stop in stops.items():
        strings = ("no such thing", stop)
        ((found,),) = draw(
            setup.generator,
            request(seeds=(asked.seeds_G[index],), max_new_tokens=40, stop_strings=strings),
        )
        assert found.finish_reason == "stop"
        assert found.text.endswith(stop)
        assert found.text.count(stop) == 1
        assert whole[index].text.startswith(found.text)
        count = len(found.ids_L)
        assert found.ids_L.tolist() == whole[index].ids_L[:count].tolist()
        assert stop not in setup.tokenizer.decode(found.ids_L[:-1], skip_special_tokens=True)


def _plain_pair(text):
    """Two characters in a row that tokens of bytes cannot have spoilt."""
    return next(
        (text[i : i + 2] for i in range(1, len(text) - 1) if text[i : i + 2].isascii()), None
    )


def test_closing_the_iterator_aborts_what_is_left_of_the_request(setup):
    async def first_of_many():
        stream = setup.generator.generate(request(seeds=range(12), max_new_tokens=30))
        first = await anext(stream)
        await stream.aclose()
        return first, await collect(setup.generator, request(seeds=(1,)))

    first, (after,) = run(first_of_many())
    ((again,),) = draw(setup.generator, request(seeds=(1,)))
    same(after, again, setup)
    assert first.finish_reason in ("stop", "length")


def test_an_endless_request_does_not_outlive_its_task(setup):
    async def cancelled():
        task = asyncio.create_task(collect(setup.generator, endless(temperature=0.5)))
        (other,) = await collect(setup.generator, request(seeds=(4,), max_new_tokens=3))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await setup.generator.update_weights(setup.weights(setup.generator.weight_version))
        return other

    ((again,),) = draw(setup.generator, request(seeds=(4,), max_new_tokens=3))
    same(run(cancelled()), again, setup)


def test_new_weights_are_drawn_from_and_closing_ends_what_is_open(make):
    with make() as setup:
        asked = request("Where?", seeds=range(5))
        (before,) = draw(setup.generator, asked)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in setup.policy.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * 0.02)
        run(setup.generator.update_weights(setup.weights(7)))
        assert setup.generator.weight_version == 7
        (after,) = draw(setup.generator, asked)
        assert {one.weight_version for one in before} == {0}
        assert {one.weight_version for one in after} == {7}
        for one in after:
            assert one.logprobs_L == near(full_logprobs(setup.policy, asked, one), setup)
        old = np.concatenate([full_logprobs(setup.policy, asked, one) for one in before])
        assert np.abs(old - np.concatenate([one.logprobs_L for one in before])).max() > 0.05

        async def closed_meanwhile():
            task = asyncio.create_task(collect(setup.generator, endless()))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(setup.generator.close)
            await task

        for use in (
            lambda: run(closed_meanwhile()),
            lambda: draw(setup.generator, request()),
            lambda: run(setup.generator.update_weights(setup.weights(8))),
        ):
            with pytest.raises(EngineError, match="closed"):
                use()
            setup.generator.close()  # again


def test_weights_that_have_not_changed_are_not_read_and_the_version_goes_on(setup):
    version = setup.generator.weight_version
    asked = request("Where?", seeds=range(3))
    (before,) = draw(setup.generator, asked)

    def untouchable():
        raise AssertionError("weights that have not changed are not read")

    try:
        unchanged = Weights(version=version + 1, tensors=untouchable, same_as=version)
        run(setup.generator.update_weights(unchanged))
        assert setup.generator.weight_version == version + 1
        (after,) = draw(setup.generator, asked)
        assert {one.weight_version for one in after} == {version + 1}
        for one, other in zip(before, after, strict=True):
            same(one, other, setup)
        # Of another version than the engine has: they are sent like any.
        other = dataclasses.replace(setup.weights(version + 3), same_as=version + 2)
        run(setup.generator.update_weights(other))
        assert setup.generator.weight_version == version + 3
    finally:
        run(setup.generator.update_weights(setup.weights(version)))


def test_an_update_waits_for_what_is_under_way(setup):
    version = setup.generator.weight_version

    async def during():
        task = asyncio.create_task(collect(setup.generator, request(max_new_tokens=30)))
        stream = setup.generator.generate(request(seeds=(9,), max_new_tokens=1))
        await anext(stream)  # so the other one has begun as well
        await setup.generator.update_weights(setup.weights(version + 1))
        return await task, await collect(setup.generator, request())

    try:
        old, new = run(during())
        assert {one.weight_version for one in old} == {version}
        assert {one.weight_version for one in new} == {version + 1}
    finally:
        run(setup.generator.update_weights(setup.weights(version)))


def test_asleep_requests_wait_until_it_wakes(setup):
    async def through_sleep():
        await setup.generator.sleep()
        task = asyncio.create_task(collect(setup.generator, request()))
        await asyncio.sleep(0.2)
        assert not task.done()
        await setup.generator.update_weights(setup.weights(setup.generator.weight_version))
        assert not task.done()
        await setup.generator.wake()
        return await task

    found = run(through_sleep())
    (awake,) = draw(setup.generator, request())
    for one, other in zip(found, awake, strict=True):
        same(one, other, setup)


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ({"prompt": []}, DataError, "no token"),
        ({"prompt": [5, 100_000]}, DataError, "100000"),
        ({"prompt": [5, -1]}, DataError, "-1"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"temperature": -0.1}, ConfigError, "temperature"),
        ({"top_p": 0.0}, ConfigError, "top_p"),
        ({"top_k": 0}, ConfigError, "top_k"),
        ({"stop_strings": ("",)}, ConfigError, "stop_strings"),
    ],
)
def test_bad_requests_are_refused_and_harm_nobody(setup, bad, error, says):
    with pytest.raises(error, match=says):
        draw(setup.generator, request(**bad))
    (found,) = draw(setup.generator, request(seeds=(1,), max_new_tokens=2))
    assert len(found) == 1
