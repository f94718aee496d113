"""The residual stream is bfloat16 where autocast computes in it, in all that reads a decoder."""

from contextlib import closing

import pytest
import torch

import tiny
import tiny_tokenizers
from generators import draw, request
from laurel.data.forest import to_forest
from laurel.generation.transformers.engine import TransformersEngine
from laurel.types import TokenGroup

GROUPS = [(20, [5, 9]), (7, [3])]


def forest():
    return to_forest(tiny.random_groups(0, GROUPS))


def seen_in(model):
    """The dtypes of everything that goes into a layer or its products, from now on."""
    seen = set()
    layers = model.network.base_model.layers
    linear = (one for one in layers.modules() if isinstance(one, torch.nn.Linear))
    for module in (*layers, *linear):
        module.register_forward_pre_hook(lambda _, given: seen.update(one.dtype for one in given))
    return seen


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_every_architecture_sums_in_bfloat16_and_hands_float32_to_the_head(kind):
    model = tiny.tiny_reward_model(kind, precision=torch.bfloat16)
    seen = seen_in(model)
    hidden = model.hidden(forest())
    assert seen == {torch.bfloat16}
    assert hidden.dtype == torch.float32
    hidden.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert {one.dtype for one in gradients} == {torch.float32}


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_other_precisions_keep_it_in_float32(precision):
    model = tiny.tiny_policy("qwen3", precision=precision)
    seen = seen_in(model)
    plain = model.logprobs(forest())
    assert torch.float32 in seen
    assert torch.bfloat16 not in seen
    if precision == torch.float32:
        model.precision = torch.bfloat16
        with model.in_full_precision():
            assert torch.equal(model.logprobs(forest()), plain)
        assert torch.bfloat16 not in seen


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "phi"])
def test_drawn_log_probabilities_are_the_learners(kind):
    policy = tiny.tiny_policy(kind, std=0.1, precision=torch.bfloat16)
    asked = request([5, 6, 7] * 7, seeds=range(3), max_new_tokens=8)
    with closing(TransformersEngine(policy, tiny_tokenizers.chatml(), end_ids=[])) as engine:
        drawn = draw(engine, asked)[0]
    branches = tuple(one.ids_L for one in drawn)
    group = TokenGroup(id="a", trunk_ids=asked.prompt_ids, branches_ids_G=branches)
    learned = policy.logprobs(to_forest([group]))
    drawn_M = torch.cat([torch.as_tensor(one.logprobs_L) for one in drawn])
    with policy.in_full_precision():
        exact = policy.logprobs(to_forest([group]))
    noise = (learned - exact).abs().max()
    assert noise > 0
    assert (drawn_M - learned).abs().max() <= 2 * noise + 1e-4
