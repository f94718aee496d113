"""What src does on a GPU alone, where no other test of this folder runs it: see `branches.py`."""

import asyncio
import time
from importlib.util import find_spec

import pytest
import torch

import tiny
import tiny_tokenizers as made
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.extensions.doctor.checks import SIZES, Trial, run_trial
from laurel.extensions.doctor.doctor import PROBES
from laurel.extensions.doctor.machine import measure_products
from laurel.extensions.server.replicas import ModelWorker
from laurel.extensions.server.service import ServingSpec
from laurel.extensions.starter.starter import run_init
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.checkpoint.state import random_states, restore_random_states
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import LocalScorer
from laurel.rewards.spec import ScorerSpec
from laurel.run.micro_batches import _device_memory
from laurel.run.policy import _free_bytes
from laurel.types import GenerationRequest, Message, SamplingParams, group_of
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
    run_init(task="rm", model="scratch", data="someone/preferences", output=path)
    config = load_config(RewardTrainingRun, path, []).config
    several = torch.cuda.device_count() if find_spec("ray") else 1
    assert config.cluster.gpus_per_node == several


def test_free_memory_is_the_gpus():
    free = _free_bytes(DEVICE)
    assert 0 < free <= torch.cuda.get_device_properties(DEVICE).total_memory


def test_micro_batches_are_chosen_by_the_gpus_memory():
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


def completions(model):
    engine = TransformersEngine(model, made.chatml(), end_ids=())
    request = GenerationRequest(
        id="one",
        prompt_ids=tiny.random_groups(1, [(9, [1])])[0].trunk_ids,
        seeds_G=(1, 2),
        sampling=SamplingParams(max_new_tokens=8, temperature=0.0),
    )

    async def drawn():
        return [one async for one in engine.generate(request)]

    found = asyncio.run(drawn())
    engine.close()
    return [list(one.ids_L) for one in sorted(found, key=lambda one: one.index)]


def test_completions_are_the_cpus():
    model = tiny.tiny_policy("qwen3", std=0.2)
    expected = completions(model)
    assert completions(model.to(DEVICE)) == expected


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_steps_are_replayed_as_graphs(precision):
    model = tiny.tiny_policy("qwen3", std=0.2, precision=precision).to(DEVICE)
    requests = [
        GenerationRequest(
            id=str(length),
            prompt_ids=tiny.random_groups(1, [(length, [1])])[0].trunk_ids,
            seeds_G=tuple(range(count)),
            sampling=SamplingParams(max_new_tokens=limit),
        )
        for length, count, limit in ((9, 5, 90), (70, 3, 20), (5, 1, 40))
    ]

    async def drawn(engine):
        async def one(request):
            found = [one async for one in engine.generate(request)]
            return sorted(found, key=lambda one: one.index)

        return await asyncio.gather(*(one(request) for request in requests))

    plain = TransformersEngine(model, made.chatml(), end_ids=(), static_slots=False)
    engine = TransformersEngine(model, made.chatml(), end_ids=(), static_slots=True)
    steps, captured = engine._batch.static, []
    capture = steps.capture
    steps.capture = lambda compute: (captured.append(1), capture(compute))[1]
    found, expected = asyncio.run(drawn(engine)), asyncio.run(drawn(plain))
    assert steps.capture is not None, "a capture failed: see the warning"
    assert len(captured) > 3
    plain.close()
    engine.close()
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            if precision == torch.float32:
                assert one.ids_L.tolist() == other.ids_L.tolist()
                assert one.logprobs_L == pytest.approx(other.logprobs_L, abs=1e-4)
            else:  # in bfloat16 rounding may pick another token, after which all are others
                assert one.logprobs_L[0] == pytest.approx(other.logprobs_L[0], abs=0.1)


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
