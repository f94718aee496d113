"""A model spread over processes gives the numbers of one process, and each holds its share."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import parallel_work
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
    "dp_shard=2 tp=2", "cp=2 tp=2", "dp_shard=2 cp=2", "dp_replicate=2"
)

CASES = [
    ("reward", "qwen3", {}),
    ("policy", "gemma2", {}),
    ("policy", "llama", {"recomputes": True}),
    ("policy", "qwen3-tied", {"lora": True}),
    ("reward", "phi", {"shares_tokens": True}),
    ("policy", "qwen3", {"shares_tokens": True, "recomputes": True}),
    ("policy", "gemma3", {"shares_tokens": True, "recomputes": True, "lora": True}),
]
OF_PRODUCTS = (0, 1, 3, 6)
"""Cases of meshes of two dimensions: each kind of model, and each option."""
SIZES = [
    {"tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2},
    {"cp": 2},
    {"dp_shard": 2, "cp": 2},
    {"cp": 2, "tp": 2},
]


def name_of(sizes):
    return " ".join(f"{key}={value}" for key, value in sizes.items())


@pytest.fixture(scope="module")
def one_process():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield [parallel_work.alone(*case) for case in CASES]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=SIZES, ids=name_of)
def run(request):
    sizes = request.param
    chosen = range(len(CASES)) if len(sizes) == 1 else OF_PRODUCTS
    cases = [CASES[number] for number in chosen]
    ranks = together(parallel_work.spread, math.prod(sizes.values()), sizes, cases)
    return sizes, [dict(zip(chosen, rank, strict=True)) for rank in ranks]


def relative(found, wanted):
    """Largest over the tensors: norm of the difference over the norm."""
    assert found.keys() == wanted.keys()
    # A bias of keys moves all logits of a softmax alike: its gradient is nothing but rounding.
    kept = [name for name in wanted if wanted[name].norm() > 1e-6]
    assert len(kept) > len(wanted) // 2
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in kept)


def test_scores_and_log_probabilities_are_those_of_one_process(run, one_process):
    sizes, ranks = run
    places = ParallelShape(**sizes).dp
    for case in ranks[0]:
        kind = CASES[case][0]
        wanted = split_by_group(kind, one_process[case]["outputs"], range(4))
        for found in (rank[case] for rank in ranks):
            mine = range(4)[found["place"] :: places]
            for group, values in zip(
                mine, split_by_group(kind, found["outputs"], mine), strict=True
            ):
                torch.testing.assert_close(values, wanted[group], rtol=0, atol=1e-5)


def split_by_group(kind, outputs, groups):
    """The outputs of each group: two scores, or the log-probabilities of its completions."""
    shapes = [parallel_work.SHAPES[group] for group in groups]
    sizes = [sum(branches) if kind == "policy" else 2 for _, branches in shapes]
    return outputs.split(sizes)


def test_losses_gradients_and_steps_are_those_of_one_process(run, one_process):
    _, ranks = run
    for case in ranks[0]:
        wanted = one_process[case]
        for found in (rank[case] for rank in ranks):
            assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
            assert relative(found["gradients"], wanted["gradients"]) <= 1e-5
            assert relative(found["weights"], wanted["weights"]) <= 1e-5
    assert one_process[0]["losses"][0] != pytest.approx(one_process[0]["losses"][1], abs=1e-3)


def test_the_norm_of_the_gradient_is_that_of_one_process(run, one_process):
    _, ranks = run
    for case in ranks[0]:
        wanted = one_process[case]
        assert min(wanted["norms"]) > parallel_work.LIMIT, "clipping has to do something"
        for found in (rank[case] for rank in ranks):
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


def test_all_ranks_hold_the_very_same_weights(run):
    _, ranks = run
    for case in ranks[0]:
        for found in ranks[1:]:
            for name, weight in ranks[0][case]["weights"].items():
                assert torch.equal(found[case]["weights"][name], weight), name


def test_one_rank_computes_the_very_same_bits(one_process):
    (found,) = together(parallel_work.spread, 1, {}, CASES)
    for case, wanted in enumerate(one_process):
        assert torch.equal(found[case]["outputs"], wanted["outputs"])
        assert found[case]["losses"] == wanted["losses"]
        assert found[case]["norms"] == wanted["norms"]
        for kind in ("gradients", "weights"):
            assert found[case][kind].keys() == wanted[kind].keys()
            for name, tensor in wanted[kind].items():
                assert torch.equal(found[case][kind][name], tensor), (kind, name)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}], ids=name_of)
def test_deep_trees_over_ranks_take_the_steps_of_sequences_that_share_prompts_alone(sizes):
    cases = [
        ("reward", "qwen3", {"dialogues": True, "shares_tokens": True}),
        ("policy", "llama", {"dialogues": True, "recomputes": True, "lora": True}),
    ]
    deep = [(kind, name, {**options, "least_shared": 16}) for kind, name, options in cases]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [parallel_work.alone(*case) for case in cases]
    torch.set_num_threads(threads)
    ranks = together(parallel_work.spread, 2, sizes, deep)
    for case, wanted in enumerate(alone):
        for found in (rank[case] for rank in ranks):
            assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
            assert relative(found["gradients"], wanted["gradients"]) <= 1e-5
            assert relative(found["weights"], wanted["weights"]) <= 1e-5


ODD_VOCABULARIES = [
    ("policy", "qwen3", {"changes": {"vocab_size": 302}}),  # 151 for a rank of tp, odd over dp
    ("policy", "qwen3-tied", {"changes": {"vocab_size": 302, "pad_token_id": 200}}),
    ("reward", "llama", {"changes": {"vocab_size": 302, "pad_token_id": 200}}),
    ("policy", "qwen3", {"changes": {"vocab_size": 301}}),  # does not divide: whole
    ("policy", "phi", {}),  # its head has a bias
    ("policy", "gemma2-capped", {}),
    ("policy", "granite", {}),
    ("policy", "cohere", {}),
]


@pytest.mark.slow
def test_vocabularies_of_all_kinds_are_those_of_one_process():
    sizes = {"dp_shard": 2, "tp": 2}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [parallel_work.alone(*case) for case in ODD_VOCABULARIES]
    torch.set_num_threads(threads)
    ranks = together(parallel_work.spread, math.prod(sizes.values()), sizes, ODD_VOCABULARIES)
    places = ParallelShape(**sizes).dp
    for case, wanted in enumerate(alone):
        kind = ODD_VOCABULARIES[case][0]
        by_group = split_by_group(kind, wanted["outputs"], range(4))
        for found in (rank[case] for rank in ranks):
            mine = range(4)[found["place"] :: places]
            outputs = torch.cat([by_group[group] for group in mine])
            torch.testing.assert_close(found["outputs"], outputs, rtol=0, atol=1e-5)
            assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
            assert relative(found["gradients"], wanted["gradients"]) <= 1e-5
            assert relative(found["weights"], wanted["weights"]) <= 1e-5
            for name, weight in ranks[0][case]["weights"].items():
                assert torch.equal(found["weights"][name], weight), name


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
        for layers in (4, 2)
    ]
    # Of 257 tokens, width 64, float32, two layers: two norms keep their input and what they have
    # normalised, and one rank of two has 129 tokens of them. Recomputed layers keep their input.
    one = (257 - 129) * 2 * 64 * 4
    for kept in together(parallel_work.kept_bytes, 2, {"tp": 2}, cases):
        by_layers = torch.tensor(kept).reshape(2, 2, 2)
        of_two = by_layers[..., 0] - by_layers[..., 1]
        saved = of_two[:, 0] - of_two[:, 1]
        assert saved.tolist() == pytest.approx([2 * 2 * one, one], rel=0.02)


@pytest.mark.slow
def test_a_divided_context_keeps_its_share_for_the_backward_pass():
    """Of every layer's tensors, and with recomputation of its input, a rank has half the tokens.

    Attention's result it has twice: of all tokens and half the heads, as the kernel gave it, and
    the other way round, as the next layer reads it. In one process the two are one.
    """
    cases = [(layers, {"recomputes": recomputes}) for recomputes in (0, 1) for layers in (4, 2)]
    (alone,) = together(parallel_work.kept_bytes, 1, {}, cases)
    for kept in together(parallel_work.kept_bytes, 2, {"cp": 2}, cases):
        of_two_layers = -torch.tensor([alone, kept]).reshape(2, 2, 2).diff(dim=2)[..., 0]
        twice = 2 * 257 * 64 * 4 // 2
        of_two_layers[1, 0] -= twice
        shares = of_two_layers[1] / of_two_layers[0]
        assert shares.tolist() == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_more_ranks_than_heads_of_keys_and_sinks_of_attention(name):
    """Four ranks, four heads, two heads of keys and values; logits of sinks go with their heads."""
    case = ("policy", name, {})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wanted = parallel_work.alone(*case)
    torch.set_num_threads(threads)
    for (found,) in together(parallel_work.spread, 4, {"cp": 4}, [case]):
        torch.testing.assert_close(found["outputs"], wanted["outputs"], rtol=0, atol=1e-5)
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert relative(found["gradients"], wanted["gradients"]) <= 1e-5


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
