"""Seconds of a step against numbers worked by hand, on a device whose rates are round."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError
from laurel.extensions.plan.plan import workload_of
from laurel.extensions.plan.step_time import (
    COMPILED,
    HOST_RATE,
    Efficiency,
    device_named,
    layer_bytes,
    step_time,
)
from laurel.planning.memory import Shapes, decoder_shape
from laurel.planning.operations import (
    Device,
    Operations,
    Workload,
    forward_operations,
    known_devices,
    training_operations,
)
from laurel.planning.plan import AdapterRequest, TrainingRequest, plan_run
from laurel.run.request import request_of

# A layer has 16 + 8 + 8 + 16 weights of attention and 3 x 32 of the feed-forward: 144.
SIZES = {
    "hidden_size": 4,
    "num_layers": 2,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": 10,
}
SHAPE = decoder_shape(**SIZES)
HEAD = decoder_shape(**SIZES, has_language_head=False)
WORK = Workload(num_prompts=3, per_prompt=2, prompt_tokens=5, completion_tokens=4)
ROUND = Device(
    name="round",
    flops={"float32": 1e3, "bfloat16": 1e3},
    bandwidth=1e3,
    memory=10**9,
    link=1e3,
    network=10.0,
    source="made up",
)
PARTS = Efficiency(products=0.5, memory=0.25)
GRPO = (
    "policy.max_total_sequence_length=9",
    "policy.precision=float32",
    "policy.train_global_batch_size=6",
    "policy.generation.backend=transformers",
    "grpo.num_prompts_per_step=3",
    "grpo.num_generations_per_prompt=2",
    "loss_fn.reference_policy_kl_penalty=0",
    "cluster.gpus_per_node=1",
    "cluster.device=cpu",
)
# 15 tokens are not read, of which the last layer computes the 16 weights of keys and values alone.
FORWARD = Operations(
    linear=2 * (2 * 144 * 39 - 128 * 15), attention=4 * 2 * 2 * 2 * 225, head=2 * 10 * 4 * 24
)


def timed(*changes, shapes=None, work=WORK, kind=GRPORun, base=GRPO, device=ROUND):
    request = request_of(load_config(kind, None, [*base, *changes]).config)
    shapes = shapes or Shapes(policy=SHAPE)
    return step_time(
        request, plan_run(request), shapes, workload=work, device=device, efficiency=PARTS
    )


def phases(time):
    return {phase.name: phase for phase in time.phases}


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (TrainingRequest(), 3 * 18624 + 3.5 * 7200 + 4 * 1920),
        (TrainingRequest(recomputes=True), 4 * 18624 + 4.5 * 7200 + 4 * 1920),
        (
            TrainingRequest(adapters=AdapterRequest(enabled=True)),
            2 * 18624 + 3.5 * 7200 + 3 * 1920,
        ),
    ],
    ids=["plain", "recomputed", "adapters"],
)
def test_operations_of_training(training, expected):
    assert forward_operations(SHAPE, WORK, has_logits=True) == FORWARD
    assert FORWARD.total == 18624 + 7200 + 1920
    assert training_operations(FORWARD, training) == expected


def test_training_takes_its_products_and_the_optimizers_accesses():
    training = phases(timed("policy.train_micro_batch_size=9"))["training"]
    products = (3 * 18624 + 3.5 * 7200 + 4 * 1920) / (1e3 * 0.5)
    # The gradient is read, weight and two moments are read and written: 7 numbers of 4 bytes.
    states = 7 * 4 * SHAPE.num_parameters / (1e3 * 0.25)
    assert training.shared.seconds == pytest.approx(products + states)
    assert training.shared.limit == "products"
    assert training.padded.seconds > training.shared.seconds


def test_ranks_divide_the_work_and_wait_for_a_slow_link():
    fast = replace(ROUND, link=1e12)
    alone = phases(timed("policy.train_micro_batch_size=9", device=fast))["training"]
    changes = ("policy.train_micro_batch_size=9", "cluster.gpus_per_node=2")
    two = phases(timed(*changes, device=fast))["training"]
    assert two.shared.seconds == pytest.approx(alone.shared.seconds / 2)
    slow = replace(ROUND, link=1.0)
    waiting = phases(timed(*changes, device=slow))["training"].shared
    # Half of the weights comes from the other rank, twice in float32, and gradients go there.
    assert waiting.limit == "link"
    assert waiting.link_bytes == 12 * SHAPE.num_parameters / 2


def test_generation_reads_weights_and_cache_for_every_token():
    generation = phases(timed())["generation"].shared
    # All six completions at once; a prompt's keys are read once for its two completions. A token
    # has 2 layers x 1 head x 2 numbers of keys and as many of values, of 4 bytes.
    read = 4 * SHAPE.num_parameters + 32 * (3 * 5 + 6 * 2.5)
    prompts = 3 * (2 * (2 * 144 * 5 - 128 * 4) + 32 * 15) / (1e3 * 0.5)
    row = 2 * 2 * 144 + 2 * 10 * 4 + 32 * (5 + 2.5)
    step = max(6 * row / (1e3 * 0.5), read / (1e3 * 0.25))
    assert generation.seconds == pytest.approx(prompts + 4 * step)
    assert generation.limit == "products"
    few = phases(timed("policy.generation.max_concurrent=2"))["generation"].shared
    read = 4 * SHAPE.num_parameters + 32 * (5 + 2 * 2.5)
    assert few.seconds == pytest.approx(prompts + 3 * 4 * read / (1e3 * 0.25))
    assert few.limit == "memory"


def test_a_greedy_completion_is_sampled_and_scored_and_not_trained_on():
    judge = ("env.reward_model.enabled=true", "env.reward_model.model_name=judge")
    shapes = Shapes(policy=SHAPE, reward_models=(HEAD,))
    plain = phases(timed(*judge, shapes=shapes))
    more = phases(timed(*judge, shapes=shapes, work=replace(WORK, per_prompt=WORK.per_prompt + 1)))
    remax = phases(timed(*judge, "grpo.adv_estimator.name=remax", shapes=shapes))
    for name in ("generation", "scoring"):
        assert remax[name].shared.flops == more[name].shared.flops > plain[name].shared.flops
    assert remax["training"].shared == plain["training"].shared


def test_log_probabilities_are_of_the_reference_and_of_the_old_policy():
    assert "log-probs" not in phases(timed())
    one = phases(
        timed("loss_fn.reference_policy_kl_penalty=0.1", "policy.train_micro_batch_size=9")
    )
    assert one["log-probs"].shared.seconds == pytest.approx(FORWARD.total / 500)
    both = phases(
        timed(
            "loss_fn.reference_policy_kl_penalty=0.1",
            "policy.train_micro_batch_size=9",
            "policy.train_global_batch_size=2",
        )
    )
    assert both["log-probs"].shared.seconds == pytest.approx(2 * FORWARD.total / 500)


def test_scoring_reads_all_conversations_once_for_each_model():
    changes = (
        "env.reward_model.enabled=true",
        "env.reward_model.model_name=judge",
        "env.reward_model.precision=float32",
    )
    scoring = phases(timed(*changes, shapes=Shapes(policy=SHAPE, reward_models=(HEAD,))))["scoring"]
    # One token of each of the 6 completions is read, so the last layer skips 33 of 39.
    linear = 2 * (2 * 144 * 39 - 128 * 33)
    assert scoring.shared.seconds == pytest.approx((linear + 7200) / 500)
    assert scoring.padded.seconds == pytest.approx((2 * 2 * 144 * 54 + 32 * 270) / 500)
    assert scoring.slots_of == "policy"


def test_weights_stay_are_copied_go_over_the_link_or_through_the_host():
    assert phases(timed())["weight transfer"].shared.seconds == 0
    count = SHAPE.num_parameters
    vllm = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.precision=bfloat16")
    host = ["cluster.device=cpu", "policy.generation.vllm_cfg.weight_loading=files"]
    for change in (*host, "policy.generation.weight_transfer=object_store"):
        through_host = phases(timed(*vllm, "cluster.device=cuda", change))["weight transfer"].shared
        assert (through_host.seconds, through_host.limit) == (2 * count / HOST_RATE, "host")
    copied = phases(timed(*vllm, "cluster.device=cuda"))["weight transfer"].shared
    assert (copied.memory_bytes, copied.limit) == ((4 + 9 * 2) * count, "memory")
    apart = (
        "cluster.device=cuda",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
        "cluster.gpus_per_node=2",
    )
    over_link = phases(timed(*apart))["weight transfer"].shared
    assert (over_link.seconds, over_link.limit) == (4 * count / 1e3, "link")
    to_vllm = phases(timed(*apart, *vllm))["weight transfer"].shared
    assert (to_vllm.seconds, to_vllm.limit) == (2 * count / 1e3, "link")


def test_generation_that_runs_ahead_hides_the_shorter_side():
    ahead = timed(
        "grpo.max_staleness=1",
        "loss_fn.use_importance_sampling_correction=true",
        "cluster.gpus_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
    )
    seconds = {phase.name: phase.shared.seconds for phase in ahead.phases}
    longer = max(seconds["generation"], seconds["training"])
    assert ahead.seconds() == pytest.approx(longer + seconds["weight transfer"])
    assert timed().seconds() == pytest.approx(sum(phase.shared.seconds for phase in timed().phases))


def test_the_lengths_of_a_step_are_those_of_its_run():
    run = load_config(GRPORun, None, GRPO).config
    assert workload_of(run) == replace(WORK, completion_tokens=4, prompt_tokens=5)
    assert workload_of(run, prompt_tokens=7).completion_tokens == 2
    shorter = load_config(GRPORun, None, [*GRPO, "policy.generation.max_new_tokens=3"]).config
    assert workload_of(shorter).completion_tokens == 3
    with pytest.raises(ConfigError, match=r"do not fit into policy\.max_total_sequence_length=9"):
        workload_of(run, prompt_tokens=5, completion_tokens=5)
    with pytest.raises(ConfigError, match="do not fit"):
        workload_of(run, prompt_tokens=9)
    pairs = load_config(RewardTrainingRun, None, ["policy.train_global_batch_size=8"]).config
    assert (workload_of(pairs).num_prompts, workload_of(pairs).per_prompt) == (8, 2)


# The bytes of elementwise operations, against those that the code itself moves.

ELEMENTWISE = (
    "cluster.device=cuda",
    "policy.compile=false",
    "policy.precision=bfloat16",
    "policy.max_total_sequence_length=5120",
    "policy.train_global_batch_size=16",
    "grpo.num_prompts_per_step=1",
    "grpo.num_generations_per_prompt=16",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "env.reward_model.enabled=true",
    "env.reward_model.model_name=judge",
    "env.reward_model.precision=bfloat16",
    "cluster.gpus_per_node=1",
)


def scored_bytes(compiles, *changes):
    changes = [*changes, f"env.reward_model.compile={compiles}"]
    shapes = Shapes(reward_models=(SHAPE,))
    return phases(timed(*changes, shapes=shapes, base=ELEMENTWISE))["scoring"].shared.memory_bytes


def test_a_reward_models_own_setting_says_whether_its_layers_are_compiled():
    plain, compiled = scored_bytes("false"), scored_bytes("true")
    layers = layer_bytes(SHAPE, tokens=WORK.tokens, trains=False, recomputes=False)
    assert plain - compiled == pytest.approx((1 - COMPILED) * layers)
    assert scored_bytes("auto") == compiled
    # By default each of two replicas compiles, but not two ranks that divide the model.
    slots = "cluster.gpus_per_node=2"
    assert scored_bytes("auto", slots) == scored_bytes("true", slots) < scored_bytes("false", slots)
    divided = (slots, "env.reward_model.dtensor_cfg.tensor_parallel_size=2")
    assert scored_bytes("auto", *divided) == scored_bytes("false", *divided)


PARTS_OF_WAY = {"training": 3, "log-probs": 1, "scoring": 1}


@pytest.mark.filterwarnings("default")
@pytest.mark.slow_parameters("0.9G", "Llama")
@pytest.mark.parametrize("name", ["0.9G", "Qwen3-0.6B", "Llama-3-8B"])
def test_the_seconds_of_an_h100_are_those_of_the_counted_bytes(monkeypatch, name):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    counted = importlib.import_module("counted")
    shape = counted.LAYERS[name]
    h100 = device_named("H100")
    work = Workload(num_prompts=1, per_prompt=16, prompt_tokens=1024, completion_tokens=256)
    request = request_of(load_config(GRPORun, None, ELEMENTWISE).config)
    time = step_time(
        request,
        plan_run(request),
        Shapes(policy=shape, reward_models=(shape,)),
        workload=work,
        device=h100,
        efficiency=Efficiency(),
    )
    rate, products = h100.bandwidth * 0.7, h100.flops["bfloat16"] * 0.75
    attention = forward_operations(shape, work, has_logits=False).attention
    weights = shape.num_layers * shape.layer_parameters
    for way, passes in PARTS_OF_WAY.items():
        moved, _, operations = counted.layer(shape, way)
        moved *= shape.num_layers
        operations = operations * shape.num_layers + attention * (3.5 if passes == 3 else 1)
        if way == "scoring":  # reward models have the default, and compile their layers
            moved *= COMPILED
        else:
            bytes_of_head, head = counted.head_of(shape, trains=passes == 3)
            moved, operations = moved + bytes_of_head, operations + head
        if passes == 3:  # gradients are added up, then the optimizer reads and writes
            moved += 12 * weights + 28 * shape.num_parameters
        expected = moved / rate + operations / products
        assert phases(time)[way].shared.seconds == pytest.approx(expected, rel=0.2), way


def test_the_table_of_devices():
    for name, device in known_devices().items():
        assert device.source.startswith(f"NVIDIA {name} ")
        assert device.flops["bfloat16"] > device.flops["float32"] > device.bandwidth > device.link
    assert device_named("h100").memory == 80_000_000_000
    with pytest.raises(ConfigError, match="--device abacus: the peaks of A100, H100, H200"):
        device_named("abacus")


def test_a_shared_prompt_counts_once_unless_passes_divide_its_group():
    assert WORK.tokens == 3 * (5 + 2 * 4)
    assert WORK.padded().tokens == 3 * 2 * 9
    # Each conversation has 9 x 10 / 2 pairs, and the 15 of the prompt are shared by two.
    assert WORK.pairs == 3 * (2 * 45 - 15)
    assert WORK.padded().pairs == 3 * 2 * 45
    work = Workload(num_prompts=1, per_prompt=16, prompt_tokens=1024, completion_tokens=2048)
    assert work.divided(16384).copies == 3  # seven completions fit beside the prompt
    assert work.divided(1024 + 16 * 2048).copies == 1
    assert work.divided(2048).copies == 16
    assert work.divided(2048).tokens == work.padded().tokens


def test_what_completions_begin_with_alike_is_trained_once_and_drawn_for_each():
    alike = replace(WORK, alike_tokens=3)
    assert alike.shared().tokens == 3 * (5 + 3 + 2 * 1)
    assert alike.padded().tokens == WORK.padded().tokens
    plain, found = (phases(timed(work=one)) for one in (WORK, alike))
    for name, phase in found.items():
        assert phase.padded == plain[name].padded
        is_shared = name in ("training", "log-probs", "scoring")
        assert (phase.shared.seconds < plain[name].shared.seconds) == is_shared, name
    run = load_config(GRPORun, None, GRPO).config
    assert workload_of(run, alike_tokens=3) == replace(
        WORK, completion_tokens=4, prompt_tokens=5, alike_tokens=3
    )
    with pytest.raises(ConfigError, match="--alike-tokens"):
        workload_of(run, alike_tokens=4)


HEAD = decoder_shape(
    hidden_size=4,
    num_layers=2,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    vocab_size=10,
    has_language_head=False,
)


def test_parts_of_a_group_compute_their_prompt_twice():
    """A pass of 9 tokens has the prompt and one of two completions: 3 prompts of 5 tokens more."""
    whole = phases(timed("policy.train_micro_batch_size=9"))["training"].shared
    parts = phases(timed("policy.sequence_packing.train_mb_tokens=9"))["training"].shared
    prompts = replace(WORK, per_prompt=1, completion_tokens=0)
    again = forward_operations(SHAPE, prompts, has_logits=False).total
    assert parts.flops == pytest.approx(whole.flops + again)
    assert WORK.computed_before(13, joins_completions=False) is None
    assert WORK.computed_before(12, joins_completions=False) == prompts
    # All outputs first, where completions have one loss, or are longer than a part.
    assert WORK.computed_before(12, joins_completions=True) == WORK
    assert WORK.computed_before(3, joins_completions=False) == WORK


def test_a_group_is_divided_where_it_exceeds_the_share_of_a_rank():
    """Of 39 tokens over 6 ranks 7 are each one's: a completion with its prompt, in parts."""
    budget = "policy.sequence_packing.train_mb_tokens=4"
    few = phases(timed(budget, "cluster.gpus_per_node=3"))["training"].shared
    many = phases(timed(budget, "cluster.gpus_per_node=6"))["training"].shared
    assert few.flops * 3 < many.flops * 6
