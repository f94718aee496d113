"""What src does on a GPU alone, where no other test of this folder runs it: see `branches.py`."""

import asyncio
import time
from importlib.util import find_spec

import pytest
import torch

import tiny
import tiny_tokenizers as made
from laurel import plugins
from laurel.config.environments import ModelServerConfig
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.data.forest import to_forest
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.extensions.doctor.checks import SIZES, Trial, run_trial
from laurel.extensions.doctor.doctor import PROBES
from laurel.extensions.doctor.machine import measure_products
from laurel.extensions.server.model_servers import ServerProcess
from laurel.extensions.server.replicas import ModelWorker
from laurel.extensions.server.service import ServingSpec
from laurel.extensions.starter.options import InitOptions
from laurel.extensions.starter.starter import run_init
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.checkpoint.state import random_states, restore_random_states
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import LocalScorer
from laurel.rewards.spec import ScorerSpec
from laurel.run.model import _device_memory, _free_bytes
from laurel.types import GenerationRequest, Message, SamplingParams, TokenGroup, group_of
from laurel.workers.process import choose_device
from laurel.workers.rendezvous import RankPlace
from reward_models import small_model, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
DEVICE = torch.device("cuda")
LOGS = [
    [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes. " * i}]
    for i in range(1, 5)
]


def test_the_trial_passes():
    trial = Trial(
        device=DEVICE,
        num_devices=torch.cuda.device_count(),
        sizes=SIZES["cuda"],
        end=time.monotonic() + 600,
    )
    outcomes = run_trial(trial)
    assert [(one.name, one.detail) for one in outcomes if one.status == "fail"] == []


def test_the_doctor_finds_the_gpus():
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    assert len(PROBES["gpus"]().facts["devices"]) == torch.cuda.device_count()
    rates = measure_products(("float32", "bfloat16"), "cuda", seconds=0.2)
    assert rates["bfloat16"] > rates["float32"] > 0


def test_a_starter_counts_the_gpus(tmp_path):
    path = tmp_path / "starter.yaml"
    options = InitOptions(task="rm", model="scratch", data="someone/preferences", output=path)
    run_init(options)
    config = load_config(RewardTrainingRun, path, []).config
    several = torch.cuda.device_count() if find_spec("ray") else 1
    assert config.cluster.gpus_per_node == several


def test_free_memory_is_the_gpus():
    free = _free_bytes(DEVICE)
    assert 0 < free <= torch.cuda.get_device_properties(DEVICE).total_memory


def test_served_models_sleep_on_the_policys_gpu(monkeypatch):
    engine = type(plugins.find(plugins.Engine, "vllm"))
    seen = []

    def serve_command(self, section, host, port, *, on_gpu, rests):
        seen.append((on_gpu, rests))
        return ["true"], {}

    monkeypatch.setattr(engine, "serve_command", serve_command)
    place = RankPlace(role="server")
    for resources in ({}, {"gpus_per_node": 1}):
        section = ModelServerConfig(model_name="m", resources=resources)
        ServerProcess(place, section, device="auto").shutdown()
    assert seen == [(True, True), (True, False)]


def test_micro_batches_ask_for_the_gpus_memory():
    run = load_config(RewardTrainingRun, None, []).config
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    assert _device_memory(run) == total


def test_random_states_come_back():
    torch.rand(3, device=DEVICE)
    states = random_states()
    assert len(states["cuda"]) == torch.cuda.device_count()
    before = torch.rand(3, device=DEVICE)
    torch.rand(5, device=DEVICE)
    restore_random_states(states)
    assert torch.equal(torch.rand(3, device=DEVICE), before)


def request(length, count, **sampling):
    return GenerationRequest(
        id=str(length),
        prompt_ids=tiny.random_groups(1, [(length, [1])])[0].trunk_ids,
        seeds_G=tuple(range(count)),
        sampling=SamplingParams(**sampling),
    )


def drawn(engine, *requests):
    """The completions of requests that are made together; the engine is closed then."""

    async def one(wanted):
        found = [one async for one in engine.generate(wanted)]
        return sorted(found, key=lambda one: one.index)

    async def together():
        return await asyncio.gather(*map(one, requests))

    found = asyncio.run(together())
    engine.close()
    return found


def completions(model):
    engine = TransformersEngine(model, made.chatml(), end_ids=())
    (found,) = drawn(engine, request(9, 2, max_new_tokens=8, temperature=0.0))
    return [list(one.ids_L) for one in found]


def test_completions_are_the_cpus():
    model = tiny.tiny_policy("qwen3", std=0.2)
    expected = completions(model)
    assert completions(model.to(DEVICE)) == expected


REQUESTS = [
    request(length, count, max_new_tokens=limit)
    for length, count, limit in ((9, 5, 90), (70, 3, 20), (5, 1, 40))
]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_steps_are_replayed_as_graphs(precision):
    model = tiny.tiny_policy("qwen2", std=0.2, precision=precision).to(DEVICE)
    engine = TransformersEngine(model, made.chatml(), end_ids=(), static_slots=True)
    steps, captured = engine._batch.static, []
    capture = steps.capture
    steps.capture = lambda compute: (captured.append(1), capture(compute))[1]
    found = drawn(engine, *REQUESTS)
    assert steps.capture is not None, "a capture failed: see the warning"
    assert len(captured) > 3
    plain = TransformersEngine(model, made.chatml(), end_ids=(), static_slots=False)
    expected = drawn(plain, *REQUESTS)
    for wanted, ones, others in zip(REQUESTS, found, expected, strict=True):
        branches = tuple(one.ids_L for one in ones)
        # In bfloat16 rounding may pick another token, after which all are others.
        if precision == torch.float32:
            assert list(map(list, branches)) == [list(other.ids_L) for other in others]
        group = TokenGroup(id="", trunk_ids=wanted.prompt_ids, branches_ids_G=branches)
        recomputed = model.logprobs(to_forest([group])).tolist()
        of_tokens = [value for one in ones for value in one.logprobs_L]
        tolerance = 1e-4 if precision == torch.float32 else 0.25
        assert of_tokens == pytest.approx(recomputed, abs=tolerance)


class Waits(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        torch.cuda.current_stream().synchronize()
        return self.inner(hidden)


def test_a_capture_that_fails_leaves_nothing_behind(caplog):
    model = tiny.tiny_policy("qwen2", std=0.2).to(DEVICE)
    layer = model.causal_lm.base_model.layers[0]
    layer.mlp = Waits(layer.mlp)
    engine = TransformersEngine(model, made.chatml(), end_ids=(), static_slots=True)
    found = drawn(engine, *REQUESTS)
    assert engine._batch.static.capture is None
    assert "capturing" in caplog.text
    torch.cuda.empty_cache()
    torch.rand(2, device=DEVICE)
    plain = TransformersEngine(model, made.chatml(), end_ids=(), static_slots=False)
    expected = drawn(plain, *REQUESTS)
    assert [[list(one.ids_L) for one in ones] for ones in found] == [
        [list(one.ids_L) for one in ones] for ones in expected
    ]


def test_a_scorer_sleeps_on_the_host():
    contract = ScoringContract.create(
        made.chatml(), max_length=256, truncation_side="left", append_eos=True
    )
    scorer = LocalScorer(tiny.tiny_reward_model("qwen3", std=0.05).to(DEVICE), contract)
    groups = [group_of([Message("user", "2?")], ["Yes.", "No."], group_id="one")]
    expected = [score.value for score in scorer.score_now(groups)[0]]
    held = torch.cuda.memory_allocated()
    scorer.sleep()
    assert torch.cuda.memory_allocated() < held
    scorer.wake()
    assert [score.value for score in scorer.score_now(groups)[0]] == expected


def test_replicas_score_as_one(tmp_path):
    write_model(small_model(), tmp_path)
    model = str(tmp_path)
    config = {"model_name": model, "precision": "float32"}
    with RewardModelEnvironment(config, device="cuda") as one:
        expected = one.step(LOGS).rewards.tolist()
    with RewardModelEnvironment({**config, "num_replicas": 2}, device="cuda") as two:
        assert two.step(LOGS).rewards.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no two GPUs here")
def test_replicas_of_a_server_take_turns(tmp_path):
    write_model(small_model(), tmp_path)
    spec = ServingSpec(scorer=ScorerSpec(model=ModelSpec(name=str(tmp_path))))
    for rank in (1, 2):
        ModelWorker(RankPlace(role="replica", local_rank=rank), spec, ())
        assert torch.cuda.current_device() == rank % torch.cuda.device_count()
    torch.cuda.set_device(0)
