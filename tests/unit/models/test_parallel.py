"""A model spread over processes gives the numbers of one process, and each holds its share."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import parallel_work
import threads
import tiny
from laurel.data.forest import to_forest
from laurel.errors import ConfigError
from laurel.models.parallel.tensor import (
    decoder_layers,
    tensor_plan,
    token_styles,
    vocabulary_layers,
)
from laurel.models.spec import ParallelShape
from parallel_runs import RankError, together

pytestmark = pytest.mark.slow_parameters(
    "tp=2, other models", "dp_shard=2 tp=2", "cp=2 tp=2", "cp=4", "dp_replicate=2"
)

ALL = {"shares_tokens": True, "recomputes": True, "lora": True}
REWARDS, GEMMA3 = ("reward", "qwen3", {}), ("policy", "gemma3", ALL)
ODD = {"vocab_size": 302, "pad_token_id": 200}
"""151 rows for a rank of tp, which dp divides unevenly; the second rank has that of padding."""
DEEP = {"dialogues": True, "least_shared": 16}
"""Trees of any depth, whose steps are those of sequences that share prompts alone."""
RUNS = {
    "tp=2": [REWARDS, ("policy", "phi", {"shares_tokens": True}), GEMMA3],
    "tp=2, other models": [
        ("reward", "qwen3", {"shares_tokens": True, "recomputes": True, **DEEP}),
        ("reward", "llama", {"changes": ODD}),
        ("policy", "gemma2-capped", {}),
        ("policy", "cohere", {}),
    ],
    "dp_shard=2 tp=2": [
        GEMMA3,
        ("policy", "qwen3-tied", {"changes": ODD}),
        ("policy", "qwen3", {"changes": {"vocab_size": 301}, "lora": True}),  # no rank divides it
    ],
    "dp_replicate=2": [("policy", "qwen3-tied", {"lora": True})],
    "cp=2": [
        REWARDS,
        ("policy", "gemma2", {}),
        ("policy", "llama", {"recomputes": True, "lora": True, **DEEP}),
    ],
    "cp=2 tp=2": [GEMMA3],
    # More ranks than heads of keys; the logits of sinks go with their heads.
    "cp=4": [("policy", "gpt-oss", {})],
}


one_thread_of_module = threads.one_thread_of_module


def alone(kind, name, options):
    return parallel_work.alone(kind, name, {**options, "least_shared": None})


def relative(found, wanted):
    """Largest over the tensors: norm of the difference over the norm."""
    assert found.keys() == wanted.keys()
    # A bias of keys moves all logits of a softmax alike: its gradient is nothing but rounding.
    kept = [name for name in wanted if wanted[name].norm() > 1e-6]
    assert len(kept) > len(wanted) // 2
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in kept)


def outputs_of_groups(kind, outputs, groups):
    """Of all outputs those of some groups: two scores each, or log-probabilities of completions."""
    shapes = [branches for _, branches in parallel_work.SHAPES]
    parts = outputs.split([sum(branches) if kind == "policy" else 2 for branches in shapes])
    return torch.cat([parts[group] for group in groups])


@pytest.mark.parametrize("name", RUNS)
def test_steps_over_ranks_are_those_of_one_process(name):
    sizes = {key: int(n) for key, n in (s.split("=") for s in name.split(",")[0].split())}
    places = ParallelShape(**sizes).dp
    ranks = together(parallel_work.spread, math.prod(sizes.values()), sizes, RUNS[name])
    for number, case in enumerate(RUNS[name]):
        wanted = alone(*case)
        assert min(wanted["norms"]) > parallel_work.LIMIT, "clipping has to do something"
        assert wanted["losses"][0] != pytest.approx(wanted["losses"][1], abs=1e-3)
        for found in (rank[number] for rank in ranks):
            outputs = wanted["outputs"]
            if places > 1:
                mine = range(found["place"], len(parallel_work.SHAPES), places)
                outputs = outputs_of_groups(case[0], outputs, mine)
            torch.testing.assert_close(found["outputs"], outputs, rtol=0, atol=1e-5)
            assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
            assert relative(found["gradients"], wanted["gradients"]) <= 1e-5
            assert relative(found["weights"], wanted["weights"]) <= 1e-5
            for key, weight in ranks[0][number]["weights"].items():
                assert torch.equal(found["weights"][key], weight), key


def test_one_rank_computes_the_very_same_bits():
    cases = [REWARDS, GEMMA3]
    (found,) = together(parallel_work.spread, 1, {}, cases)
    for one, case in zip(found, cases, strict=True):
        wanted = alone(*case)
        assert torch.equal(one["outputs"], wanted["outputs"])
        assert one["losses"] == wanted["losses"]
        assert one["norms"] == wanted["norms"]
        for kind in ("gradients", "weights"):
            assert one[kind].keys() == wanted[kind].keys()
            for name, tensor in wanted[kind].items():
                assert torch.equal(one[kind][name], tensor), (kind, name)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7}, {"softcap": 1.5, "temperature": 0.7, "logit_scale": 0.5}]
)
def test_a_divided_head_gives_what_a_whole_one_gives(how):
    wanted = parallel_work.of_divided_logits(how, 1)
    for found in together(parallel_work.of_divided_logits, 3, how, 3):
        for name in ("logprobs", "entropy", "hidden", "logits"):
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-13)
        for name in ("weight", "bias"):
            expected = wanted[name][found["mine"]]
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-13)


def test_what_is_not_divided_by_vocabulary():
    assert vocabulary_layers(tiny.tiny_language_model("qwen3"), 2) == [
        "model.embed_tokens",
        "lm_head",
    ]
    assert vocabulary_layers(tiny.tiny_language_model("qwen3"), 7) == []  # 300 does not divide
    assert vocabulary_layers(tiny.tiny_classifier("gemma3"), 2) == ["model.embed_tokens"]
    tied = tiny.tiny_language_model("qwen3-tied")

    class Doubled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 2 + 1  # of which the sum over ranks is another

    tied.model.embed_tokens.__class__ = Doubled
    assert vocabulary_layers(tied, 2) == []


@pytest.mark.slow
def test_padded_rows_are_those_of_one_process_where_tokens_are_divided():
    options = {"shares_tokens": True}
    wanted = parallel_work.of_rows(None, "gemma2", options)
    for found in together(parallel_work.of_rows, 2, {"tp": 2}, "gemma2", options):
        torch.testing.assert_close(found["outputs"], wanted["outputs"], rtol=0, atol=1e-5)
        assert relative(found["gradients"], wanted["gradients"]) <= 1e-5


def test_divided_tokens_keep_less_for_the_backward_pass():
    cases = [
        (layers, {"shares_tokens": shares, "recomputes": recomputes})
        for recomputes in (False, True)
        for shares in (False, True)
        for layers in (2, 1)
    ]
    # Of 257 tokens, width 64, float32: two norms keep their input and what they have normalised,
    # and one rank of two has 129 tokens of them. Recomputed layers keep their input.
    one = (257 - 129) * 64 * 4
    for kept in together(parallel_work.kept_bytes, 2, {"tp": 2}, cases):
        by_layers = torch.tensor(kept).reshape(2, 2, 2)
        of_one = by_layers[..., 0] - by_layers[..., 1]
        saved = of_one[:, 0] - of_one[:, 1]
        assert saved.tolist() == pytest.approx([2 * 2 * one, one], rel=0.02)


@pytest.mark.slow
def test_a_divided_context_keeps_its_share_for_the_backward_pass():
    """Of every layer's tensors, and with recomputation of its input, a rank has half the tokens.

    Attention's result it has twice: of all tokens and half the heads, as the kernel gave it, and
    the other way round, as the next layer reads it. In one process the two are one.
    """
    cases = [(layers, {"recomputes": recomputes}) for recomputes in (0, 1) for layers in (2, 1)]
    (alone,) = together(parallel_work.kept_bytes, 1, {}, cases)
    for kept in together(parallel_work.kept_bytes, 2, {"cp": 2}, cases):
        of_one_layer = -torch.tensor([alone, kept]).reshape(2, 2, 2).diff(dim=2)[..., 0]
        twice = 257 * 64 * 4 // 2
        of_one_layer[1, 0] -= twice
        shares = of_one_layer[1] / of_one_layer[0]
        assert shares.tolist() == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.parametrize(
    ("network", "plan", "said"),
    [
        (
            tiny.tiny_language_model("qwen3"),
            "parallel_work.mlp_plan",
            "sequence_parallel=true: model.layers.0.self_attn.q_proj, a Linear, is not split",
        ),
        (
            tiny.tiny_language_model("qwen3"),
            {
                "model.layers.*.[qkvgu]*_proj": "colwise",
                "model.layers.*.[od]*_proj": "rowwise",
            },
            "layers.0.self_attn.q_norm, a Qwen3RMSNorm, is not split",
        ),
        (
            AutoModelForCausalLM.from_config(
                AutoConfig.for_model(
                    "opt",
                    hidden_size=32,
                    ffn_dim=64,
                    num_attention_heads=4,
                    num_hidden_layers=2,
                    vocab_size=300,
                    word_embed_proj_dim=32,
                )
            ),
            None,
            "model.decoder.layers.0 splits linear layers that are in no block",
        ),
    ],
    ids=["attention", "norm", "layer"],
)
def test_layers_that_cannot_work_on_shares_of_tokens_are_refused(network, plan, said):
    with pytest.raises(ConfigError, match=said):
        token_styles(network, tensor_plan(network, 2, plan))


def test_ranks_agree_on_sums():
    assert together(parallel_work.agree, 4, {"dp_shard": 2, "tp": 2}, [1.5, -2.0]) == [-0.5] * 4
    both = together(parallel_work.agree, 2, {"dp_replicate": 2}, [1.0, math.nan])
    assert all(math.isnan(total) for total in both)


def test_bfloat16_is_that_of_one_process_and_gradients_are_float32():
    model = tiny.tiny_reward_model("qwen3", std=0.05, seed=1, precision=torch.bfloat16)
    wanted = model(to_forest(tiny.random_groups(5, parallel_work.SHAPES))).detach()
    (found,) = together(parallel_work.half_way, 1, {})
    assert torch.equal(found["autocast"]["scores"], wanted)
    # Weights of norms are rounded too, by at most one part in 256.
    torch.testing.assert_close(found["gathered"]["scores"], wanted, rtol=0.02, atol=2e-3)
    for way in found.values():
        assert way["kinds"] == {(torch.float32, torch.float32)}
        # So the planner counts the stream between layers (`planning/memory.py`).
        assert way["streams"] == {torch.bfloat16}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3", "phi"])
def test_a_plan_is_derived_for_every_linear_layer_of_the_decoder(name):
    network = tiny.tiny_language_model(name)
    plan = tensor_plan(network, 2)
    _, layers = decoder_layers(network)
    linear = sum(isinstance(module, nn.Linear) for module in layers.modules())
    assert sum(split != "per_head" for split in plan.values()) == linear
    has_norms = any("q_norm" in module for module, _ in network.named_modules())
    assert ("per_head" in plan.values()) == has_norms


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("phi3", "layers.0.self_attn.qkv_proj is several projections in one matrix"),
        ("olmo2", "layers.0.self_attn.q_norm is a norm over several heads"),
        ("gpt-oss", "layers.0.self_attn.sinks is a weight of the attention itself"),
    ],
)
def test_what_no_plan_can_be_derived_for_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        tensor_plan(tiny.tiny_language_model(name), 2)


def test_heads_and_neurons_are_not_cut_in_two():
    network = tiny.tiny_language_model("llama")  # 4 heads, 2 of keys and values, 64 neurons
    with pytest.raises(ConfigError, match=r"=4 does not divide the 2 heads in k_proj.* 1 or 2"):
        tensor_plan(network, 4)
    with pytest.raises(ConfigError, match=r"=3 does not divide the 4 heads in q_proj.* 1 or 2"):
        tensor_plan(network, 3)


def test_a_plan_of_ones_own():
    network = tiny.tiny_language_model("qwen3")
    plan = tensor_plan(network, 2, {"model.layers.*.mlp.up_proj": "colwise"})
    assert plan == {f"model.layers.{i}.mlp.up_proj": "colwise" for i in range(3)}
    assert tensor_plan(network, 2, "parallel_work.mlp_plan") == {
        f"model.layers.{i}.mlp.{name}_proj": split
        for i in range(3)
        for name, split in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
    }


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"model.layers.*.mlp.upproj": "colwise"},
            r"no module.*Did you mean model.layers.\*.mlp.up",
        ),
        ({"model.layers.0.mlp.up_proj": "columns"}, "'columns' is none of colwise, rowwise"),
        ({"lm_head": "colwise"}, "lm_head is outside model.layers"),
        ({"model.layers.*.self_attn.q_norm": "colwise"}, "colwise is for a linear layer"),
        ("parallel_work.nothing", "parallel_work has no 'nothing'"),
        ("parallel_work.SHAPES", "gives a list"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan, said):
    with pytest.raises(ConfigError, match=said):
        tensor_plan(tiny.tiny_language_model("qwen3"), 2, plan)


def test_meshes():
    with pytest.raises(ConfigError, match="tp=0"):
        ParallelShape(tp=0)
    with pytest.raises(RankError, match="needs 2 processes and 1"):
        together(parallel_work.agree, 1, {"tp": 2}, [1.0])


def test_what_cannot_be_spread_is_refused():
    (said,) = together(parallel_work.spread_twice, 1)
    assert "spread over ranks already" in said
    with pytest.raises(ConfigError, match="Linear has no list of layers"):
        decoder_layers(nn.Linear(1, 1))
