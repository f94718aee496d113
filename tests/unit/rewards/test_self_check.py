"""The self-check passes every model that is right, and refuses each planted fault."""

import pytest
import torch
from torch import nn

import tiny
from laurel.errors import ModelError
from laurel.models.forest import attention
from laurel.models.forest.attention import FOREST
from laurel.models.forest.decoder import RewardModel
from laurel.models.loading.reward_model import check_paths
from planted_faults import double_logits


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
@pytest.mark.parametrize("std", [0.02, 0.2])
def test_forests_of_every_architecture_pass(name, std):
    assert 0 < check_paths(tiny.tiny_reward_model(name, std=std)) < 5e-6


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "gpt-oss", "phi"])
def test_padded_rows_pass(name):
    model = tiny.tiny_reward_model(name)
    model.classifier.set_attn_implementation(tiny.own_attention(model.classifier))
    model.path = "padded"
    assert 0 < check_paths(model) < 5e-6


def test_an_encoder_passes():
    classifier = tiny.randomised("bert", {"max_position_embeddings": 64})
    model = RewardModel(classifier, head_name=None, path="padded", precision=torch.float32)
    assert check_paths(model) < 1e-5


def test_weights_in_bfloat16_pass():
    model = tiny.tiny_reward_model("qwen3-sliding", dtype=torch.bfloat16, precision=torch.bfloat16)
    assert 1e-4 < check_paths(model) < 0.05


def test_the_model_is_as_it_was_afterwards():
    model = tiny.tiny_reward_model("qwen2-sliding", precision=torch.bfloat16).train()
    check_paths(model)
    assert model.training
    assert model.precision == torch.bfloat16
    assert model.classifier.config._attn_implementation == FOREST
    assert model.classifier.config.sliding_window == 24
    windows = [layer.self_attn.sliding_window for layer in model.classifier.base_model.layers]
    assert windows == [24, None, 24]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("std", [0.02, 0.2])
def test_an_attention_that_ignores_the_plan_is_refused(precision, std):
    """Also in bfloat16 and with small scores, where comparing those would tell nothing."""
    model = tiny.tiny_reward_model("qwen3", precision=precision, std=std)
    model.classifier.set_attn_implementation("heedless")
    with pytest.raises(ModelError, match=r"another score in a batch.*sequence_packing.enabled=fa"):
        check_paths(model)


def test_an_attention_that_sees_two_levels_of_a_tree_alone_is_refused(monkeypatch):
    model = tiny.tiny_reward_model("qwen3")
    every_depth = attention.ancestor_keys
    monkeypatch.setattr(attention, "ancestor_keys", lambda trees: every_depth(trees)[:1])
    with pytest.raises(ModelError, match="another score in a batch"):
        check_paths(model)


def test_a_head_of_zeros_hides_no_fault():
    """Every score is 0 on both sides; the hidden states are not."""
    model = tiny.tiny_reward_model("qwen3")
    with torch.no_grad():
        model.classifier.score.weight.zero_()
    check_paths(model)
    model.classifier.set_attn_implementation("heedless")
    with pytest.raises(ModelError, match="another score in a batch"):
        check_paths(model)


def test_an_attention_that_forgets_the_window_is_refused_though_the_probe_is_short():
    """A real window is thousands of tokens long: no probe of two dozen would reach it."""
    model = tiny.tiny_reward_model("qwen2-sliding", sliding_window=512)
    check_paths(model)
    model.classifier.set_attn_implementation("windowless")
    with pytest.raises(ModelError, match="another score in a batch"):
        check_paths(model)


def test_an_architecture_that_narrows_only_its_mask_is_refused():
    """Qwen2-MoE does not tell its attention of the window; only the mask, which we replace."""
    settings = {
        "use_sliding_window": True,
        "sliding_window": 512,
        "moe_intermediate_size": 32,
        "layer_types": ["sliding_attention"] * 3,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "shared_expert_intermediate_size": 32,
    }
    classifier = tiny.randomised("qwen2_moe", settings)
    classifier.set_attn_implementation(FOREST)
    model = RewardModel(classifier, head_name="score", path="forest", precision=torch.float32)
    with pytest.raises(ModelError, match="Qwen2MoeForSequenceClassification gives"):
        check_paths(model)


class Wrapped(nn.Module):
    """A module that is called with other arguments than it is given."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner = inner
        self.change = change

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, **arguments):
        return self.inner(**self.change(arguments))


def wrapped(change):
    """A reward model whose classifier computes with another base model than the one it shows."""
    model = tiny.tiny_reward_model("llama")
    model.classifier = Wrapped(model.classifier, lambda arguments: arguments)
    model.classifier.base_model = Wrapped(model.classifier.inner.base_model, change)
    return model


def test_positions_counted_over_the_whole_row_are_refused():
    def count(arguments):
        if "position_ids" in arguments:
            length = arguments["position_ids"].shape[1]
            arguments = {**arguments, "position_ids": torch.arange(length)[None]}
        return arguments

    check_paths(wrapped(lambda arguments: arguments))
    with pytest.raises(ModelError, match="another score in a batch than alone"):
        check_paths(wrapped(count))


def test_a_decoder_that_does_not_pass_the_plan_on_is_refused():
    def drop(arguments):
        return {name: value for name, value in arguments.items() if name != "forest_plan"}

    with pytest.raises(ModelError, match=r"cannot be given a batch.*without a plan.*padded path"):
        check_paths(wrapped(drop))


def test_a_decoder_that_does_not_know_the_argument_is_refused():
    def refuse(arguments):
        if "forest_plan" in arguments:
            raise TypeError("got an unexpected keyword argument 'forest_plan'")
        return arguments

    with pytest.raises(ModelError, match=r"unexpected keyword.*padded path"):
        check_paths(wrapped(refuse))


@pytest.mark.parametrize("path", ["forest", "padded"])
def test_a_class_that_does_more_to_a_score_than_the_head_is_refused(path):
    model = tiny.tiny_reward_model("llama")
    if path == "padded":
        model.classifier.set_attn_implementation("sdpa")
        model.path = "padded"
    double_logits(model.classifier)
    with pytest.raises(ModelError, match="another score in a batch than alone"):
        check_paths(model)


def test_scores_that_are_not_numbers_are_an_error_of_their_own():
    model = tiny.tiny_reward_model("llama")
    with torch.no_grad():
        model.classifier.score.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="NaN or infinite: its weights are damaged"):
        check_paths(model)
