"""Where a score is read, in which precision, and that padding has no part in it."""

from dataclasses import replace

import pytest
import torch

import tiny
from laurel.data.forest import to_forest, to_padded
from laurel.models.forest.decoder import RewardModel
from laurel.types import PaddedRows

SHAPES = [(40, [5, 1, 30]), (0, [7]), (3, [2, 2]), (0, [1])]


def padded_model(classifier, *, head_name="score", precision=torch.float32):
    return RewardModel(classifier, head_name=head_name, path="padded", precision=precision)


def as_transformers_scores(classifier, groups):
    """Each sequence alone in the Hugging Face class's own forward."""
    return torch.cat(
        [
            classifier(input_ids=torch.from_numpy(ids).long()[None]).logits
            for ids in tiny.sequences(groups)
        ]
    )


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_a_padded_batch_scores_as_one_by_one(name):
    # Gemma 2's own attention has a float32 softmax, which a float64 mask overflows.
    dtype, tolerance = (torch.float32, 2e-6) if name == "gemma2" else (torch.float64, 1e-12)
    model = padded_model(tiny.tiny_classifier(name, dtype=dtype))
    groups = tiny.random_groups(1, SHAPES)
    scores_NK = model(to_padded(groups, pad_id=0))
    expected_NK = as_transformers_scores(model.classifier, groups)
    torch.testing.assert_close(scores_NK, expected_NK, rtol=0, atol=tolerance)


def test_neither_the_padding_token_nor_its_number_changes_a_score():
    model = padded_model(tiny.tiny_classifier("qwen2-sliding", dtype=torch.float64))
    rows = to_padded(tiny.random_groups(2, SHAPES), pad_id=0)
    expected_NK = model(rows)
    for pad_id, extra in ((0, 9), (2, 0), (77, 30)):
        more = torch.nn.functional.pad(rows.ids_NL, (0, extra))
        is_padding = torch.arange(more.shape[1]) >= rows.lengths_N[:, None]
        other = replace(rows, ids_NL=more.masked_fill(is_padding, pad_id))
        torch.testing.assert_close(model(other), expected_NK, rtol=0, atol=1e-12)


def test_a_text_that_ends_in_the_padding_token_is_read_at_its_end():
    """Hugging Face's own head reads such a row one token early; lengths do not lie."""
    model = padded_model(tiny.tiny_classifier("llama"))
    start = torch.tensor([1])
    rows = PaddedRows(ids_NL=torch.tensor([[5, 6, 0]]), lengths_N=torch.tensor([3]), starts_N=start)
    short = PaddedRows(ids_NL=torch.tensor([[5, 6]]), lengths_N=torch.tensor([2]), starts_N=start)
    with torch.inference_mode():
        theirs = model.classifier(input_ids=rows.ids_NL).logits
        torch.testing.assert_close(model(short), theirs)
        assert (model(rows) - theirs).abs().item() > 1e-3
        model.classifier.config.pad_token_id = None
        torch.testing.assert_close(model(rows), model.classifier(input_ids=rows.ids_NL).logits)


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_last_layer_computes_only_tokens_that_are_read(name, recomputes):
    model = tiny.tiny_reward_model(name, dtype=torch.float64).train()
    if recomputes:
        model.classifier.activation_checkpointing_enable()
    forest = to_forest(tiny.random_groups(5, SHAPES))
    other = to_forest(tiny.random_groups(6, [(7, [3, 2])]))
    computed = []
    last = model.classifier.base_model.layers[-1].mlp
    last.register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]))

    def gradients():
        model.zero_grad()
        # Both forests are computed before the gradients of either, which may recompute them.
        scores_NK = torch.cat([model(forest), model(other)])
        (scores_NK * torch.linspace(-1, 2, len(scores_NK))[:, None]).sum().backward()
        return scores_NK.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    found = gradients()
    assert set(computed) == {len(forest.last_N), len(other.last_N)}
    model.skips_unread = False
    computed.clear()
    torch.testing.assert_close(found, gradients(), rtol=1e-9, atol=1e-11)
    assert set(computed) == {len(forest.ids_T), len(other.ids_T)}


@pytest.mark.parametrize("kind", sorted(tiny.ENCODERS))
def test_encoders_pool_by_themselves(kind):
    classifier = tiny.randomised(kind, tiny.ENCODERS[kind])
    model = padded_model(classifier, head_name=None)
    rows = to_padded(tiny.random_groups(3, SHAPES), pad_id=0)
    mask_NL = (torch.arange(rows.ids_NL.shape[1]) < rows.lengths_N[:, None]).long()
    with torch.inference_mode():
        scores_NK = model(rows)
        own_NK = classifier(input_ids=rows.ids_NL, attention_mask=mask_NL).logits
        alone_NK = as_transformers_scores(classifier, tiny.random_groups(3, SHAPES))
    assert torch.equal(scores_NK, own_NK)
    torch.testing.assert_close(scores_NK, alone_NK, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(tiny.HYBRIDS))
def test_state_space_layers_see_no_padding(kind):
    model = padded_model(tiny.randomised(kind, tiny.HYBRIDS[kind]))
    groups = tiny.random_groups(4, [(9, [5, 1]), (0, [7])])
    with torch.inference_mode():
        scores_NK = model(to_padded(groups, pad_id=0))
        expected_NK = as_transformers_scores(model.classifier, groups)
    torch.testing.assert_close(scores_NK, expected_NK, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["forest", "padded"])
def test_the_head_is_float32_whatever_the_decoder_is(path, weights):
    model = tiny.tiny_reward_model("qwen3", precision=torch.bfloat16, dtype=weights)
    groups = tiny.random_groups(6, SHAPES)
    batch = to_forest(groups)
    if path == "padded":
        model.classifier.set_attn_implementation("sdpa")
        model.path, batch = "padded", to_padded(groups, pad_id=0)
    with torch.inference_mode():
        hidden_ND, scores_NK = model.last_hidden(batch), model(batch)
    assert hidden_ND.dtype == torch.bfloat16 or weights == torch.float32
    assert scores_NK.dtype == torch.float32
    weight_KD = model.classifier.score.weight.detach().double()
    exact_NK = hidden_ND.double() @ weight_KD.T
    torch.testing.assert_close(scores_NK.double(), exact_NK, rtol=0, atol=1e-6)
    assert not torch.equal(scores_NK, scores_NK.bfloat16().float())


def test_autocast_stays_inside_the_decoder():
    """A caller who autocasts does not lower the precision of the head."""
    model = tiny.tiny_reward_model("qwen3")
    hidden_ND = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    expected_NK = model.apply_head(hidden_ND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.apply_head(hidden_ND), expected_NK)


def test_a_head_with_a_bias_adds_it():
    model = tiny.tiny_reward_model("qwen3")
    forest = to_forest(tiny.random_groups(8, SHAPES))
    with torch.inference_mode():
        before = model(forest)
        model.classifier.score.bias = torch.nn.Parameter(torch.tensor([2.5]))
        torch.testing.assert_close(model(forest), before + 2.5)
