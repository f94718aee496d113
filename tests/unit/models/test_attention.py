"""The forest gives what one-by-one scoring gives: scores, gradients, for every architecture.

The weights are float64 wherever exactness is claimed, because in float32 the order of sums alone
moves a score of size 1 by about 1e-6, as much as transformers' own back-ends differ by.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
from dense_oracle import ORACLE, dense_attention, drawn_forest
from laurel.data.forest import to_forest
from laurel.errors import ModelError
from laurel.models.forest.attention import ForestPlan, forest_attention
from laurel.models.loading.pretrained import recompute_activations
from random_trees import groups_of_tree

ALL = sorted(tiny.ARCHITECTURES)
SHAPES = [(40, [5, 1, 30]), (0, [7]), (3, [2, 2]), (1, [1, 1]), (0, [1]), (17, [3, 9, 1, 25])]
"""Trunk and branch lengths: longer and shorter than every sliding window of `tiny`."""


def gradients(model, scores):
    """Gradients of every parameter under random weights of the scores."""
    model.zero_grad()
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(7))
    (scores * weights.to(scores)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(found, expected):
    """The largest over the parameters, each in units of its own gradient's norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-30))
        for n in expected
        if not torch.equal(found[n], expected[n])
    )


@pytest.mark.parametrize("name", ALL)
def test_scores_and_gradients_are_those_of_one_by_one(name):
    model = tiny.tiny_reward_model(name, dtype=torch.float64)
    groups = tiny.random_groups(1, SHAPES)
    scores_NK = model(to_forest(groups))
    expected_NK = tiny.one_by_one(model, groups, tiny.own_attention(model.classifier))
    assert scores_NK.dtype == torch.float64
    # Gemma 2 has no back-end but its eager one, whose softmax is float32 in any model.
    tolerance = 1e-6 if name == "gemma2" else 1e-12
    assert float((scores_NK - expected_NK).detach().abs().max()) <= tolerance
    # Norms of root mean squares compute in float32 in any model, and so do their gradients.
    assert relative_difference(gradients(model, scores_NK), gradients(model, expected_NK)) <= 1e-6


@pytest.mark.parametrize("name", ALL)
def test_sequences_of_a_deep_tree_get_their_scores_and_gradients(name):
    model = tiny.tiny_reward_model(name, dtype=torch.float64)
    groups, num_nodes = groups_of_tree(ALL.index(name))
    forest = to_forest(groups, least_shared=1)
    assert len(forest.trees[0].nodes) == num_nodes
    assert max(forest.trees[0].depths) == 6
    scores_NK = model(forest)
    expected_NK = tiny.one_by_one(model, groups, tiny.own_attention(model.classifier))
    tolerance = 1e-6 if name == "gemma2" else 1e-12
    assert float((scores_NK - expected_NK).detach().abs().max()) <= tolerance
    assert relative_difference(gradients(model, scores_NK), gradients(model, expected_NK)) <= 1e-6


def test_steps_in_a_deep_tree_get_their_scores_and_gradients_with_recomputed_layers():
    """Of a process reward model: sequences share steps, and read them each for itself."""
    model = tiny.tiny_reward_model("qwen3-sliding", dtype=torch.float64)
    groups = [
        dataclasses.replace(
            group,
            reads_G=tuple(
                (0, len(group.trunk_ids) // 2, len(group.trunk_ids) + len(ids) - 1)
                for ids in group.branches_ids_G
            ),
        )
        for group in groups_of_tree(5)[0]
    ]
    expected_NK = model(to_forest(groups))
    expected = gradients(model, expected_NK)
    recompute_activations(model.train().classifier)
    forest = to_forest(groups, least_shared=1)
    assert len(set(forest.reads)) < len(forest.reads) / 2
    scores_NK = model(forest)
    torch.testing.assert_close(scores_NK, expected_NK, rtol=0, atol=1e-12)
    assert relative_difference(gradients(model, scores_NK), expected) <= 1e-6


@pytest.mark.parametrize("name", ALL)
def test_in_float32_the_difference_to_eager_attention_is_rounding(name):
    """At the size of trained weights, where scores have about the size 1 (issue: 1e-6, 1e-5)."""
    model = tiny.tiny_reward_model(name, std=0.05)
    groups = tiny.random_groups(2, SHAPES)
    scores_NK = model(to_forest(groups))
    expected_NK = tiny.one_by_one(model, groups, "eager")
    assert float((scores_NK - expected_NK).detach().abs().max()) <= 1e-6
    assert relative_difference(gradients(model, scores_NK), gradients(model, expected_NK)) <= 1e-5


def test_groups_of_one_to_sixteen_completions():
    model = tiny.tiny_reward_model("qwen3-sliding", dtype=torch.float64)
    shapes = [(3 * g % 17, [1 + (5 * g + i) % 11 for i in range(g)]) for g in range(1, 17)]
    groups = tiny.random_groups(3, shapes)
    scores_NK = model(to_forest(groups))
    expected_NK = tiny.one_by_one(model, groups, tiny.own_attention(model.classifier))
    assert scores_NK.shape == (136, 1)  # 1 + 2 + ... + 16
    assert float((scores_NK - expected_NK).detach().abs().max()) <= 1e-12
    assert relative_difference(gradients(model, scores_NK), gradients(model, expected_NK)) <= 1e-6


MODELS = {
    name: tiny.tiny_reward_model(name, dtype=torch.float64).requires_grad_(False)
    for name in ("qwen2-sliding", "gemma3")
}
RAGGED = st.lists(
    st.tuples(st.integers(0, 45), st.lists(st.integers(1, 30), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(shapes=RAGGED, name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**16))
def test_any_shapes(shapes, name, seed):
    groups = tiny.random_groups(seed, shapes)
    expected_NK = tiny.one_by_one(MODELS[name], groups, "sdpa")
    for share_prompts in (True, False):
        scores_NK = MODELS[name](to_forest(groups, share_prompts=share_prompts))
        torch.testing.assert_close(scores_NK, expected_NK, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_regression_head_gives_every_attribute(name):
    model = tiny.tiny_reward_model(name, num_labels=3, dtype=torch.float64)
    groups = tiny.random_groups(5, SHAPES)
    scores_NK = model(to_forest(groups))
    assert scores_NK.shape == (13, 3)
    assert model.num_outputs == 3
    expected_NK = tiny.one_by_one(model, groups, tiny.own_attention(model.classifier))
    torch.testing.assert_close(scores_NK, expected_NK, rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    shapes=RAGGED,
    repeats=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.floats(0.5, 30.0),
    has_sinks=st.booleans(),
    scaling=st.none() | st.floats(0.1, 1.0),
    is_deep=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_function_by_itself(
    shapes, repeats, window, softcap, has_sinks, scaling, is_deep, seed
):
    """Any combination of what models ask of it, forward and backward."""
    forest, oracle = drawn_forest(shapes, seed, is_deep=is_deep)
    num_tokens, num_heads = len(forest.ids_T), 4
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "query": draw(1, num_heads, num_tokens, 6),
        "key": draw(1, num_heads // repeats, num_tokens, 6),
        "value": draw(1, num_heads // repeats, num_tokens, 5),
    }
    options = {
        "s_aux": draw(num_heads) if has_sinks else None,
        "scaling": scaling,
        "sliding_window": window,
        "softcap": softcap,
    }
    leaves = [t.requires_grad_() for t in (*tensors.values(), options["s_aux"]) if t is not None]
    outputs = []
    for function, plan in (
        (forest_attention, {"forest_plan": ForestPlan(forest.trees)}),
        (dense_attention, {"oracle": oracle}),
    ):
        result, weights = function(
            module=nn.Identity(), **tensors, attention_mask=None, **options, **plan
        )
        assert weights is None
        assert result.shape == (1, num_tokens, num_heads, 5)
        pull = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
        outputs.append((result, torch.autograd.grad((result * pull).sum(), leaves)))
    (found, found_gradients), (expected, expected_gradients) = outputs
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma2", "gpt-oss", "phi"])
def test_activation_checkpointing_changes_no_gradient(name):
    groups = tiny.random_groups(8, SHAPES)
    results = []
    for is_on in (False, True):
        model = tiny.tiny_reward_model(name).train()
        if is_on:
            recompute_activations(model.classifier)
        calls = []
        first = model.classifier.base_model.layers[0].self_attn
        first.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        results.append(gradients(model, model(to_forest(groups))))
        assert len(calls) == (2 if is_on else 1)  # once more in the backward pass
    without, with_it = results
    assert without.keys() == with_it.keys()
    for parameter in without:
        assert torch.equal(without[parameter], with_it[parameter]), parameter


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "gemma3", "phi3"])
def test_in_bfloat16_the_noise_is_that_of_a_padded_batch(name):
    """Not gpt-oss: there rounding sends some tokens to other experts, on either path."""
    groups = tiny.random_groups(9, SHAPES * 4)
    exact = tiny.tiny_reward_model(name, dtype=torch.float64)
    model = tiny.tiny_reward_model(name, precision=torch.bfloat16)
    with torch.inference_mode():
        truth_NK = exact(to_forest(groups))
        forest_NK = model(to_forest(groups))
        model.classifier.set_attn_implementation(tiny.own_attention(model.classifier))
        padded_NK = model(tiny.padded(groups))
    size, noise, own_noise = (
        float(t.double().square().mean().sqrt())
        for t in (truth_NK, forest_NK - truth_NK, padded_NK - truth_NK)
    )
    assert forest_NK.dtype == torch.float32
    assert noise <= 0.05 * size  # bfloat16 keeps 8 bits: 0.4 % a rounding
    assert noise <= 1.25 * own_noise
    assert noise >= 1e-4 * size  # or autocast did nothing


@pytest.mark.parametrize("name", ALL)
def test_no_token_reaches_another_tree_or_branch(name):
    """Bit for bit: what does not see a token cannot change by it, not even by rounding."""
    model = tiny.tiny_reward_model(name)
    groups = tiny.random_groups(10, SHAPES)
    owners = [g for g, group in enumerate(groups) for _ in group.branches_ids_G]
    with torch.inference_mode():
        before = model(to_forest(groups))[:, 0]
        first = 0
        for index, group in enumerate(groups):
            for branch in range(len(group.branches_ids_G)):
                after = model(to_forest(_touched(groups, index, branch)))[:, 0]
                changed = (after != before).nonzero()[:, 0].tolist()
                assert changed == [first + branch], (index, branch)
            if len(group.trunk_ids):
                after = model(to_forest(_touched(groups, index, None)))[:, 0]
                changed = (after != before).nonzero()[:, 0].tolist()
                assert {owners[i] for i in changed} == {index}, index
            first += len(group.branches_ids_G)


def _touched(groups, index, branch):
    """The groups with the last token of one branch, or of one trunk, replaced."""

    def other(ids):
        touched = ids.copy()
        touched[-1] = 3 + (touched[-1] - 2) % (tiny.VOCABULARY - 3)
        return touched

    group = groups[index]
    if branch is None:
        group = dataclasses.replace(group, trunk_ids=other(group.trunk_ids))
    else:
        branches = list(group.branches_ids_G)
        branches[branch] = other(branches[branch])
        group = dataclasses.replace(group, branches_ids_G=tuple(branches))
    return [*groups[:index], group, *groups[index + 1 :]]


def test_attention_dropout_works_in_training_only():
    model = tiny.tiny_reward_model("qwen3", attention_dropout=0.5)
    forest = to_forest(tiny.random_groups(11, SHAPES))
    with torch.no_grad():
        assert torch.equal(model(forest), model(forest))
        model.train()
        assert not torch.equal(model(forest), model(forest))


def test_without_a_plan_there_is_an_error_that_says_so():
    model = tiny.tiny_reward_model("llama")
    with pytest.raises(ModelError, match=r"without a plan.*set_attn_implementation\('sdpa'\)"):
        model.classifier(input_ids=torch.tensor([[5, 6, 7]]))


def test_masks_by_hand():
    plan = ForestPlan([])
    like = torch.zeros(1)
    no, yes = -torch.inf, 0.0
    # Two queries at positions 3 and 4 of five keys, which see the latest three positions.
    expected = torch.tensor([[no, yes, yes, yes, no], [no, no, yes, yes, yes]])
    assert torch.equal(plan.mask(2, 5, 3, like), expected)
    assert plan.mask(2, 5, 3, like) is plan.mask(2, 5, 3, like)
    # Without a window, or with one that reaches back to the first key.
    expected = torch.tensor([[yes, yes, yes, yes, no], [yes, yes, yes, yes, yes]])
    assert torch.equal(plan.mask(2, 5, None, like), expected)
    assert torch.equal(plan.mask(2, 5, 5, like), expected)
    # A kernel's own causal mask does for a square, and one query sees everything.
    assert plan.mask(5, 5, None, like) is None
    assert plan.mask(1, 5, None, like) is None
    assert torch.equal(plan.mask(1, 3, 2, like), torch.tensor([[no, yes, yes]]))


@pytest.mark.parametrize("is_deep", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_every_token_is_that_of_a_dense_mask(name, is_deep):
    """All hidden states, not only the last ones, and in float64 for all architectures."""
    model = tiny.tiny_reward_model(name, dtype=torch.float64).classifier.base_model
    forest, oracle = drawn_forest(SHAPES, 6, is_deep=is_deep)
    inputs = {
        "input_ids": forest.ids_T[None],
        "position_ids": forest.positions_T[None],
        "use_cache": False,
    }
    found = model(**inputs, forest_plan=ForestPlan(forest.trees)).last_hidden_state
    model.set_attn_implementation(ORACLE)
    expected = model(**inputs, oracle=oracle).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
