"""A policy gives in a forest what Hugging Face's class gives one by one, gradients included."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from laurel.config.policy import LoraConfig
from laurel.data.forest import to_forest, to_padded
from laurel.errors import DataError
from laurel.models.forest import outputs
from laurel.models.forest.outputs import distinct_labels, predictors
from laurel.models.forest.policy import PolicyModel, Reference
from laurel.models.loading.adapters import add_adapters
from random_trees import groups_of_tree

ALL = sorted(tiny.LANGUAGE_MODELS)
SHAPES = [(40, [5, 1, 30]), (1, [7]), (3, [2, 2]), (17, [1])]


def alone(model, groups, implementation):
    """Log-probabilities of completion tokens, each sequence alone in Hugging Face's own forward."""
    network, pieces = model.causal_lm, []
    before = network.config._attn_implementation
    network.set_attn_implementation(implementation)
    try:
        for group in groups:
            for branch in group.branches_ids_G:
                ids = torch.tensor([*group.trunk_ids, *branch])
                logits = network(input_ids=ids[None]).logits[0] / model.temperature
                if logits.dtype != torch.float64:
                    logits = logits.float()
                table = logits[len(group.trunk_ids) - 1 : -1].log_softmax(-1)
                pieces.append(table.gather(1, ids[len(group.trunk_ids) :, None])[:, 0])
    finally:
        network.set_attn_implementation(before)
    return torch.cat(pieces)


def gradients(model, logprobs_M):
    """Of a random weighting of all log-probabilities, by parameter."""
    weights_M = torch.randn(len(logprobs_M), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    (logprobs_M * weights_M.to(logprobs_M.dtype)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(found, wanted):
    """Largest over the parameters: norm of the difference over the norm."""
    assert found.keys() == wanted.keys()
    assert wanted
    return max(
        float((found[name] - wanted[name]).norm() / wanted[name].norm())
        for name in wanted
        if wanted[name].norm() > 0
    )


@pytest.mark.parametrize("name", ALL)
def test_log_probabilities_and_gradients_are_those_of_one_by_one(name):
    model = tiny.tiny_policy(name, dtype=torch.float64, temperature=0.8)
    groups = tiny.random_groups(1, SHAPES)
    logprobs_M = model(to_forest(groups)).logprobs_M
    expected_M = alone(model, groups, tiny.own_attention(model.causal_lm))
    # Gemma 2's own attention has a float32 softmax. Norms of root mean squares compute in float32
    # in any model, and so do their gradients.
    tolerance = 2e-6 if name.startswith("gemma2") else 1e-13
    torch.testing.assert_close(logprobs_M, expected_M, rtol=0, atol=tolerance)
    difference = relative_difference(gradients(model, logprobs_M), gradients(model, expected_M))
    assert difference <= 1e-6


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma2-capped", "gpt-oss", "cohere"])
def test_a_shared_token_has_a_label_for_every_sequence_that_holds_it(name):
    """Completions that begin anywhere in a deep tree: log-probabilities, entropy and gradients."""
    model = tiny.tiny_policy(name, dtype=torch.float64, temperature=0.8)
    groups, num_nodes = groups_of_tree(ALL.index(name), nodes=30)
    forest = to_forest(groups, least_shared=1)
    assert len(forest.trees[0].nodes) == num_nodes
    index_M, targets_M = predictors(forest)
    index_X, targets_X, label_M = distinct_labels(index_M, targets_M)
    assert len(index_X) < len(index_M)
    assert torch.equal(index_X[label_M], index_M)
    assert torch.equal(targets_X[label_M], targets_M)
    model.with_entropy = True
    found = model(forest)
    apart = model(to_forest(groups, share_prompts=False))
    torch.testing.assert_close(found, apart, rtol=0, atol=1e-12)
    expected_M = alone(model, groups, tiny.own_attention(model.causal_lm))
    tolerance = 2e-6 if name.startswith("gemma2") else 1e-12
    torch.testing.assert_close(found.logprobs_M, expected_M, rtol=0, atol=tolerance)
    difference = relative_difference(
        gradients(model, found.logprobs_M), gradients(model, expected_M)
    )
    assert difference <= 1e-6


@pytest.mark.parametrize("name", ALL)
def test_in_float32_the_difference_is_rounding(name):
    """At the size of trained weights (issue: 1e-6 of a loss, 1e-5 of gradients)."""
    model = tiny.tiny_policy(name, std=0.05)
    groups = tiny.random_groups(2, SHAPES)
    logprobs_M = model(to_forest(groups)).logprobs_M
    expected_M = alone(model, groups, "eager")
    loss = (logprobs_M.double() - expected_M.double()).mean()
    assert float(loss.detach().abs()) <= 1e-6
    assert float((logprobs_M - expected_M).detach().abs().max()) <= 2e-6
    assert relative_difference(gradients(model, logprobs_M), gradients(model, expected_M)) <= 1e-5


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma3", "gpt-oss", "cohere"])
def test_padded_rows_give_the_same(name):
    forest = tiny.tiny_policy(name, dtype=torch.float64)
    rows = tiny.tiny_policy(name, dtype=torch.float64, path="padded")
    groups = tiny.random_groups(4, SHAPES)
    forest_M, rows_M = (
        forest(to_forest(groups)).logprobs_M,
        rows(to_padded(groups, pad_id=0)).logprobs_M,
    )
    torch.testing.assert_close(rows_M, forest_M, rtol=0, atol=1e-11)
    assert relative_difference(gradients(rows, rows_M), gradients(forest, forest_M)) <= 1e-6


MODELS = {
    name: tiny.tiny_policy(name, dtype=torch.float64).requires_grad_(False)
    for name in ("qwen2-sliding", "gemma3")
}
RAGGED = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=8)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=15, deadline=None)
@given(shapes=RAGGED, name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**16))
def test_any_shapes(shapes, name, seed):
    groups = tiny.random_groups(seed, shapes)
    expected_M = alone(MODELS[name], groups, "sdpa")
    for share_prompts in (True, False):
        out = MODELS[name](to_forest(groups, share_prompts=share_prompts))
        torch.testing.assert_close(out.logprobs_M, expected_M, rtol=0, atol=1e-11)


def test_entropy_is_a_setting_of_the_model_and_chunks_change_nothing(monkeypatch):
    model = tiny.tiny_policy("qwen3", dtype=torch.float64)
    forest = to_forest(tiny.random_groups(6, SHAPES))
    plain = model(forest)
    assert plain.entropy_M is None
    model.with_entropy = True
    monkeypatch.setattr(outputs, "usual_chunk_size", lambda *_, **__: 3)
    measured = model(forest)
    torch.testing.assert_close(measured.logprobs_M, plain.logprobs_M, rtol=0, atol=1e-12)
    hidden_TD = model.hidden(forest)
    first = model.logits(hidden_TD[39:40]).log_softmax(-1)  # the last token of the first prompt
    entropy = -(first.exp() * first).sum().detach()
    assert measured.entropy_M[0] == pytest.approx(float(entropy), abs=1e-12)
    assert not measured.entropy_M.requires_grad


def test_temperature_0_counts_as_1():
    greedy, plain = tiny.tiny_policy("qwen3", temperature=0.0), tiny.tiny_policy("qwen3")
    forest = to_forest(tiny.random_groups(6, SHAPES))
    assert torch.equal(greedy(forest).logprobs_M, plain(forest).logprobs_M)
    warm = tiny.tiny_policy("qwen3", temperature=2.0)
    assert not torch.allclose(warm(forest).logprobs_M, plain(forest).logprobs_M, atol=1e-2)


def test_bfloat16_is_for_the_decoder_and_the_head_stays_float32():
    low, full = (tiny.tiny_policy("qwen3", precision=p) for p in (torch.bfloat16, torch.float32))
    forest = to_forest(tiny.random_groups(7, SHAPES))
    with torch.no_grad():
        low_M, full_M = low(forest).logprobs_M, full(forest).logprobs_M
        assert low_M.dtype == torch.float32
        assert 1e-4 < (low_M - full_M).abs().max() < 1
        with low.in_full_precision():
            assert torch.equal(low(forest).logprobs_M, full_M)
        assert torch.equal(low(forest).logprobs_M, low_M)


def test_logprobs_are_without_gradients_and_dropout_and_leave_the_model_as_it_was():
    model = tiny.tiny_policy("qwen3", attention_dropout=0.5).train()
    model.with_entropy = True
    forest = to_forest(tiny.random_groups(9, SHAPES))
    logprobs_M = model.logprobs(forest)
    assert not logprobs_M.requires_grad
    assert torch.equal(logprobs_M, model.logprobs(forest))
    assert not torch.equal(logprobs_M, model(forest).logprobs_M)
    assert model.training
    assert model.with_entropy
    # They are constants of a loss: autograd may save them.
    (model(forest).logprobs_M * logprobs_M).sum().backward()


def with_adapters(name="qwen3", **config):
    model = tiny.tiny_policy(name, std=0.1)
    lora = LoraConfig(enabled=True, dim=4, alpha=8, **config)
    model.causal_lm = add_adapters(model.causal_lm, lora, trains_head=False)
    return model


def train(model, steps=3):
    forest = to_forest(tiny.random_groups(10, SHAPES))
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.02)
    for _ in range(steps):
        model(forest).logprobs_M.mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_adapters_come_merged_and_the_model_stays_as_it_is():
    model = with_adapters()
    train(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    forest = to_forest(tiny.random_groups(11, SHAPES))
    plain = tiny.tiny_policy("qwen3")
    names = plain.causal_lm.state_dict().keys()
    weights = dict(model.named_weights())
    assert weights.keys() == names
    plain.causal_lm.load_state_dict(weights)
    torch.testing.assert_close(plain.logprobs(forest), model.logprobs(forest), rtol=0, atol=2e-6)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("name", "config", "blocks"),
    [
        ("qwen3", {}, {"self_attn", "mlp"}),
        ("qwen3-tied", {"target_modules": ["up_proj"]}, {"mlp"}),
        # Its queries, keys and values are joined by some engines, and go together.
        ("qwen3", {"target_modules": ["q_proj"]}, {"self_attn"}),
        ("phi", {"target_modules": ["fc1"]}, {"mlp"}),
    ],
)
def test_what_training_cannot_change_can_be_left_out(name, config, blocks):
    model = with_adapters(name, **config)
    before = {n: weight.clone() for n, weight in model.named_weights()}
    train(model)
    after = dict(model.named_weights())
    changing = dict(model.named_weights(changing_only=True))
    assert changing.keys() == {n for n in after if "layers." in n and n.split(".")[3] in blocks}
    assert all(torch.equal(weight, after[n]) for n, weight in changing.items())
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert changed
    assert changed <= changing.keys()


def test_without_adapters_training_can_change_everything():
    model = tiny.tiny_policy("qwen3-tied")
    assert (
        dict(model.named_weights(changing_only=True)).keys() == dict(model.named_weights()).keys()
    )


def test_experts_without_adapters_stay_where_they_are():
    model = PolicyModel(tiny.mixtral(1), path="padded", precision=torch.float32)
    lora = LoraConfig(enabled=True, dim=4, target_modules=["q_proj"])
    model.causal_lm = add_adapters(model.causal_lm, lora, trains_head=False)
    every = dict(model.named_weights())
    assert sum("experts" in name for name in every) == 9  # 3 experts with 3 matrices each
    changing = dict(model.named_weights(changing_only=True))
    assert changing.keys() == {name for name in every if "self_attn" in name}
    assert len(changing) == 4
    assert all(torch.equal(weight, every[name]) for name, weight in changing.items())


def test_with_adapters_the_reference_is_the_model_without_them():
    model, forest = with_adapters(), to_forest(tiny.random_groups(12, SHAPES))
    expected_M = tiny.tiny_policy("qwen3", std=0.1).logprobs(forest)
    reference = Reference.of(model)
    assert reference.model is model  # no second copy
    assert torch.equal(reference.logprobs(forest), expected_M)
    assert torch.equal(model.logprobs(forest), expected_M)  # new adapters add nothing
    train(model)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert (model.logprobs(forest) - expected_M).abs().max() > 1e-2
    assert torch.equal(reference.logprobs(forest), expected_M)
    # The adapters are on again, and are trained on.
    assert (model.logprobs(forest) - expected_M).abs().max() > 1e-2
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable


def test_adapters_are_on_again_though_a_batch_could_not_be_computed():
    model, forest = with_adapters(), to_forest(tiny.random_groups(12, SHAPES))
    train(model)
    expected_M = model.logprobs(forest)
    with pytest.raises(DataError):
        Reference.of(model).logprobs(to_forest(tiny.random_groups(0, [(0, [2])])))
    assert torch.equal(model.logprobs(forest), expected_M)


def test_without_adapters_the_reference_is_a_frozen_copy():
    model, forest = (
        tiny.tiny_policy("qwen3-tied", temperature=0.7),
        to_forest(tiny.random_groups(13, SHAPES)),
    )
    model(forest).logprobs_M.sum().backward()
    expected_M = model.logprobs(forest)
    model.train()
    reference = Reference.of(model)
    assert not any(p.requires_grad or p.grad is not None for p in reference.model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert reference.path == "forest"
    train(model)
    assert (model.logprobs(forest) - expected_M).abs().max() > 1e-2
    assert torch.equal(reference.logprobs(forest), expected_M)


def test_a_model_loaded_for_it_serves_as_reference_when_a_run_goes_on():
    start, forest = tiny.tiny_policy("qwen3"), to_forest(tiny.random_groups(14, SHAPES))
    going_on = copy.deepcopy(start)
    train(going_on)
    reference = Reference(start)
    assert reference.model is start
    assert not any(p.requires_grad for p in start.parameters())
    assert torch.equal(reference.logprobs(forest), tiny.tiny_policy("qwen3").logprobs(forest))
