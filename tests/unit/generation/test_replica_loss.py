"""Real processes of replicas, and real kills."""

import asyncio
import contextlib
import copy
import functools
import os
import signal
import time

import numpy as np
import pytest
import torch

import ray_engines
from generators import collect, draw, policy_and_tokenizer, request
from laurel.generation.replicas import GeneratorReplicas
from laurel.generation.transformers.engine import TransformersEngine
from laurel.generation.weights.probe import model_logprobs
from laurel.types import Weights
from sandbox_processes import is_gone

ASKED = [
    request(f"prompt {i}", seeds=range(i, i + 4), request_id=str(i), max_new_tokens=60)
    for i in range(8)
]
"""With six completions side by side, far from done when the fifth has come."""


@pytest.fixture(scope="module")
def cluster():
    with ray_engines.cluster() as cluster:
        yield cluster


@pytest.fixture
def setup(cluster, tmp_path_factory):
    """A policy, and what makes replicas of it."""
    policy, tokenizer = policy_and_tokenizer()
    directory = tmp_path_factory.mktemp("policy")
    maker = ray_engines.maker(str(directory), policy, tokenizer, max_concurrent=6)
    return policy, tokenizer, maker


def run(coroutine):
    """To start a process again takes long on a busy machine."""
    return asyncio.run(asyncio.wait_for(coroutine, 180))


@contextlib.contextmanager
def replicas_of(cluster, setup, count, **options):
    """A generator, the processes that were made (replica, pid), and what it said."""
    policy, _, maker = setup
    pids, said = [], []
    make_group = ray_engines.groups(
        cluster, maker, count, on_pid=lambda index, pid: pids.append((index, pid))
    )
    probe = functools.partial(model_logprobs, policy)
    with contextlib.closing(
        GeneratorReplicas(make_group, count, probe=probe, say=said.append, **options)
    ) as generator:
        yield generator, pids, said


def reference(setup):
    """What the engine in this process draws."""
    policy, tokenizer, _ = setup
    end_ids = [tokenizer.eos_token_id]
    with contextlib.closing(TransformersEngine(policy, tokenizer, end_ids=end_ids)) as engine:
        return draw(engine, *ASKED)


def draw_all(generator):
    async def together():
        return await asyncio.gather(*(collect(generator, wanted) for wanted in ASKED))

    return run(together())


def same(found, expected, policy):
    """All are as expected. One of them may go another way after a draw that lay on an edge.

    Who else is in the batch changes sums in their last digits. Of some ten thousand draws one may
    be so near the edge between two tokens that this decides; that it was is computed anew.
    """
    went_apart = 0
    for wanted, one, other in zip(ASKED, found, expected, strict=True):
        assert [a.index for a in one] == [b.index for b in other]
        for a, b in zip(one, other, strict=True):
            ids, wanted_ids = a.ids_L.tolist(), b.ids_L.tolist()
            if ids == wanted_ids:
                assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            else:
                pairs = enumerate(zip(ids, wanted_ids, strict=False))
                count = next(n for n, (token, other) in pairs if token != other)
                seed, drawn = wanted.seeds_G[a.index], {ids[count], wanted_ids[count]}
                assert drawn <= near_the_draw(policy, wanted.prompt_ids, ids[:count], seed)
                ids, went_apart = ids[:count], went_apart + 1
            assert a.logprobs_L[: len(ids)] == pytest.approx(b.logprobs_L[: len(ids)], abs=1e-5)
    assert went_apart <= 1


def near_the_draw(policy, prompt_ids, ids, seed):
    """Tokens that the next draw may give where sums differ by a millionth."""
    model = copy.deepcopy(policy.causal_lm)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits_V = model(torch.tensor([[*prompt_ids.tolist(), *ids]])).logits[0, -1].double()
    drawn = np.random.Generator(np.random.Philox(seed)).random(len(ids) + 1)[-1]
    ends_V = logits_V.softmax(0).cumsum(0).numpy()
    first, last = (int(np.searchsorted(ends_V, drawn + off, "right")) for off in (-1e-6, 1e-6))
    return set(range(first, last + 1))


def draw_and_kill(generator, pid):
    """All completions as they came; the process is killed when the fifth has come."""

    async def one(wanted, everything):
        async for generated in generator.generate(wanted):
            everything.append((wanted.id, generated))
            if len(everything) == 5:
                os.kill(pid, signal.SIGKILL)

    async def together():
        everything = []
        await asyncio.gather(*(one(wanted, everything) for wanted in ASKED))
        return everything

    came = run(together())
    keys = [(name, generated.index) for name, generated in came]
    assert sorted(keys) == sorted({(w.id, i) for w in ASKED for i in range(len(w.seeds_G))})
    return [sorted((g for name, g in came if name == w.id), key=lambda g: g.index) for w in ASKED]


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def train(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


@pytest.mark.slow
def test_a_killed_replica_costs_time_and_nothing_else(cluster, setup):
    policy, _, _ = setup
    with replicas_of(cluster, setup, 2) as (generator, pids, said):
        victim = next(pid for index, pid in pids if index == 0)
        same(draw_and_kill(generator, victim), reference(setup), policy)
        assert "generation replica 0 was lost" in said[0]
        assert f"process {victim}" in said[0]
        wait_for(lambda: len(said) == 2)
        wait_for(lambda: is_gone(victim))
        # It takes part again, and has the next weights as the others have.
        train(policy, 1)
        run(generator.update_weights(Weights(version=1, tensors=policy.named_weights)))
        found = draw_all(generator)
        same(found, reference(setup), policy)
        assert {g.weight_version for group in found for g in group} == {1}
        # One that dies while there is nothing to do is missed when it is needed.
        victim = next(pid for index, pid in pids if index == 1)
        os.kill(victim, signal.SIGKILL)
        train(policy, 2)
        run(generator.update_weights(Weights(version=2, tensors=policy.named_weights)))
        same(draw_all(generator), reference(setup), policy)
        assert [index for index, _ in pids][2:] == [0, 1]
        living = [pid for _, pid in pids]
    wait_for(lambda: all(map(is_gone, living)))
