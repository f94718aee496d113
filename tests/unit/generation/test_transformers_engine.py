"""What only the engine inside the process promises; the rest is in tests/contracts."""

import asyncio
import contextlib
import copy
import functools
import gc
import itertools
import threading
import time
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
import tiny_tokenizers
from generators import (
    ENDS,
    HEARD,
    collect,
    draw,
    full_logprobs,
    policy_and_tokenizer,
    request,
    run,
    talk,
)
from laurel.config.policy import LoraConfig
from laurel.data.forest import to_forest
from laurel.errors import EngineError, ModelError
from laurel.generation.transformers.batch import ContinuousBatch, Ticket
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.forest.decoder import adapted_layers
from laurel.models.forest.policy import rounded_weights
from laurel.models.loading.adapters import add_adapters
from laurel.types import TokenGroup, Weights


def engine_of(policy, **options):
    options = {"end_ids": [1], "max_concurrent": 8, **options}
    return contextlib.closing(TransformersEngine(policy, tiny_tokenizers.chatml(), **options))


def threads():
    return [t for t in threading.enumerate() if t.name == "laurel-generation"]


def watch_tokens(policy):
    """Tokens of every forward pass from now on."""
    seen = []
    policy.causal_lm.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return seen


def test_a_prompt_is_computed_once_for_all_its_completions():
    policy, _ = policy_and_tokenizer()
    seen = watch_tokens(policy)
    with engine_of(policy, end_ids=[]) as engine:
        draw(engine, request("p" * 50, seeds=range(6), max_new_tokens=4))
        assert seen == [50, 6, 6, 6]
        seen.clear()
        # More than there is room for: those that wait do not cost the prompt again.
        draw(engine, request("p" * 50, seeds=range(11), max_new_tokens=3))
        assert seen == [50, 8, 8, 3, 3]


PROMPT = [20 + i % 150 for i in range(60)]


def distinct(found):
    """Tokens of conversations, each counted once, without the last turns' last tokens."""
    return sum(
        len(wanted.prompt_ids) + len(said.ids_L) - 1 for wanted, said in (t[-1] for t in found)
    )


def test_each_token_of_a_conversation_is_computed_once():
    policy, _ = policy_and_tokenizer()
    seen = watch_tokens(policy)
    with engine_of(policy, end_ids=[], conversation_bytes=2**22) as engine:
        found = talk(engine, PROMPT, name="c", num_turns=8)
        assert sum(seen) == distinct([found])
        for (before, said), (wanted, one) in itertools.pairwise(found):
            assert one.num_cached == len(before.prompt_ids) + len(said.ids_L) - 1
            assert one.num_cached + 1 + len(HEARD) == len(wanted.prompt_ids)
        # Without a name every turn is computed from its start.
        seen.clear()
        talk(engine, PROMPT, name=None, num_turns=8)
        assert sum(seen) > 4 * distinct([found])


def test_conversations_that_begin_together_share_their_prompt():
    policy, _ = policy_and_tokenizer()
    seen = watch_tokens(policy)
    with engine_of(policy, end_ids=[], conversation_bytes=2**22) as engine:
        names = ["a", "b", "c"]
        first = request(
            PROMPT, seeds=(1, 2, 3), conversations=names, stop_token_ids=ENDS, max_new_tokens=100
        )
        (said,) = draw(engine, first)
        cache = engine._batch.conversations
        # Three layers, keys and values, two heads of 16 floats: 768 bytes a token.
        own = sum(len(one.ids_L) - 1 for one in said)
        assert cache.num_bytes == 768 * (len(PROMPT) + own)
        seen.clear()
        further = [
            request([*PROMPT, *one.ids_L, *HEARD], seeds=(9,), request_id=n, conversations=(n,))
            for n, one in zip(names, said, strict=True)
        ]
        for wanted, (one,) in zip(further, draw(engine, *further), strict=True):
            assert one.logprobs_L == pytest.approx(full_logprobs(policy, wanted, one), abs=1e-5)
        assert seen[0] == 3 * (1 + len(HEARD)), "the last token of a turn, and what was heard"


@pytest.mark.parametrize("length", [30, 62, 75])
def test_what_branches_off_a_conversation_computes_its_own_tokens_alone(length):
    """Within the prompt that several share, and within the turn that one of them said."""
    policy, _ = policy_and_tokenizer()
    seen = watch_tokens(policy)
    with engine_of(policy, end_ids=[], conversation_bytes=2**22) as engine:
        first = request(
            PROMPT, seeds=(1, 2), conversations="ab", stop_token_ids=ENDS, max_new_tokens=100
        )
        said = draw(engine, first)
        whole = [*PROMPT, *said[0][1].ids_L.tolist(), *range(40, 60)]
        kept = len(PROMPT) + len(said[0][1].ids_L) - 1
        seen.clear()
        names = ("c", "d")
        branches = [
            replace(
                request(whole[:length], seeds=(seed,), request_id=name, conversations=(name,)),
                branch_of="b",
            )
            for seed, name in enumerate(names)
        ]
        for wanted, (one,) in zip(branches, draw(engine, *branches), strict=True):
            assert one.num_cached == min(kept, length - 1)
            assert one.logprobs_L == pytest.approx(full_logprobs(policy, wanted, one), abs=1e-5)
        assert seen[0] == 2 * (length - min(kept, length - 1))
        # The conversation itself can still go on.
        going_on = request([*whole[: kept + 1], *HEARD], seeds=(9,), conversations=("b",))
        ((one,),) = draw(engine, going_on)
        assert one.num_cached == kept


@pytest.mark.parametrize("name", sorted(tiny.LANGUAGE_MODELS))
def test_later_turns_have_the_models_own_log_probabilities_for_every_architecture(name):
    policy = tiny.tiny_policy(name, std=0.1)
    with engine_of(policy, end_ids=[], conversation_bytes=2**24) as engine:
        prompt = [5 + i % 20 for i in range(40)]
        found = talk(engine, prompt, name="c", num_turns=3)
        assert [one.num_cached > 0 for _, one in found] == [False, True, True]
        for wanted, one in found:
            assert one.logprobs_L == pytest.approx(full_logprobs(policy, wanted, one), abs=1e-5)


def test_the_conversation_that_has_waited_longest_goes_first():
    policy, _ = policy_and_tokenizer()
    with engine_of(policy, end_ids=[], conversation_bytes=768 * 300) as engine:
        cache = engine._batch.conversations
        lengths = {}
        for seed, name in enumerate("abcdef"):
            ((wanted, said),) = talk(engine, PROMPT, name=name, num_turns=1, seed=seed)
            lengths[name] = len(wanted.prompt_ids) + len(said.ids_L) - 1
            assert cache.num_bytes <= cache.max_bytes
        left = list(cache._kept)
        assert left == list("abcdef")[-len(left) :]
        assert cache.num_bytes == 768 * sum(lengths[name] for name in left)
        assert 768 * (sum(lengths[n] for n in left) + lengths["abcdef"[-len(left) - 1]]) > (
            cache.max_bytes
        )
        talk(engine, PROMPT * 6, name="too long", num_turns=1)
        assert list(cache._kept) == left


def test_what_ended_is_freed_at_once():
    policy, _ = policy_and_tokenizer()
    with engine_of(policy, end_ids=[], conversation_bytes=2**22) as engine:
        cache = engine._batch.conversations
        talk(engine, PROMPT, name="c", num_turns=2)
        assert cache.num_bytes > 0
        engine.end_conversations(["c"])
        deadline = time.monotonic() + 60
        while cache.num_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        # A turn that was cut off is not gone on from.
        draw(engine, request(PROMPT, seeds=(1,), conversations=("d",), max_new_tokens=3))
        assert cache.num_bytes == 0


@pytest.mark.parametrize("room", [0, 768])
def test_a_cache_without_room_keeps_nothing(room):
    policy, _ = policy_and_tokenizer()
    with engine_of(policy, end_ids=[], conversation_bytes=room) as engine:
        found = talk(engine, PROMPT, name="c", num_turns=2)
        assert [one.num_cached for _, one in found] == [0, 0]
        assert engine._batch.conversations.num_bytes == 0


@pytest.mark.parametrize("change", ["update", "same weights", "in place", "sleep", "other prompt"])
def test_nothing_is_used_beyond_the_weights_a_rest_or_another_prompt(change):
    policy, _ = policy_and_tokenizer()
    with engine_of(policy, end_ids=[], conversation_bytes=2**22) as engine:
        ((wanted, said),) = talk(engine, PROMPT, name="c", num_turns=1)
        ids = [*wanted.prompt_ids.tolist(), *said.ids_L.tolist(), *HEARD]
        if change == "other prompt":
            ids[10] += 1
        elif change == "in place":  # by an optimizer, before the engine hears of it
            with torch.no_grad():
                policy.causal_lm.base_model.layers[0].mlp.down_proj.weight.mul_(-3)
        elif change == "sleep":
            run(engine.sleep())
            run(engine.wake())
        else:
            same_as = 0 if change == "same weights" else None
            run(engine.update_weights(Weights(version=1, tensors=dict, same_as=same_as)))
        further = request(ids, seeds=(4,), conversations=("c",))
        ((one,),) = draw(engine, further)
        assert one.num_cached == 0
        assert one.logprobs_L == pytest.approx(full_logprobs(policy, further, one), abs=1e-5)


def test_dropout_is_off_while_drawing_and_the_model_is_as_before_afterwards():
    tokenizer = tiny_tokenizers.chatml()
    policy = tiny.tiny_policy("qwen3", vocab_size=len(tokenizer), attention_dropout=0.5)
    policy.train()
    frozen = policy.causal_lm.base_model.layers[1].eval()
    modes = []
    policy.causal_lm.base_model.layers[0].register_forward_hook(
        lambda module, *_: modes.append((module.training, torch.is_grad_enabled()))
    )
    with engine_of(policy) as engine:
        wanted = request(seeds=(1, 2))
        (found,) = draw(engine, wanted)
        assert set(modes) == {(False, False)}
        assert policy.training
        assert policy.causal_lm.base_model.layers[0].self_attn.training
        assert not frozen.training
        for one in found:
            assert one.logprobs_L == pytest.approx(full_logprobs(policy, wanted, one), abs=1e-5)


class Rounded(TorchDispatchMode):
    """Counts the matrices that are rounded to a lower precision, by their number of entries."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to):
            self.seen[made.numel()] += made.dtype == torch.bfloat16 != args[0].dtype
        return made


def test_weights_are_rounded_once_for_all_tokens_and_completions_stay_those_of_autocast():
    policy, _ = policy_and_tokenizer(precision=torch.bfloat16)
    linear = [m for m in policy.causal_lm.base_model.modules() if isinstance(m, torch.nn.Linear)]
    weights = [layer.weight for layer in linear]
    asked = request("p" * 20, seeds=range(3), max_new_tokens=5)
    batch = ContinuousBatch(policy, tiny_tokenizers.chatml(), end_ids=[], max_concurrent=8)
    found = []
    with Rounded() as rounded, batch.drawing():
        finished = batch.admit(deque([Ticket(asked, found.append)]))
        while not batch.is_idle:
            # A checkpoint that is saved meanwhile holds the weights that are trained.
            assert all(layer.weight is own for layer, own in zip(linear, weights, strict=True))
            assert all(value.dtype == torch.float32 for value in policy.state_dict().values())
            finished += batch.step()
    sizes = Counter(weight.numel() for weight in weights)
    assert {size: rounded.seen[size] for size in sizes} == sizes
    assert all(type(layer) is torch.nn.Linear for layer in linear)
    assert not any("rounded" in vars(layer) for layer in linear)
    assert len(finished) == 3
    trunk, *branches = (np.arange(start, start + 5, dtype=np.int32) for start in (2, 30, 60))
    forest = to_forest([TokenGroup(id="a", trunk_ids=trunk, branches_ids_G=tuple(branches))])
    plain = policy.logprobs(forest)
    with rounded_weights(policy):
        assert torch.equal(policy.logprobs(forest), plain)


def test_after_an_abort_the_model_is_free_at_once():
    policy, _ = policy_and_tokenizer()
    policy.train()

    async def aborted(engine):
        stream = engine.generate(request(seeds=range(3), max_new_tokens=2000))
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await stream.aclose()
        assert all(module.training for module in policy.modules())

    with engine_of(policy, end_ids=[]) as engine:
        run(aborted(engine))


@pytest.mark.slow
def test_weights_that_change_under_a_request_are_an_error():
    policy, _ = policy_and_tokenizer()

    async def changed(engine):
        task = asyncio.create_task(
            collect(engine, request(seeds=(1, 2), max_new_tokens=600, temperature=0.9))
        )
        await asyncio.sleep(0.1)
        with torch.no_grad():
            next(policy.parameters()).add_(0.0)
        await task

    with (
        engine_of(policy, end_ids=[]) as engine,
        pytest.raises(EngineError, match="changed while completions were being sampled"),
    ):
        run(changed(engine))


def test_a_model_for_padded_rows_is_refused():
    policy = tiny.tiny_policy("qwen3", path="padded")
    with pytest.raises(ModelError, match="token forests"):
        TransformersEngine(policy, tiny_tokenizers.chatml(), end_ids=[])


def test_a_copy_does_not_follow_the_learner_until_it_is_told():
    policy, _ = policy_and_tokenizer()
    asked = request(seeds=range(3))
    with engine_of(policy, shares_weights=False) as engine:
        (before,) = draw(engine, asked)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.05)
        (still,) = draw(engine, asked)
        assert [one.logprobs_L.tobytes() for one in still] == [
            one.logprobs_L.tobytes() for one in before
        ]
        run(engine.update_weights(Weights(version=3, tensors=policy.named_weights)))
        (after,) = draw(engine, asked)
        for one in after:
            assert one.weight_version == 3
            assert one.logprobs_L == pytest.approx(full_logprobs(policy, asked, one), abs=1e-5)


def test_a_copy_has_the_adapters_merged():
    pytest.importorskip("peft")
    policy, _ = policy_and_tokenizer()
    config = LoraConfig(enabled=True, dim=4)
    policy.causal_lm = add_adapters(policy.causal_lm, config, trains_head=False)
    asked = request(seeds=range(3))
    with engine_of(policy, shares_weights=False) as engine:
        assert not adapted_layers(engine._batch.model.causal_lm)
        for version in (1, 2):
            tiny.draw_adapters(policy, 0.1)
            run(engine.update_weights(Weights(version=version, tensors=policy.named_weights)))
            (found,) = draw(engine, asked)
            for one in found:
                assert one.logprobs_L == pytest.approx(full_logprobs(policy, asked, one), abs=1e-5)


@pytest.mark.parametrize("owns_model", [False, True])
def test_a_copy_takes_what_changes_when_it_has_had_all(owns_model):
    pytest.importorskip("peft")
    policy, _ = policy_and_tokenizer()
    own = copy.deepcopy(policy) if owns_model else policy
    config = LoraConfig(enabled=True, dim=4, target_modules=["up_proj"])
    policy.causal_lm = add_adapters(policy.causal_lm, config, trains_head=False)
    taken = []

    def tensors(**options):
        for name, tensor in policy.named_weights(**options):
            taken[-1].append(name)
            yield name, tensor

    asked = request(seeds=range(3))
    with engine_of(own, shares_weights=False, owns_model=owns_model) as engine:
        for version in (1, 2, 3):
            taken.append([])
            tiny.draw_adapters(policy, 0.1)
            changing = functools.partial(tensors, changing_only=True)
            new = Weights(version=version, tensors=tensors, changing=changing)
            run(engine.update_weights(new))
            (found,) = draw(engine, asked)
            for one in found:
                assert one.logprobs_L == pytest.approx(full_logprobs(policy, asked, one), abs=1e-5)
    num_all = len(dict(policy.named_weights()))
    num_changing = 3 * policy.causal_lm.config.num_hidden_layers  # of each layer's `mlp`
    # A copy of the learner's own model has had all of it from the beginning.
    first = num_all if owns_model else num_changing
    assert [len(names) for names in taken] == [first, num_changing, num_changing]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda weights: weights[1:], "lacks 1 of the model's"),
        (lambda weights: [*weights, ("more", torch.zeros(2))], "'more' twice, or"),
        (lambda weights: [*weights, weights[0]], "twice"),
        (lambda weights: [(weights[0][0], torch.zeros(2)), *weights[1:]], r"shape \(2,\)"),
    ],
)
def test_other_weights_are_refused_and_end_the_engine(spoil, says):
    policy, _ = policy_and_tokenizer()
    weights = spoil(list(policy.named_weights()))
    with engine_of(policy, shares_weights=False) as engine:
        with pytest.raises(EngineError, match=says):
            run(engine.update_weights(Weights(version=1, tensors=lambda: weights)))
        with pytest.raises(EngineError, match=says):
            draw(engine, request())


class Broken(Exception):
    """What a layer raises in the middle of a request."""


def break_after(policy, passes):
    left = [passes]

    def hook(*_):
        left[0] -= 1
        if left[0] < 0:
            raise Broken("no more")

    policy.causal_lm.base_model.layers[2].register_forward_hook(hook)


def test_an_exception_in_the_thread_reaches_everybody_quickly():
    policy, _ = policy_and_tokenizer()
    break_after(policy, 5)

    async def die(engine):
        started = time.monotonic()
        tasks = [asyncio.create_task(collect(engine, request(seeds=range(6)))) for _ in range(3)]
        update = asyncio.create_task(
            engine.update_weights(Weights(version=1, tensors=policy.named_weights))
        )
        results = await asyncio.gather(*tasks, update, return_exceptions=True)
        return results, time.monotonic() - started

    with engine_of(policy, end_ids=[]) as engine:
        results, seconds = run(die(engine))
        assert seconds < 50
        # The update may have been done before anything began.
        assert all(isinstance(result, EngineError) for result in results[:3])
        for error in results[:3]:
            assert "Broken: no more" in str(error)
            assert isinstance(error.__cause__, Broken)
        for use in (
            lambda: draw(engine, request()),
            lambda: run(engine.update_weights(Weights(version=1, tensors=policy.named_weights))),
            lambda: run(engine.sleep()),
            lambda: run(engine.wake()),
        ):
            with pytest.raises(EngineError, match="Broken: no more"):
                use()
        engine._worker._thread.join(10)
        assert not threads()


def test_weights_that_are_not_numbers_are_an_error():
    policy, _ = policy_and_tokenizer()
    with torch.no_grad():
        policy.causal_lm.base_model.norm.weight.fill_(torch.nan)
    with engine_of(policy) as engine, pytest.raises(EngineError, match="not finite"):
        draw(engine, request())


def test_no_thread_and_no_keys_are_left_behind():
    policy, tokenizer = policy_and_tokenizer()
    engine = TransformersEngine(policy, tokenizer, end_ids=[])
    assert not threads(), "nothing runs before the first request"
    draw(engine, request(max_new_tokens=2))
    (thread,) = threads()
    assert engine._batch.num_bytes == 0
    del engine  # or closed, see the others
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_loop_that_ends_does_not_hold_the_engine_up():
    policy, _ = policy_and_tokenizer()
    with engine_of(policy, end_ids=[]) as engine:

        async def left_open():
            stream = engine.generate(request(seeds=(1, 2), max_new_tokens=1))
            await anext(stream)
            endless = engine.generate(request(seeds=(1,), max_new_tokens=5000))
            waiting = asyncio.create_task(anext(endless))
            await asyncio.sleep(0.05)
            assert not waiting.done()

        run(left_open())
        (found,) = draw(engine, request(seeds=(3,), max_new_tokens=2))
        assert len(found[0].ids_L) == 2


def test_the_tokenizer_is_the_engines_own():
    policy, tokenizer = policy_and_tokenizer()
    with contextlib.closing(TransformersEngine(policy, tokenizer, end_ids=[])) as engine:
        (found,) = draw(engine, request(seeds=(1,), max_new_tokens=30))
        assert engine._batch._tokenizer is not tokenizer
        assert found[0].text == tokenizer.decode(np.array(found[0].ids_L), skip_special_tokens=True)


def test_places_are_shared_and_filled_again_at_once():
    policy, _ = policy_and_tokenizer()
    seen = watch_tokens(policy)
    with engine_of(policy, end_ids=[], max_concurrent=4) as engine:
        draw(
            engine,
            request("ab", seeds=range(3), max_new_tokens=2),
            request("abc", seeds=(1,), max_new_tokens=4),
            request("abcd", seeds=(1, 2), max_new_tokens=2),
        )
    assert seen == [5, 4, 4, 3, 1]


@pytest.mark.parametrize("name", sorted(tiny.LANGUAGE_MODELS))
def test_log_probabilities_are_the_models_own_for_every_architecture(name):
    policy = tiny.tiny_policy(name, std=0.1)
    with engine_of(policy, end_ids=[]) as engine:
        asked = [
            request([5, 6, 7] * 9, seeds=range(3), max_new_tokens=70),
            request([9, 8], seeds=range(2), max_new_tokens=30),
        ]
        for wanted, found in zip(asked, draw(engine, *asked), strict=True):
            for one in found:
                expected = full_logprobs(policy, wanted, one)
                assert one.logprobs_L == pytest.approx(expected, abs=1e-5)
