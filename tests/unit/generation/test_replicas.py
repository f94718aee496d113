"""What several engines behind one generator promise besides tests/contracts/test_generator.py."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from generators import collect, draw, policy_and_tokenizer, request, run
from laurel.errors import DataError, EngineError, WorkerError
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.replicas import GeneratorReplica, GeneratorReplicas, Order
from laurel.generation.transformers.engine import TransformersEngine
from laurel.generation.weights.probe import ProbeAnswer, model_logprobs
from laurel.generation.weights.routes import WeightTransfer
from laurel.types import Weights
from laurel.workers.calls import with_shared, without_shared
from local_group import LocalGroup
from scripted_engines import Company, MortalGroup, ScriptedEngine, completion


def replicas_of(company, count=2, **options):
    options = {"say": company.said.append, **options}
    return contextlib.closing(GeneratorReplicas(company.make_group, count, **options))


def held_back(engine, number):
    """Let nothing out, of any engine that is made."""
    engine.allowed = 0


def weights(version, **tensors):
    tensors = tensors or {"a": torch.arange(4.0) + version, "b": torch.ones(2) * version}
    return Weights(version=version, tensors=lambda: iter(tensors.items()))


async def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)


def seeds_of(found):
    return [one.ids_L.tolist()[0] for one in found]


def test_a_request_goes_whole_to_the_replica_with_the_least_work():
    company = Company(held_back)

    async def ask(generator):
        counts = {"a": 4, "b": 1, "c": 2, "d": 1, "e": 2, "f": 1}
        tasks = [
            asyncio.create_task(collect(generator, request(seeds=range(n), request_id=name)))
            for name, n in counts.items()
        ]
        await until(lambda: sum(len(engine.asked) for engine in company.engines) == len(counts))
        for engine in company.engines:
            engine.allowed = 100
        return await asyncio.gather(*tasks)

    with replicas_of(company) as generator:
        found = run(ask(generator))
    # Under way after each: 4-0, 4-1, 4-3, 4-4, 6-4, 6-5.
    assert [name for name, _ in company.asked(0)] == ["a", "e"]
    assert [name for name, _ in company.asked(1)] == ["b", "c", "d", "f"]
    assert [seeds_of(one) for one in found] == [[0, 1, 2, 3], [0], [0, 1], [0], [0, 1], [0]]


def test_a_conversation_stays_with_its_replica_and_its_end_is_passed_on():
    company = Company(held_back)

    def turn(name, number):
        return request(seeds=(number,), request_id=f"{name}{number}", conversations=(name,))

    async def ask(generator):
        first = [asyncio.create_task(collect(generator, turn(name, 0))) for name in "xy"]
        await until(lambda: all(engine.asked for engine in company.engines))
        for engine in company.engines:
            engine.allowed = 100
        await asyncio.gather(*first)
        for number in (1, 2):
            for name in "yx":
                await collect(generator, turn(name, number))
        generator.end_conversations(["y", "unknown"])
        # What has ended belongs to nobody: it begins where there is least work.
        await collect(generator, turn("y", 3))
        await collect(generator, turn("x", 3))
        generator.end_conversations(["x", "y"])
        for name in ("next", "last"):
            await collect(generator, request(seeds=(1,), request_id=name))

    with replicas_of(company) as generator:
        run(ask(generator))
        assert not generator._holders
    assert [name for name, _ in company.asked(0)] == ["x0", "x1", "x2", "y3", "x3", "next", "last"]
    assert [name for name, _ in company.asked(1)] == ["y0", "y1", "y2"]
    assert company.engines[0].ended == ["x", "y"], "once, with the next call"


def test_missing_completions_keep_the_names_of_their_conversations():
    order = Order(request(seeds=(1, 2, 3), conversations="abc"), lambda item: None)
    order.rest()
    order.take(completion(1, 2))
    rest = order.rest()
    assert (rest.seeds_G, rest.conversations_G) == ((1, 3), ("a", "c"))


def test_work_that_has_come_counts_no_more():
    company = Company(held_back)

    async def ask(generator):
        first = asyncio.create_task(collect(generator, request(seeds=range(3), request_id="a")))
        second = asyncio.create_task(collect(generator, request(seeds=range(2), request_id="b")))
        await until(lambda: all(engine.asked for engine in company.engines))
        company.engines[0].allowed = 3
        await first
        third = asyncio.create_task(collect(generator, request(seeds=(9,), request_id="c")))
        await until(lambda: len(company.engines[0].asked) == 2)
        for engine in company.engines:
            engine.allowed = 100
        await asyncio.gather(second, third)

    with replicas_of(company) as generator:
        run(ask(generator))
    assert [name for name, _ in company.asked(0)] == ["a", "c"]


def test_requests_of_one_turn_go_out_together_and_in_order():
    company = Company()
    with replicas_of(company, 1) as generator:
        draw(generator, *(request(seeds=(1,), request_id=str(i)) for i in range(20)))
    exchanges = [call for call in company.groups[0].calls if call.method == "exchange"]
    assert [r.id for _, r in exchanges[0].args[0]] == [str(i) for i in range(20)]


def test_one_replica_gives_the_bits_of_the_engine_itself():
    policy, tokenizer = policy_and_tokenizer()

    def make():
        return TransformersEngine(
            policy, tokenizer, end_ids=[1], max_concurrent=8, shares_weights=False
        )

    asked = [request(f"number {i}", seeds=range(i, i + 4)) for i in range(5)]
    with contextlib.closing(make()) as engine:
        alone = draw(engine, *asked)
    group_of = functools.partial(LocalGroup, "generation", EngineWorker, make)
    with contextlib.closing(GeneratorReplicas(lambda index: group_of(), 1)) as generator:
        behind = draw(generator, *asked)
    for found, others in zip(alone, behind, strict=True):
        for one, other in zip(found, others, strict=True):
            assert one.ids_L.tolist() == other.ids_L.tolist()
            assert one.logprobs_L.tobytes() == other.logprobs_L.tobytes()


def processor_share(seconds):
    before, started = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - before) / (time.monotonic() - started)


def test_idle_replicas_are_asked_nothing():
    company = Company()
    with replicas_of(company) as generator:
        draw(generator, request(seeds=(1, 2)), request(seeds=(3,)))

        def are_at_rest():
            calls = [len(group.calls) for group in company.groups]
            share = processor_share(0.5)
            return share < 0.1 and [len(group.calls) for group in company.groups] == calls

        # Who waits in a loop is never at rest; what else runs in this process now and then is.
        assert any(are_at_rest() for _ in range(10))


def lose(generator, company, *, after, then=lambda: None):
    """Draw ten seeds, of which replica 0 dies when it has given so many."""

    async def lost():
        asked = request(seeds=range(10, 20), request_id="r")
        company.engines[0].allowed = after
        found = []
        async with contextlib.aclosing(generator.generate(asked)) as completions:
            async for one in completions:
                found.append(one)
                if len(found) == after:
                    company.groups[0].is_dead = True
                    then()
        return found

    return run(lost())


def test_what_a_lost_replica_owes_is_drawn_by_another_and_nothing_twice():
    company = Company()
    with replicas_of(company) as generator:
        found = lose(generator, company, after=3)
        assert [one.index for one in found] == list(range(10))
        assert seeds_of(found) == list(range(10, 20))
        assert company.asked(1) == [("r", tuple(range(13, 20)))]
        run(until(lambda: company.made == [0, 1, 0]))
        run(until(lambda: len(company.said) == 2))
        # The new one takes part.
        draw(generator, *(request(seeds=(i,)) for i in range(4)))
        assert len(company.asked(2)) == 2
    assert company.said == [
        "generation replica 0 was lost (generation rank 0 of 1 died in exchange); "
        "it is started again, restart 1 of 3 at most",
        "generation replica 0 is back and has the weights of step 0",
    ]
    assert all(engine.is_closed for engine in company.engines)


def test_a_completion_that_was_lost_on_its_way_comes_once():
    company = Company()

    def dies(engine, number):
        engine.allowed = 2 if number == 0 else 100

    company = Company(dies)
    with replicas_of(company, 1) as generator:
        company.groups[0].dies_in = "exchange"
        (found,) = draw(generator, request(seeds=(5, 6, 7)))
    assert seeds_of(found) == [5, 6, 7]
    assert len(company.asked(0)) == 1
    assert company.asked(1) == [("r", (5, 6, 7))]


def test_a_request_may_be_lost_twice():
    company = Company(lambda engine, number: setattr(engine, "allowed", [2, 3, 100][number]))

    async def twice(generator):
        found = []
        async with contextlib.aclosing(generator.generate(request(seeds=range(9)))) as completions:
            async for one in completions:
                found.append(one)
                if len(found) in (2, 5):
                    company.groups[-1].is_dead = True
        return found

    with replicas_of(company, 1) as generator:
        found = run(twice(generator))
    assert [one.index for one in found] == seeds_of(found) == list(range(9))
    assert [company.asked(number)[0][1] for number in range(3)] == [
        tuple(range(9)),
        tuple(range(2, 9)),
        tuple(range(5, 9)),
    ]


def test_there_is_a_limit_to_restarts():
    company = Company()

    async def die_again(generator):
        async with contextlib.aclosing(generator.generate(request(seeds=range(50)))) as found:
            async for _ in found:
                company.engines[-1].allowed = 0
                company.groups[-1].is_dead = True

    company = Company(lambda engine, number: setattr(engine, "allowed", 1))
    with replicas_of(company, 1, max_restarts=2) as generator:
        with pytest.raises(
            EngineError, match=r"generation replica 0 was lost .*; no restart: 2 re"
        ):
            run(die_again(generator))
        assert company.made == [0, 0, 0]
        with pytest.raises(EngineError, match="2 restarts are the limit"):
            draw(generator, request())
        with pytest.raises(EngineError, match="2 restarts are the limit"):
            run(generator.update_weights(weights(1)))


def test_a_replica_that_cannot_be_made_again_ends_the_run():
    company = Company()
    tried = []

    def make_group(index):
        tried.append(index)
        if len(tried) > 1:
            raise WorkerError("generation rank 0 of 1 failed while it was made: no memory")
        return company.make_group(index)

    with (
        contextlib.closing(GeneratorReplicas(make_group, 1, say=company.said.append)) as generator,
        pytest.raises(EngineError, match=r"no memory\); no restart: it failed in the same way"),
    ):
        lose(generator, company, after=1)
    assert tried == [0, 0, 0]


def test_an_engine_that_dies_in_a_living_process_is_started_again():
    company = Company()

    def fail():
        company.engines[0].failure = EngineError("vLLM died")

    async def failing(generator):
        async with contextlib.aclosing(generator.generate(request(seeds=range(6)))) as completions:
            found = []
            company.engines[0].allowed = 2
            async for one in completions:
                found.append(one)
                if len(found) == 2:
                    fail()
            return found

    with replicas_of(company, 1) as generator:
        found = run(failing(generator))
        assert [one.index for one in found] == seeds_of(found) == list(range(6))
        assert "was lost (vLLM died)" in company.said[0]
        assert company.engines[0].is_closed


def test_an_engine_that_dies_of_what_it_is_asked_is_not_started_for_ever():
    company = Company(lambda e, number: setattr(e, "failure", EngineError("logits not finite")))
    with (
        replicas_of(company, 1, max_restarts=9) as generator,
        pytest.raises(EngineError, match=r"logits not finite.*in the same way"),
    ):
        draw(generator, request())
    assert company.made == [0, 0]


def test_what_an_engine_refuses_concerns_its_request_alone():
    company = Company(held_back)

    async def refused(generator):
        good = asyncio.create_task(collect(generator, request(seeds=(1, 2), request_id="good")))
        await until(lambda: company.engines[0].asked)
        company.engines[0].failure = DataError("request 'bad': too long")
        bad = asyncio.create_task(collect(generator, request(request_id="bad")))
        with pytest.raises(DataError, match="too long"):
            await bad
        with pytest.raises(DataError, match="too long"):
            await good
        company.engines[0].failure = None
        company.engines[0].allowed = 100
        return await collect(generator, request(seeds=(3,)))

    with replicas_of(company, 1) as generator:
        assert seeds_of(run(refused(generator))) == [3]
    assert company.made == [0]
    assert company.said == []


def test_a_replica_that_comes_back_draws_with_the_weights_of_the_others():
    company = Company()
    asked = []

    def current():
        asked.append(threading.current_thread())
        return weights(5)

    with replicas_of(company, 1, current_weights=current) as generator:
        lose(generator, company, after=2)
        assert asked == [], "it began with the first weights, as the one before"
        run(generator.update_weights(weights(5)))
        company.engines[1].allowed = company.engines[1].given
        company.groups[1].is_dead = True
        (found,) = draw(generator, request(seeds=(1, 2)))
        assert {one.weight_version for one in found} == {5}
        assert generator.weight_version == 5
        assert company.engines[2].weights["a"].tolist() == [5.0, 6.0, 7.0, 8.0]
    assert len(asked) == 1
    assert threading.main_thread() not in asked
    assert company.said[-1] == "generation replica 0 is back and has the weights of step 5"


@pytest.mark.parametrize("found", [None, 6], ids=["none", "of-another-step"])
def test_without_the_weights_and_the_others_the_run_ends(found):
    company = Company()
    current = (lambda: None) if found is None else (lambda: weights(found))
    with replicas_of(company, 1, current_weights=current) as generator:
        run(generator.update_weights(weights(5)))
        company.groups[0].is_dead = True
        with pytest.raises(
            EngineError,
            match=r"generation replica 0 was lost .*, no other replica is left, and the weights of "
            "step 5 cannot be had",
        ) as caught:
            draw(generator, request())
    assert caught.value.exit_code == WorkerError.LOST_EXIT_CODE, "a supervisor may try again"


def test_the_learner_is_asked_for_weights_only_when_nobody_draws():
    """While one can, rollouts may end and the learner begin to work."""
    company = Company()
    asked = []

    def current():
        asked.append([group.is_dead for group in company.groups])
        return weights(5)

    with replicas_of(company, current_weights=current) as generator:
        run(generator.update_weights(weights(5)))
        company.groups[0].is_dead = True
        draw(generator, *(request(seeds=(i,)) for i in range(4)))
        run(until(lambda: len(company.said) == 2))
        assert company.said[-1] == "generation replica 0 is back and waits for weights"
        assert asked == []
        company.groups[1].is_dead = True
        found = draw(generator, *(request(seeds=(i,)) for i in range(4)))
        assert [seeds_of(one) for one in found] == [[0], [1], [2], [3]]
        run(until(lambda: len(company.said) == 4))
        assert len(asked) == 1
        assert company.engines[3].weights["a"].tolist() == [5.0, 6.0, 7.0, 8.0]


def test_two_that_are_lost_together_do_not_read_the_learner_together():
    company = Company()
    asked = []

    def current():
        asked.append(1)
        run(until(lambda: sum("was lost" in line for line in company.said) == 2))
        return weights(5)

    with replicas_of(company, current_weights=current) as generator:
        run(generator.update_weights(weights(5)))
        company.groups[0].is_dead = company.groups[1].is_dead = True
        found = draw(generator, *(request(seeds=(i,)) for i in range(4)))
        assert [seeds_of(one) for one in found] == [[0], [1], [2], [3]]
        run(until(lambda: len(company.said) == 4))
    assert len(asked) == 1
    assert sum("waits for weights" in line for line in company.said) == 1


@pytest.mark.parametrize("method", ["begin_weights", "take_weights", "end_weights", "answer_probe"])
def test_a_loss_during_an_update_costs_the_others_nothing(method):
    company = Company()
    asked = []
    options = {"probe": lambda ids: np.zeros(1), "current_weights": lambda: asked.append(1)}
    with replicas_of(company, **options) as generator:
        run(generator.update_weights(weights(2)))
        company.groups[1].dies_in = method
        run(generator.update_weights(weights(3)))
        assert asked == [], "the new weights are on their way"
        assert generator.weight_version == 3
        assert company.made == [0, 1, 1]
        for number in (0, 2):
            assert company.engines[number].weight_version == 3
            assert company.engines[number].weights["b"].tolist() == [3.0, 3.0]
        draw(generator, request(), request())
        assert [len(company.asked(number)) for number in (0, 2)] == [1, 1]


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_a_loss_while_it_rests(method):
    company = Company()
    with replicas_of(company) as generator:
        company.groups[1].dies_in = method
        for rests, use in ((True, generator.sleep), (False, generator.wake)):
            run(use())
            living = [engine for engine in company.engines if not engine.is_closed]
            assert [engine.is_asleep for engine in living] == [rests, rests]
        draw(generator, request(), request())
    assert company.made == [0, 1, 1]


class Box:
    def __init__(self, value):
        self.value = value


class CarryingGroup(MortalGroup):
    """What is shared is carried to it, as a group of processes would."""

    carried: list = []  # noqa: RUF012 - of all groups together
    most_alive = 0

    def _submit(self, calls):
        call, shared = without_shared(calls[0])
        values = [each.carried(self.carry).value for each in shared]
        return super()._submit({0: with_shared(call, values)})

    @classmethod
    def carry(cls, value):
        box = Box(value)
        cls.carried.append(weakref.ref(box))
        cls.most_alive = max(cls.most_alive, sum(ref() is not None for ref in cls.carried))
        return box


def test_a_bucket_travels_once_for_all_and_is_let_go():
    CarryingGroup.carried, CarryingGroup.most_alive = [], 0
    engines = [ScriptedEngine() for _ in range(3)]
    sent = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}  # 40 bytes each

    def make_group(index):
        return CarryingGroup(engines[index])

    before = set(threading.enumerate())
    with contextlib.closing(
        GeneratorReplicas(
            make_group, 3, transfer=WeightTransfer(name="object_store", bucket_bytes=80)
        )
    ) as generator:
        run(generator.update_weights(weights(1, **sent)))
    for engine in engines:
        assert engine.weights.keys() == sent.keys()
        assert all(torch.equal(engine.weights[name], sent[name]) for name in sent)
    assert len(CarryingGroup.carried) == 4, "buckets, not buckets times replicas"
    assert CarryingGroup.most_alive <= 2
    assert all(engine.is_closed for engine in engines)
    run(until(lambda: set(threading.enumerate()) <= before))


def test_the_next_bucket_is_made_while_the_engines_take_one():
    is_made = threading.Event()

    class Waiting:
        def __init__(self, future):
            self.future = future

        def wait(self, *, timeout=None):
            return self.future.result(20).wait()

    class Threaded(LocalGroup):
        """Takes the first bucket only when the second is being made."""

        def __init__(self):
            super().__init__("generation", EngineWorker, ScriptedEngine)
            self.pool = ThreadPoolExecutor(1)

        def _submit(self, calls):
            def work():
                if calls[0].method == "take_weights":
                    assert is_made.wait(60)
                return super(Threaded, self)._submit(calls)

            return Waiting(self.pool.submit(work))

        def shutdown(self):
            super().shutdown()
            self.pool.shutdown()

    def tensors():
        for number in range(4):
            if number == 2:  # the second tells that the first bucket is full
                is_made.set()
            yield str(number), torch.ones(2)

    with contextlib.closing(
        GeneratorReplicas(
            lambda index: Threaded(),
            2,
            transfer=WeightTransfer(name="object_store", bucket_bytes=8),
        )
    ) as generator:
        run(generator.update_weights(Weights(version=1, tensors=tensors)))
        assert generator.weight_version == 1


def test_who_has_had_all_weights_is_sent_those_that_change():
    engines, sent = [], []

    class Holding(ScriptedEngine):
        has_all = False

        async def update_weights(self, weights):
            tensors = (weights.changing if self.has_all else None) or weights.tensors
            self.has_all = True
            found = await asyncio.to_thread(lambda: dict(tensors()))
            sent[-1].add(tuple(found))
            self.weights |= {name: tensor.clone() for name, tensor in found.items()}
            self.weight_version = weights.version

    def make_group(index):
        engines.append(Holding())
        return MortalGroup(engines[-1])

    def new(version):
        sent.append(set())
        every = {"frozen": torch.ones(2), "adapted": torch.full((2,), float(version))}
        changing = {"adapted": every["adapted"]}
        return Weights(version=version, tensors=every.items, changing=changing.items)

    with contextlib.closing(GeneratorReplicas(make_group, 2)) as generator:
        run(generator.update_weights(new(1)))
        run(generator.update_weights(new(2)))
        assert sent == [{("frozen", "adapted")}, {("adapted",)}]
        # One is lost while weights travel. What takes its place has none.
        generator._replicas[0].value.is_dead = True
        run(generator.update_weights(new(3)))
        assert sent[2] == {("adapted",), ("frozen", "adapted")}
        run(generator.update_weights(new(4)))
        assert sent[3] == {("adapted",)}
        for engine in engines[1:]:
            assert {n: t.tolist() for n, t in engine.weights.items()} == {
                "frozen": [1.0, 1.0],
                "adapted": [4.0, 4.0],
            }
        run(generator.update_weights(weights(5)))
        assert engines[-1].weights["b"].tolist() == [5.0, 5.0], "all of them where any can change"


def test_refused_weights_end_the_generator():
    company = Company()
    with replicas_of(company) as generator:
        company.engines[1].refusal = EngineError("step 1 lacks 'b'")
        with pytest.raises(EngineError, match="generation replica 1: step 1 lacks 'b'"):
            run(generator.update_weights(weights(1)))
        assert generator.weight_version == 0
        with pytest.raises(EngineError, match="lacks 'b'"):
            draw(generator, request())
    assert company.made == [0, 1]


def test_weights_that_cannot_be_read_end_the_generator():
    company = Company()

    def tensors():
        yield "a", torch.ones(2)
        raise OSError("no such rank")

    with replicas_of(
        company, transfer=WeightTransfer(name="object_store", bucket_bytes=1)
    ) as generator:
        with pytest.raises(OSError, match="no such rank"):
            run(generator.update_weights(Weights(version=1, tensors=tensors)))
        with pytest.raises(EngineError, match="weights of step 1: no such rank"):
            draw(generator, request())
    assert all(engine.is_closed for engine in company.engines)


def test_an_engine_that_keeps_its_old_weights_is_found_out():
    class Deaf(ScriptedEngine):
        async def update_weights(self, weights):
            pass

    company = Company()

    def make_group(index):
        return MortalGroup(Deaf()) if index else company.make_group(index)

    with (
        contextlib.closing(GeneratorReplicas(make_group, 2)) as generator,
        pytest.raises(
            EngineError, match="replica 1 has the weights of step 0, not those of step 4"
        ),
    ):
        run(generator.update_weights(weights(4)))


class Proving(ScriptedEngine):
    """The probe's answer is the sum of its weights."""

    async def answer_probe(self):
        total = sum(float(tensor.sum()) for tensor in self.weights.values())
        return ProbeAnswer([1, 2], np.float32([total]), 1e-3)


def test_what_the_engines_compute_is_compared_with_the_learner():
    learner = {"a": torch.ones(3)}
    engines = []

    def make_group(index):
        engines.append(Proving())
        return MortalGroup(engines[-1])

    def probe(ids):
        assert ids == [1, 2]
        return np.float32([float(learner["a"].sum())])

    with pytest.raises(
        EngineError, match=r"generation replica 0: .*step 0: token 1 .* 0 there and 3"
    ):
        GeneratorReplicas(make_group, 1, probe=probe)
    learner["a"] = torch.zeros(3)
    with contextlib.closing(GeneratorReplicas(make_group, 2, probe=probe)) as generator:
        learner["a"] = torch.ones(3)
        run(generator.update_weights(weights(1, **learner)))
        with pytest.raises(
            EngineError, match=r"generation replica 0: .*step 2: token 1 .* 9 there"
        ):
            run(generator.update_weights(weights(2, a=torch.full((3,), 3.0))))


def test_the_transformers_engine_answers_the_probe_with_its_own_weights():
    policy, tokenizer = policy_and_tokenizer()
    policy.temperature = 0.5
    options = {"end_ids": [1], "shares_weights": False}
    with contextlib.closing(TransformersEngine(policy, tokenizer, **options)) as engine:
        answer = run(engine.answer_probe())
        assert len(answer.ids_L) == len(answer.logprobs_L) + 1 == 64
        probe = functools.partial(model_logprobs, policy)
        assert answer.require_agreement(probe, version=0) == 0.0
        with torch.no_grad():
            policy.causal_lm.base_model.layers[1].mlp.up_proj.weight.mul_(2.0)
        with pytest.raises(EngineError, match="does not sample from the weights of step 0"):
            answer.require_agreement(probe, version=0)
        whole = torch.tensor(answer.ids_L)
        assert policy.temperature == 0.5
        assert whole.max() < policy.vocab_size


def test_closing_the_iterator_frees_its_replica():
    company = Company(lambda engine, number: setattr(engine, "allowed", 2))

    async def aborted(generator):
        stream = generator.generate(request(seeds=range(9)))
        await anext(stream)
        assert company.engines[0].num_open == 1
        await stream.aclose()
        assert company.engines[0].num_open == 0
        # Its load is gone too: the next two go to one replica each.
        company.engines[0].allowed = company.engines[1].allowed = 100
        await asyncio.gather(*(collect(generator, request(seeds=range(9))) for _ in range(2)))
        return [len(engine.asked) for engine in company.engines]

    with replicas_of(company) as generator:
        assert run(aborted(generator)) == [2, 1]


def test_what_is_aborted_is_not_retried():
    told = []
    kept, aborted = (Order(request(request_id=name), told.append) for name in ("kept", "aborted"))
    with contextlib.closing(ScriptedEngine()) as engine:
        replica = GeneratorReplica(0, "generation replica 0")
        group = MortalGroup(engine)
        for number, order in enumerate((kept, aborted)):
            replica.give(order, number)
        replica.take_news()
        aborted.is_aborted = True
        assert replica.abort(aborted)
        assert not aborted.is_over, "the engine has not let go of it"
        assert replica.give_up() == [kept]
        assert aborted.is_over
        assert not kept.is_over
        assert replica.load == 0
        group.shutdown()
    assert told == []


@pytest.mark.parametrize("asleep", [False, True])
def test_a_request_may_be_given_up_before_it_was_sent(asleep):
    company = Company()

    async def given_up(generator):
        if asleep:
            await generator.sleep()
        task = asyncio.create_task(collect(generator, request(seeds=range(3))))
        await asyncio.sleep(0.05 if asleep else 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if asleep:
            await generator.wake()
        await generator.update_weights(weights(1))  # nothing is under way
        return await collect(generator, request(seeds=(4,)))

    with replicas_of(company, 1) as generator:
        assert seeds_of(run(given_up(generator))) == [4]


def test_replicas_begin_with_the_same_weights():
    company = Company(lambda engine, number: setattr(engine, "weight_version", number))
    with pytest.raises(EngineError, match=r"weights of the steps \[0, 1\]"):
        GeneratorReplicas(company.make_group, 2)
    assert all(engine.is_closed for engine in company.engines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found[:1] + found, "completion 0 of 'r' unasked"),
        (lambda found: found[:1], "ended 'r' without 1 of its completions"),
    ],
    ids=["twice", "short"],
)
def test_completions_that_are_not_those_that_were_asked_for_are_a_failure_of_the_engine(
    change, said
):
    class Other(ScriptedEngine):
        async def generate(self, request):
            for one in change([one async for one in super().generate(request)]):
                yield one

    def group(index):
        return LocalGroup("generation", EngineWorker, Other)

    with (
        contextlib.closing(GeneratorReplicas(group, 1, max_restarts=0)) as generator,
        pytest.raises(EngineError, match=said),
    ):
        draw(generator, request(seeds=(1, 2)))


def test_a_replica_without_weights_joins_at_the_next_update_though_they_are_unchanged():
    company = Company()
    with replicas_of(company) as generator:
        run(generator.update_weights(weights(5)))
        company.groups[0].is_dead = True
        draw(generator, *(request(seeds=(i, i + 1)) for i in range(4)))
        run(until(lambda: len(company.said) == 2))
        assert company.said[-1] == "generation replica 0 is back and waits for weights"
        draw(generator, request(), request())
        assert company.asked(2) == []
        same = dataclasses.replace(weights(5), version=6, same_as=5)
        run(generator.update_weights(same))
        assert company.engines[2].weights["a"].tolist() == [5.0, 6.0, 7.0, 8.0]
        draw(generator, request(), request())
        assert len(company.asked(2)) == 1
        company.groups[1].dies_in = "keep_weights"
        run(generator.update_weights(dataclasses.replace(same, version=7, same_as=6)))
        assert company.engines[3].weights["a"].tolist() == [5.0, 6.0, 7.0, 8.0]
        assert [company.engines[i].weight_version for i in (2, 3)] == [7, 7]
