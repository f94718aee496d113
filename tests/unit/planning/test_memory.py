import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import spread_work
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.data.forest import to_forest
from laurel.errors import ConfigError
from laurel.models.forest.attention import FOREST, ForestPlan, register
from laurel.models.forest.decoder import round_residual_stream
from laurel.models.loading.pretrained import recompute_activations
from laurel.planning import memory
from laurel.planning.memory import (
    RUNTIME_BYTES,
    Shapes,
    activation_bytes,
    decoder_shape,
    gathered_bytes,
    key_value_bytes,
    parse_bytes,
    parse_shape,
    training_memory,
)
from laurel.planning.plan import Mesh, TrainingRequest
from laurel.run.model import read_shapes
from laurel.types import TokenGroup
from parallel_runs import together
from planned import fitted as fit

GIB = 2**30
LLAMA_70B = (
    "hidden_size=8192,num_layers=80,intermediate_size=28672,num_heads=64,num_kv_heads=8,"
    "vocab_size=128256"
)
POLICY_70B = parse_shape(LLAMA_70B, has_language_head=True)
REWARD_70B = parse_shape(LLAMA_70B, has_language_head=False)
SMALL = decoder_shape(
    hidden_size=1024,
    num_layers=16,
    intermediate_size=4096,
    num_heads=16,
    num_kv_heads=8,
    vocab_size=32000,
)


def small_shape(num_layers, heads=(8, 2), **changes):
    """Of the networks that `saved_bytes` makes."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "head_dim": 32,
        "vocab_size": 64,
        "num_layers": num_layers,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
    }
    return decoder_shape(**{**sizes, **changes})


def kept_bytes(shape, tokens, compute_bytes, **changes):
    options = {
        "tp": 1,
        "recomputes": False,
        "sequence_parallel": False,
    }
    return activation_bytes(
        shape, tokens=tokens, compute_bytes=compute_bytes, **{**options, **changes}
    )


UNEVEN = decoder_shape(
    hidden_size=1536,
    num_layers=2,
    intermediate_size=8960,
    num_heads=12,
    num_kv_heads=2,
    vocab_size=1000,
)
FOUR_NODES = ("cluster.num_nodes=4", "cluster.gpus_per_node=8")


def phase(fitted, name):
    (found,) = [phase for phase in fitted.phases if phase.name == name]
    return found


def test_the_parameters_of_llama_70b():
    assert POLICY_70B.num_parameters == 70_553_706_496  # as published
    # without the language head (128256 x 8192), with one row of scores
    assert REWARD_70B.num_parameters == 70_553_706_496 - 128256 * 8192 + 8192
    assert REWARD_70B.layer_parameters == 855_654_400
    assert REWARD_70B.other_parameters == 128256 * 8192 + 2 * 8192


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_computed_parameters_are_those_of_the_network(kind):
    config = AutoConfig.for_model(
        kind,
        hidden_size=256,
        num_hidden_layers=3,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    head_norms = 3 * 2 * 32 if kind == "qwen3" else 0
    counted = sum(p.numel() for p in network.parameters())
    assert counted == small_shape(3).num_parameters + head_norms


def saved_bytes(kind, mode, *, layers, recomputes, heads=(8, 2), group=(96, 40, 4)):
    """Bytes that the layers of a real network keep for the backward pass of a forest.

    Args:
        kind: Of the network.
        mode: Dtype, or autocast.
        layers: How many.
        recomputes: Keep only the inputs of layers.
        heads: Of attention, and of keys and values.
        group: Tokens of the prompt and of each completion, and the number of completions.
    """
    config = AutoConfig.for_model(
        kind,
        hidden_size=256,
        num_hidden_layers=layers,
        intermediate_size=768,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=32,
        vocab_size=64,
    )
    network = AutoModelForCausalLM.from_config(config).model.train()
    register()
    network.set_attn_implementation(FOREST)
    round_residual_stream(network)
    if mode == "bfloat16":
        network = network.bfloat16()
    if recomputes:
        recompute_activations(network)
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    prompt, length, size = group
    ids = np.zeros(prompt + length, np.int32)
    branches = (ids[:length],) * size
    forest = to_forest([TokenGroup(id="", trunk_ids=ids[:prompt], branches_ids_G=branches)])
    casts = torch.autocast("cpu", dtype=torch.bfloat16) if mode == "autocast" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        network(
            input_ids=forest.ids_T[None],
            position_ids=forest.positions_T[None],
            use_cache=False,
            forest_plan=ForestPlan(forest.trees),
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_activations_are_those_that_a_real_network_keeps(kind, mode):
    width = 4 if mode == "float32" else 2
    shape = replace(
        small_shape(2),
        normalises_heads=kind == "qwen3",
        layer_parameters=256 * 32 * 2 * 10 + 3 * 256 * 768,
    )
    estimated = kept_bytes(shape, 256, width)
    if mode == "autocast":  # its copies of the weights, which are counted as `gathered`
        estimated += 2 * width * shape.layer_parameters
    more, fewer = (saved_bytes(kind, mode, layers=n, recomputes=False) for n in (4, 2))
    assert estimated == pytest.approx(more - fewer, rel=0.02)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("heads", "group"),
    [((8, 8), (512, 8, 2)), ((8, 2), (256, 16, 32)), ((8, 1), (64, 60, 8))],
    ids=["1:1, pairs", "4:1, groups", "8:1, long completions"],
)
def test_activations_of_a_forest(heads, group, recomputes):
    """By token the same, whatever the group and however many heads share keys."""
    prompt, length, size = group

    def estimated(layers):
        tokens = prompt + length * size
        return kept_bytes(small_shape(layers, heads), tokens, 4, recomputes=recomputes)

    more, fewer = (
        saved_bytes("llama", "float32", layers=n, recomputes=recomputes, heads=heads, group=group)
        for n in (6, 2)
    )
    assert estimated(6) - estimated(2) == pytest.approx(more - fewer, rel=0.1)


def test_tensor_parallel_ranks_divide_all_but_the_norms():
    # Norms: 2 x (4 + 2 x 2) x 1024 = 16384. Heads: 2 x 2 x (16 + 8) x 64 + 4 x 16 = 6208.
    # Feed-forward: 4 x 2 x 4096 = 32768.
    def one_layer(tp, **changes):
        return kept_bytes(SMALL, 1, 2, tp=tp, **changes) // 16

    assert one_layer(1) == 16384 + 6208 + 32768
    assert one_layer(4) == 16384 + (6208 + 32768) // 4
    # All ranks keep the results of the norms, 2 x 2 x 1024, of all tokens.
    assert one_layer(4, sequence_parallel=True) == 4096 + (12288 + 6208 + 32768) // 4


def test_keys_and_values():
    # 80 layers x 8 heads x 128 x 2 bytes, twice: 327,680 bytes of each token.
    assert key_value_bytes(POLICY_70B, Mesh(dp=1), compute_bytes=2) == 327_680
    assert key_value_bytes(POLICY_70B, Mesh(dp=1, tp=4, pp=2), compute_bytes=2) == 40_960
    assert key_value_bytes(POLICY_70B, Mesh(dp=1, tp=16), compute_bytes=2) == 40_960  # one head


def test_gathered_weights():
    count = SMALL.num_parameters

    def gathered(mesh):
        return gathered_bytes(SMALL, mesh, trained=count, compute_bytes=2)

    # one process: autocast's bfloat16 copy; shards: embeddings and head with their gradients and
    # their sums, in float32, and two layers, one layer's gradients in bfloat16 and float32
    assert gathered(Mesh(dp=1)) == 2 * count
    outside, layer = SMALL.other_parameters, SMALL.layer_parameters
    expected = 3 * 4 * outside + 2 * 2 * layer + 2 * layer + 4 * layer
    assert gathered(Mesh(dp=2)) == expected
    assert gathered(Mesh(dp=2, tp=2)) == expected // 2
    assert gathered(Mesh(dp=1, tp=2)) == expected // 2
    # 32,000 entries do not divide by 3: embeddings and head are whole on every rank
    layers = 2 * 2 * layer + 2 * layer + 4 * layer
    assert gathered(Mesh(dp=2, tp=3)) == 3 * 4 * outside + layers // 3
    training = TrainingRequest()
    parts = training_memory(training, SMALL, Mesh(dp=2, tp=3), tokens=8)
    assert parts["weights"] == 4 * (count + 2 * outside) // 6
    assert parts["logits"] == 3 * parts["logits"] // 3 == 12 * 8 * 32000
    assert training_memory(training, SMALL, Mesh(dp=3, tp=2), tokens=8)["logits"] == 12 * 8 * 16000


@pytest.mark.parametrize(
    ("generations", "budget", "nodes"), [(4, 512, 1), (4, 512, 2), (2, 4096, 1)]
)
def test_a_rank_has_a_part_of_a_group_and_the_path_above_it(generations, budget, nodes):
    """Keys and values in bfloat16, their gradients in float32, and the copy that joins them."""
    config = load_config(
        GRPORun,
        None,
        [
            "policy.max_total_sequence_length=2048",
            f"policy.sequence_packing.train_mb_tokens={budget}",
            f"grpo.num_generations_per_prompt={generations}",
            f"policy.train_global_batch_size={32 * generations}",
            f"cluster.num_nodes={nodes}",
        ],
    ).config
    fitted = fit(config, Shapes(policy=SMALL), device_memory=80 * GIB)
    parts = phase(fitted, "training").parts
    if budget < 2048 * generations:
        assert parts["path"] == 2048 * 16 * 2 * 8 * 64 * (2 + 4 + 2)
    else:
        assert "path" not in parts
    whole = activation_bytes(
        SMALL, tokens=1, tp=1, compute_bytes=2, recomputes=False, sequence_parallel=False
    )
    assert parts["activations"] == whole * budget
    mesh = Mesh(dp=1, cp=4, tp=2)  # of eight heads, each rank has one of all tokens
    spread = training_memory(TrainingRequest(), SMALL, mesh, tokens=8, path_tokens=2048)
    assert spread["path"] == 2048 * 16 * 2 * 1 * 64 * (2 + 4 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}])
def test_a_rank_holds_of_a_large_vocabulary_what_the_plan_says(sizes, monkeypatch):
    """151,936 entries: embedding and head are nearly all of the model, 39 MB each."""
    changes = {"vocab_size": 151936, "hidden_size": 64, "head_dim": 16}
    ranks = together(spread_work.peak_of_step, math.prod(sizes.values()), sizes, changes)
    shape = small_shape(2, (4, 2), intermediate_size=64, **changes)
    of_a_chunk = 4 * 151936 // sizes.get("tp", 1)
    monkeypatch.setattr(memory, "CHUNK_LOGITS", {"cpu": of_a_chunk, "cuda": of_a_chunk})
    training = TrainingRequest(precision="float32")
    mesh = Mesh(dp=sizes.get("dp_shard", 1), tp=sizes.get("tp", 1))
    parts = training_memory(training, shape, mesh, tokens=64)
    for found in ranks:
        assert found["held"] == pytest.approx(parts["weights"], rel=0.01)
        # The planner may say more than is taken; less by no more than what a process has besides.
        assert found["peak"] <= sum(parts.values()) + 24 * 2**20, parts
        assert found["peak"] >= 0.7 * sum(parts.values()), parts


def reward_training(*overrides):
    return load_config(RewardTrainingRun, None, [*FOUR_NODES, *overrides]).config


def test_a_70b_reward_model_trains_on_4_nodes_of_8_x_80_gib():
    config = reward_training(
        "policy.dtensor_cfg.tensor_parallel_size=8",
        "policy.dtensor_cfg.activation_checkpointing=true",
        "policy.dtensor_cfg.sequence_parallel=true",
    )
    fitted = fit(config, Shapes(policy=REWARD_70B), device_memory=80 * GIB)
    assert fitted.conflicts == ()
    assert fitted.plan.roles[0].mesh == Mesh(dp=4, tp=8)
    parts = phase(fitted, "training").parts
    # 69.5e9 parameters on 32 ranks: 4 bytes of weights, 4 of gradients, 8 of AdamW's states
    count = 69_503_041_536
    assert REWARD_70B.num_parameters == count
    assert parts["weights"] == parts["gradients"] == 4 * count // 32
    assert parts["optimizer"] == 8 * count // 32
    # a part of a pair of 2 x 8192 tokens: inputs of 80 layers in bfloat16, shared by 8, and one
    # layer whole; the path above it: keys and values of one of 8 heads in bfloat16, their
    # gradients, and one layer's copy
    tokens = 8192
    assert parts["path"] == tokens * 80 * 2 * 128 * (2 + 4) + tokens * 2 * 128 * 2
    one = 4 * 8192 + 12 * 8192 // 8 + (2 * 2 * 72 * 128 + 4 * 64 + 4 * 2 * 28672) // 8
    assert parts["activations"] == 80 * tokens * 8192 * 2 // 8 + tokens * one
    # embedding and final norm with their gradients and sums in float32; two layers in bfloat16,
    # one layer's gradients, and these in float32
    outside = 128256 * 8192 + 2 * 8192
    assert parts["gathered"] == 12 * outside // 8 + 10 * 855_654_400 // 8
    assert parts["runtime"] == RUNTIME_BYTES
    assert "logits" not in parts
    assert 36 * GIB < phase(fitted, "training").total < 42 * GIB


def test_what_does_not_fit_names_the_nearest_setting_that_does():
    config = reward_training("policy.dtensor_cfg.tensor_parallel_size=8")
    fitted = fit(config, Shapes(policy=REWARD_70B), device_memory=80 * GIB)
    assert not fitted.fits
    (conflict,) = fitted.conflicts
    assert "activations" in conflict.problem
    assert conflict.fix == "policy.dtensor_cfg.activation_checkpointing=true"
    config = reward_training("policy.dtensor_cfg.tensor_parallel_size=8", *conflict.fix.split())
    assert fit(config, Shapes(policy=REWARD_70B), device_memory=80 * GIB).fits
    hopeless = fit(reward_training(), Shapes(policy=REWARD_70B), device_memory=2 * GIB)
    assert hopeless.conflicts[-1].fix == (
        "more devices or larger ones, a smaller model, or shorter sequences"
    )


VLLM = "policy.generation.vllm_cfg"
IN_PROCESS = ("policy.generation.backend=transformers", "cluster.device=cpu")
JUDGE = "env.reward_model"


@pytest.mark.parametrize(
    ("phase_name", "overrides", "memory", "fix"),
    [
        # 24 GiB less 1.5 of runtime, 1.18 of weights, 0.59 of the reward model: 20.73 are 0.86
        (
            "generation",
            (f"{VLLM}.gpu_memory_utilization=0.9",),
            24,
            f"{VLLM}.gpu_memory_utilization=0.86",
        ),
        ("generation", IN_PROCESS, 9, "policy.generation.max_concurrent="),
        ("generation", IN_PROCESS[:1], 9, "policy.generation.max_concurrent=64"),
        (
            "judging",
            (
                "cluster.gpus_per_node=2",
                f"{JUDGE}.resources.gpus_per_node=1",
                f"{JUDGE}.precision=float32",
            ),
            3,
            f"{JUDGE}.precision=bfloat16",
        ),
        ("training", ("cluster.gpus_per_node=2", *IN_PROCESS), 4, "policy.dtensor_cfg."),
    ],
)
def test_with_the_setting_that_is_named_the_phase_fits(phase_name, overrides, memory, fix):
    def crowded(*changes):
        shapes = Shapes(policy=SMALL, reward_models=(SMALL,))
        found = fit(grpo(*overrides, *changes), shapes, device_memory=memory * GIB)
        return [m.fix for m in found.conflicts if m.problem.startswith(f"{phase_name} takes")]

    (named,) = crowded()
    assert named.startswith(fix)
    assert not crowded(*named.split())


def grpo(*overrides):
    judged = ["env.reward_model.enabled=true", "env.reward_model.model_name=judge"]
    return load_config(GRPORun, None, [*judged, *overrides]).config


def test_a_70b_reward_model_judges_on_one_of_4_nodes():
    shapes = Shapes(policy=SMALL, reward_models=(REWARD_70B,))
    overrides = (
        *FOUR_NODES,
        "env.reward_model.resources.gpus_per_node=8",
        "grpo.num_prompts_per_step=48",
        "policy.train_global_batch_size=768",
    )
    (conflict,) = fit(grpo(*overrides), shapes, device_memory=80 * GIB).conflicts
    assert "judging takes" in conflict.problem
    assert conflict.fix == "env.reward_model.dtensor_cfg.tensor_parallel_size=2"
    divided = ("env.reward_model.dtensor_cfg.tensor_parallel_size=4",)
    fitted = fit(grpo(*overrides, *divided), shapes, device_memory=80 * GIB)
    assert fitted.conflicts == ()
    judging = phase(fitted, "judging")
    assert judging.slots_of == "reward_model"
    # the shards, and embedding and norm, which stay gathered
    outside = 128256 * 8192 + 2 * 8192
    assert judging.parts["weights"] == 2 * 69_503_041_536 // 4 + 2 * (outside // 4)
    assert 32 * GIB < judging.total < 40 * GIB


def test_each_of_several_reward_models_takes_its_own_of_every_device():
    models = "{name: a, model_name: x}, {name: b, model_name: y}"
    config = load_config(
        GRPORun,
        None,
        [
            f"env.reward_model.models=[{models}]",
            "env.reward_model.precision=float32",
            "env.reward_model.enabled=true",
            "cluster.gpus_per_node=2",
            "env.reward_model.resources.gpus_per_node=1",
        ],
    ).config
    count = SMALL.num_parameters
    judging = phase(fit(config, Shapes(policy=SMALL, reward_models=(SMALL, SMALL))), "judging")
    assert judging.parts["weights"] == 2 * 4 * count
    assert "judging" not in {p.name for p in fit(config, Shapes(policy=SMALL)).phases}


def test_colocated_roles_take_turns():
    fitted = fit(
        grpo("cluster.gpus_per_node=2"),
        Shapes(policy=SMALL, reward_models=(SMALL,)),
        device_memory=80 * GIB,
    )
    training, generation, judging = fitted.phases
    assert (training.name, generation.name, judging.name) == ("training", "generation", "judging")
    assert {p.slots_of for p in fitted.phases} == {"policy"}
    assert "keys and values" not in training.parts
    assert "activations" not in generation.parts
    assert "optimizer" not in generation.parts  # with vLLM it goes to the host
    assert all("reward model" in p.parts for p in fitted.phases)
    # vLLM takes 0.6 of the device for its weights and its keys and values together
    taken = generation.parts["engine's weights"] + generation.parts["keys and values"]
    assert taken == int(0.6 * 80 * GIB)


def served(*overrides):
    server = "{model_name: m, arguments: [--gpu-memory-utilization=0.3, --dtype, float32]}"
    section = f"env.reward_model={{enabled: true, function: {{path: a:b}}, server: {server}}}"
    config = load_config(GRPORun, None, [section, *overrides]).config
    fitted = fit(config, Shapes(policy=SMALL, served=SMALL), device_memory=80 * GIB)
    return {(one.name, one.slots_of): one.parts for one in fitted.phases}


def test_a_served_model_takes_its_share_while_it_is_awake():
    weights = 4 * SMALL.num_parameters
    awake = {"served model": weights, "its keys and values": int(0.3 * 80 * GIB) - weights}
    beside = {"served model's runtime": RUNTIME_BYTES}

    def of_served(parts):
        return {n: size for n, size in parts.items() if n in awake or n in beside}

    parts = served("policy.generation.backend=vllm")
    assert [name for name, _ in parts] == ["training", "generation", "judging"]
    for name, expected in (("training", {}), ("generation", {}), ("judging", awake)):
        assert of_served(parts[name, "policy"]) == {**expected, **beside}
    # Nothing of the engine that samples, which sleeps, and of the learner what it hands over.
    assert set(parts["judging", "policy"]) == {"weights", "runtime", *awake, *beside}
    correction = "loss_fn.use_importance_sampling_correction=true"
    ahead = served("grpo.max_staleness=1", correction)
    assert {name for name, _ in ahead} == {"training", "generation"}
    assert all(of_served(one) == {**awake, **beside} for one in ahead.values())
    own = served("env.reward_model.server.resources.gpus_per_node=1", "cluster.gpus_per_node=2")
    assert own["judging", "reward_model"] == {**awake, "runtime": RUNTIME_BYTES}
    assert not of_served(own["training", "policy"])


def test_the_share_of_a_served_model_that_fits_is_named():
    def conflicts(share):
        server = (
            f"{{model_name: m, arguments: [--max-model-len=64, --gpu-memory-utilization={share}]}}"
        )
        section = f"{{enabled: true, function: {{path: a:b}}, server: {server}}}"
        config = load_config(GRPORun, None, [f"env.reward_model={section}"]).config
        return fit(config, Shapes(policy=SMALL, served=SMALL), device_memory=80 * GIB).conflicts

    (conflict,) = conflicts("0.95")
    key, _, value = conflict.fix.partition("=")
    assert key == "env.reward_model.server.arguments"
    kept, share = value.strip("[]").split(",")
    assert kept == "--max-model-len=64"
    assert not conflicts(share.partition("=")[2])
    assert conflicts(f"{float(share.partition('=')[2]) + 0.01:g}")


def test_of_a_served_model_of_unknown_size_the_share_counts():
    section = "{enabled: true, function: {path: a:b}, server: {model_name: none/there}}"
    config = load_config(GRPORun, None, [f"env.reward_model={section}"]).config
    read = read_shapes(config, policy_shape=LLAMA_70B)
    assert "env.reward_model.server.model_name" in read.unknown["reward_model"]
    fitted = fit(config, read.shapes, device_memory=80 * GIB)
    assert phase(fitted, "judging").parts["its keys and values"] == int(0.9 * 80 * GIB)
    told = read_shapes(config, policy_shape=LLAMA_70B, reward_shape=LLAMA_70B)
    assert told.shapes.served == POLICY_70B
    assert not told.unknown


def test_a_teacher_is_kept_in_float32_divided_as_the_policy():
    changes = ("cluster.gpus_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2")
    alone = Shapes(policy=SMALL, reward_models=(SMALL,))
    taught = replace(alone, teacher=POLICY_70B)
    parts = {p.name: p.parts for p in fit(grpo(*changes), taught).phases}
    without = {p.name: p.parts for p in fit(grpo(*changes), alone).phases}
    teacher = {"teacher": 4 * POLICY_70B.num_parameters // 2}
    assert parts["training"] == {**without["training"], **teacher}
    assert parts["judging"] == {**without["judging"], **teacher}
    assert parts["generation"] == without["generation"], "with vLLM it goes to the host"
    # An engine in process leaves it where it is.
    (here,) = [
        p.parts["teacher"] for p in fit(grpo(*IN_PROCESS), taught).phases if p.name == "generation"
    ]
    assert here == 4 * POLICY_70B.num_parameters


def test_in_process_generation_needs_a_second_copy_only_in_a_lower_precision():
    kept = "keys and values between turns"
    turns = ("grpo.max_rollout_turns=8", "policy.generation.conversation_cache_gib=0.5")
    ahead = ("grpo.max_staleness=1", "loss_fn.use_importance_sampling_correction=true")
    parts = generated(*IN_PROCESS)
    assert set(parts) == {"weights", "optimizer", "reference", "keys and values", "rounded weights"}
    assert parts["rounded weights"] == parts["weights"] // 2  # bfloat16
    assert "rounded weights" not in generated(*IN_PROCESS, "policy.precision=float32")
    # 256 side by side x 512 tokens x 16 layers x 8 heads x 64 x 2 bytes, twice
    assert parts["keys and values"] == 256 * 512 * 2 * 16 * 8 * 64 * 2
    # Conversations between their turns take memory too.
    for settings in (IN_PROCESS, (*IN_PROCESS, *ahead)):
        assert generated(*settings, *turns)[kept] == GIB // 2
    for settings in ((*IN_PROCESS, turns[1]), turns):  # one turn; vLLM
        assert kept not in generated(*settings)


def test_static_slots_are_counted_by_powers_of_two():
    odd = ("policy.generation.max_concurrent=100", "policy.max_total_sequence_length=300")
    slots = "policy.generation.transformers_cfg.static_slots"
    token = 2 * 16 * 8 * 64 * 2
    assert generated(*IN_PROCESS, *odd)["keys and values"] == 100 * 300 * token
    static = generated(*IN_PROCESS, *odd, f"{slots}=true")
    assert static["keys and values"] == 128 * 512 * token
    on_gpu = generated("policy.generation.backend=transformers", *odd)  # auto
    assert on_gpu["keys and values"] == 128 * 512 * token


def test_heads_that_tensor_parallel_ranks_cannot_share():
    config = grpo(
        "cluster.gpus_per_node=8",
        "policy.dtensor_cfg.tensor_parallel_size=8",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
    )
    (conflict,) = fit(config, Shapes(policy=UNEVEN)).conflicts
    assert "12 attention heads nor the 2 key/value heads" in conflict.problem
    assert conflict.fix == "policy.dtensor_cfg.tensor_parallel_size=2"
    # vLLM repeats key and value heads: 2 on 4 ranks is no conflict, and 4 is nearest to 8
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    (conflict,) = fit(grpo("cluster.gpus_per_node=8", f"{key}=8"), Shapes(policy=UNEVEN)).conflicts
    assert conflict.fix == f"{key}=4"


def test_heads_that_context_parallel_ranks_cannot_share():
    spread = (
        "cluster.gpus_per_node=16",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.generation.backend=transformers",
    )
    key = "policy.dtensor_cfg.context_parallel_size"
    (conflict,) = fit(grpo(*spread, f"{key}=4"), Shapes(policy=UNEVEN)).conflicts
    assert "=4 does not divide the 6 attention heads that a rank of policy has" in conflict.problem
    assert conflict.fix == f"{key}=2"
    # Two heads of keys on one rank: copies for three ranks would do, but 16 slots are no 2 x 3.
    divided = fit(grpo(*spread, f"{key}=2"), Shapes(policy=UNEVEN))
    assert not divided.conflicts
    whole = fit(grpo(*spread), Shapes(policy=UNEVEN))
    parts, before = phase(divided, "training").parts, phase(whole, "training").parts
    tokens = divided.plan.batch("policy").tokens
    assert parts["whole row"] == 2 * 4 * tokens * 1536
    assert "whole row" not in before
    assert parts["activations"] == pytest.approx(before["activations"] / 2, rel=0.01)
    assert parts["weights"] == before["weights"], "shared out over dp x cp"


def test_adapters_need_no_gradients_of_what_is_frozen():
    lora = "policy.dtensor_cfg.lora_cfg"
    config = reward_training(f"{lora}.enabled=true", f"{lora}.target_modules=[q_proj, v_proj]")
    parts = phase(fit(config, Shapes(policy=REWARD_70B)), "training").parts
    # rank 8: 80 layers x 8 x ((8192 + 8192) + (8192 + 1024)) = 16,384,000
    assert parts["gradients"] == 4 * 16_384_000 // 32
    assert parts["optimizer"] == 8 * 16_384_000 // 32


def generated(*overrides):
    """The parts of memory in generation."""
    return phase(fit(grpo(*overrides), Shapes(policy=SMALL)), "generation").parts


def test_amounts_and_shapes_are_read():
    assert parse_bytes("80GiB") == 80 * GIB
    assert parse_bytes("141GB") == 141 * 10**9
    assert parse_bytes("1.5 gib") == 3 * GIB // 2
    assert parse_bytes("4096") == 4096
    for bad in ("", "GiB", "-3GiB", "nanGiB", "infGB", "8 giraffes"):
        with pytest.raises(ConfigError):
            parse_bytes(bad)
    for bad in ("hidden=3", "hidden_size=8192", "hidden_size=x,num_layers=1", "hidden_size=-1"):
        with pytest.raises(ConfigError):
            parse_shape(bad, has_language_head=True)
