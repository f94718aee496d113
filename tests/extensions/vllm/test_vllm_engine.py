"""What vLLM alone can get wrong. What every generator promises: tests/contracts/test_generator.py.

An engine takes seconds to start, so one that has been through an error goes on to the next test.
"""

import asyncio
import contextlib
import copy
import multiprocessing
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import tiny_tokenizers
from generators import collect, draw, endless, request, run
from host_worker import HostEngine
from laurel.config.grpo import GenerationConfig
from laurel.errors import DataError, EngineError, MissingDependencyError, install_command
from laurel.generation.load import GeneratorSpec
from laurel.generation.weights.held import HeldDtype
from laurel.types import Weights
from processes import descendants, fork_of
from sandbox_processes import is_gone, wait_until
from vllm_engines import (
    HAS_VLLM,
    MAX_LENGTH,
    Learner,
    random_model,
    require_vllm,
    scheduler_of,
    start_and_wait,
    started,
)

EXACT = 1e-4
"""Log-probabilities of one model in float32, computed in two orders: 6e-6 was measured."""
VOCABULARY = len(tiny_tokenizers.chatml())


@pytest.fixture(params=[("qwen3", True), ("llama", False)], ids=["tied", "untied"], scope="module")
def models(request):
    """Models of one shape, each with weights of its own."""
    require_vllm()
    model_type, tied = request.param
    return [
        random_model(model_type, tied=tied, seed=seed, vocab_size=VOCABULARY) for seed in range(4)
    ]


@pytest.fixture(scope="module")
def learner(models):
    return Learner(models[0])


@pytest.fixture(scope="module")
def engine(models, learner):
    with started(models[0], lambda ids: learner.logprobs(ids)) as engine:
        yield engine


def largest_difference(engine, model, prompt="The laurel is evergreen " * 3):
    """Between what an engine says of the tokens it draws and what a model says of them."""
    asked = request(prompt, seeds=range(3), max_new_tokens=12)
    (found,) = draw(engine, asked)
    whole = [np.concatenate([asked.prompt_ids, one.ids_L]) for one in found]
    return max(
        np.abs(Learner(model).logprobs(ids)[-len(one.ids_L) :] - one.logprobs_L).max()
        for ids, one in zip(whole, found, strict=True)
    )


def test_an_engine_starts_with_the_weights_of_its_directory(engine, models):
    assert 0 < engine.probe_difference < EXACT
    assert largest_difference(engine, models[0]) < EXACT
    assert largest_difference(engine, models[1]) > 1


def test_every_weight_arrives_at_every_transfer(engine, models, learner):
    for version in (1, 2, 3):
        before, learner.model = learner.model, models[version]
        run(engine.update_weights(learner.weights(version)))
        assert engine.weight_version == version
        assert 0 < engine.probe_difference < EXACT
        # The prompt is one whose K/V the weights before have computed: none of them is used again.
        assert largest_difference(engine, models[version]) < EXACT
        assert largest_difference(engine, before) > 1


@pytest.fixture(scope="module")
def in_bfloat16():
    require_vllm()
    settings = GenerationConfig.model_validate({"vllm_cfg": {"precision": "bfloat16"}})
    model = random_model("qwen3", tied=True, seed=0, vocab_size=VOCABULARY)
    learner = Learner(model)
    with started(model, lambda ids: learner.logprobs(ids), settings=settings) as engine:
        yield engine, learner


def test_what_travels_is_what_vllm_computes_with(in_bfloat16):
    """In bfloat16: half the bytes of the learner's float32, and the same values in vLLM."""
    engine, learner = in_bfloat16
    assert engine.held_dtype == HeldDtype("bfloat16")
    learner.model = random_model("qwen3", tied=True, seed=1, vocab_size=VOCABULARY)
    answers = []
    for version, held in enumerate((engine.held_dtype, None), 1):
        engine.held_dtype = held
        run(engine.update_weights(learner.weights(version)))
        assert 0 < engine.probe_difference < 0.2
        answers.append(run(engine.answer_probe()).logprobs_L)
    rounded, as_they_are = answers
    assert rounded.tolist() == as_they_are.tolist()


@pytest.mark.slow
def test_weights_arrive_by_handles():
    """vLLM's own `ipc` engine, in many chunks; memory of the host stands in for that of a GPU."""
    require_vllm()
    models = [random_model("llama", tied=False, seed=s, vocab_size=VOCABULARY) for s in range(3)]
    learner = Learner(models[0])
    with started(models[0], lambda ids: learner.logprobs(ids), kind=HostEngine) as engine:
        assert engine.transfer.name == "ipc"
        for version in (1, 2):
            learner.model = models[version]
            run(engine.update_weights(learner.weights(version)))
            assert 0 < engine.probe_difference < EXACT


def test_one_stale_tensor_is_seen_and_not_drawn_from(engine, models, learner):
    """Tensors in turn keep the values of the step before, as an incomplete reload leaves them."""
    version, learner.model = engine.weight_version, models[0]
    run(engine.update_weights(learner.weights(version)))
    new, old = models[1].state_dict(), models[0].state_dict()
    learner.model = models[1]
    stale_ones = [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    ]
    for stale in stale_ones:
        torn = {**new, stale: old[stale]}
        if models[0].config.tie_word_embeddings:
            torn["lm_head.weight"] = torn["model.embed_tokens.weight"]
        with pytest.raises(EngineError, match=r"step 9: token \d+ .* differ by"):
            run(engine.update_weights(Weights(version=9, tensors=lambda t=torn: t.items())))
        assert engine.weight_version == version
        with pytest.raises(EngineError, match="step 9"):
            draw(engine, request())
    run(engine.update_weights(learner.weights(version)))
    assert largest_difference(engine, models[1]) < EXACT


@pytest.mark.parametrize("blocks", [["mlp"], ["self_attn"], ["self_attn", "mlp"], ["embed_tokens"]])
def test_what_changes_is_enough_for_an_engine_that_has_had_all(engine, models, learner, blocks):
    """Blocks whole, as `merged_weights` gives them: vLLM joins some of their layers."""
    learner.model = models[0]
    run(engine.update_weights(learner.weights(1)))
    learner.model = changed = copy.deepcopy(models[0])
    new = models[1].state_dict()
    names = [n for n in new if any(f".{block}." in n for block in blocks)]
    changed.load_state_dict({n: new[n] for n in names}, strict=False)

    def everything():
        raise AssertionError("it has had all")

    for version in (2, 3):
        weights = {n: t for n, t in changed.state_dict().items() if n in names}
        update = Weights(version=version, tensors=everything, changing=weights.items)
        run(engine.update_weights(update))
        assert engine.weight_version == version
        assert 0 < engine.probe_difference < EXACT
        assert largest_difference(engine, changed) < EXACT
        assert largest_difference(engine, models[0]) > 1
    # After a failure it takes nothing on trust.
    torn = {n: t for n, t in models[2].state_dict().items() if n in names}
    with pytest.raises(EngineError, match=r"step 9: token"):
        run(engine.update_weights(Weights(version=9, tensors=dict, changing=torn.items)))
    both = learner.weights(4)
    run(engine.update_weights(Weights(version=4, tensors=both.tensors, changing=dict)))
    assert largest_difference(engine, changed) < EXACT


def test_a_missing_tensor_is_named(engine, models, learner):
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {k: v for k, v in learner.model.state_dict().items() if k != name}
    version = engine.weight_version
    with pytest.raises(EngineError, match=f"step 8 lack 1 of .* tensors: {name}"):
        run(engine.update_weights(Weights(version=8, tensors=lambda: rest.items())))
    run(engine.update_weights(learner.weights(version)))
    assert largest_difference(engine, learner.model) < EXACT


def test_a_tensor_of_another_shape_is_named(engine, learner):
    version = engine.weight_version
    wrong = {name: value[..., :-1] for name, value in learner.model.state_dict().items()}
    with pytest.raises(EngineError, match=r"step 8: .* has shape \[\d+, 63\]"):
        run(engine.update_weights(Weights(version=8, tensors=lambda: wrong.items())))
    assert engine.weight_version == version


def test_a_cancelled_transfer_is_made_all_the_same(engine, models, learner):
    async def cancelled():
        learner.model = models[2]
        task = asyncio.create_task(engine.update_weights(learner.weights(6)))
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await collect(engine, request())

    assert {one.weight_version for one in run(cancelled())} == {6}
    assert largest_difference(engine, models[2]) < EXACT


def test_transfers_leave_nothing_behind(engine, learner):
    run(engine.update_weights(learner.weights(5)))
    used = sum(process.memory_info().rss for process in engine._processes)
    for _ in range(20):
        run(engine.update_weights(learner.weights(5)))
    assert sum(process.memory_info().rss for process in engine._processes) < used + (16 << 20)
    assert not list(Path("/dev/shm").glob("laurel-weights-*"))


def test_a_pipeline_gets_the_weights_of_each_of_its_stages():
    """Tied: what the first and the last stage share has to arrive at both."""
    require_vllm()
    models = [random_model("qwen3", tied=True, seed=s, vocab_size=VOCABULARY) for s in range(2)]
    learner = Learner(models[0])
    stages = GenerationConfig(max_concurrent=6, vllm_cfg={"pipeline_parallel_size": 2})
    with started(models[0], learner.logprobs, settings=stages) as engine:
        working = [one for one in engine._processes if fork_of(one.pid) is None]
        assert len(working) == 3, "a scheduler, and a worker for each stage"
        assert largest_difference(engine, models[0]) < EXACT
        learner.model = models[1]
        run(engine.update_weights(learner.weights(1)))
        assert 0 < engine.probe_difference < EXACT
        assert largest_difference(engine, models[1]) < EXACT
        segments = [Path(path) for path in engine._segments]
        assert any(path.exists() for path in segments)
    assert not any(path.exists() for path in segments)


def test_a_prompt_that_fills_the_context_is_refused(engine):
    with pytest.raises(DataError, match=f"{MAX_LENGTH} tokens"):
        draw(engine, request([5] * MAX_LENGTH))
    (found,) = draw(engine, request([5] * (MAX_LENGTH - 1), max_new_tokens=9))
    assert {len(one.ids_L) for one in found} == {1}


def test_engines_listen_on_this_machine_only(engine):
    addresses = {
        connection.laddr.ip
        for process in engine._processes
        for connection in process.net_connections("inet")
    }
    assert addresses
    assert addresses <= {"127.0.0.1", "::1"}


def test_an_engine_of_other_weights_does_not_start(warm_processes):
    require_vllm()
    here = psutil.Process()
    children, below = set(here.children()), set(here.children(recursive=True))
    one, other = (random_model("qwen3", tied=True, seed=s, vocab_size=VOCABULARY) for s in range(2))
    with (
        pytest.raises(EngineError, match="step 4: token"),
        started(one, Learner(other).logprobs, weight_version=4),
    ):
        pass
    assert set(here.children()) <= children
    # Forks end a moment after what they were forked for.
    wait_until(lambda: set(here.children(recursive=True)) <= below)


def test_a_dead_engine_ends_what_waits_for_it(in_bfloat16):
    """Killed without a word, while requests are drawn and an update waits for them.

    The last test of this engine."""
    engine, learner = in_bfloat16

    async def killed_meanwhile():
        drawing = [asyncio.create_task(collect(engine, endless())) for _ in range(2)]
        await asyncio.sleep(0.3)
        updating = asyncio.create_task(engine.update_weights(learner.weights(1)))
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (*drawing, updating))
        scheduler_of(engine._processes).kill()
        began = time.monotonic()
        found = await asyncio.gather(*drawing, updating, return_exceptions=True)
        return found, time.monotonic() - began

    found, seconds = run(killed_meanwhile())
    assert [type(one) for one in found] == [EngineError] * 3
    assert "vLLM died" in str(found[0])
    assert seconds < 50
    with pytest.raises(EngineError, match="vLLM died"):
        draw(engine, request())
    with pytest.raises(EngineError, match="vLLM died"):
        run(engine.update_weights(learner.weights(1)))
    engine.close()
    assert not any(process.is_running() for process in engine._processes)


def test_a_killed_program_leaves_no_engine_behind(warm_processes, short_folder, monkeypatch):
    require_vllm()
    monkeypatch.setenv("TMPDIR", short_folder)
    spawning = multiprocessing.get_context("spawn")
    ready, ready_there = spawning.Pipe(duplex=False)
    program = spawning.Process(target=start_and_wait, args=(ready_there, VOCABULARY))
    program.start()
    ready_there.close()
    assert ready.recv() == "started"
    killed = fork_of(program.pid)
    engine = [one for one in descendants(program.pid) if one != killed]
    working = [one for one in engine if fork_of(one.pid) is None]
    assert len(working) == 2, "a scheduler and a worker"
    killed.kill()
    program.join()
    assert program.exitcode == -signal.SIGKILL
    try:
        wait_until(lambda: all(is_gone(one.pid) for one in engine))
    except AssertionError:
        for one in engine:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        raise


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it():
    from laurel.extensions.vllm.engine import VllmEngine

    with pytest.raises(MissingDependencyError, match=re.escape(install_command("vllm"))):
        VllmEngine(
            "nowhere",
            GeneratorSpec(max_length=8, end_ids=()),
            precision="float32",
            probe=lambda ids: np.zeros(len(ids) - 1, np.float32),
        )
