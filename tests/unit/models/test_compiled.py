"""Compiled layers compute what the others do, and forests do not compile them again and again.

The compiler's front end alone (`aot_eager`) decides that; one test has the whole compiler.
"""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import tiny
from laurel.data.forest import to_forest
from laurel.models.forest.attention import register
from laurel.models.forest.compiled import chooses_to_compile, compile_layers
from laurel.models.loading.pretrained import recompute_activations

# The compiler warns of what it looks at; a run does not make errors of that.
pytestmark = pytest.mark.filterwarnings("default")

FORESTS = (
    [(40, [5, 1, 30]), (3, [2, 2])],
    [(50, [7, 7, 7, 9])],
    [(17, [3, 9, 1, 25]), (8, [2, 3])],
    [(4, [2, 1])],
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    register()


def forest(number):
    return to_forest(tiny.random_groups(number, FORESTS[number]))


def graphs():
    return counters["stats"]["unique_graphs"]


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def nearly(found, expected):
    assert found.keys() == expected.keys()
    for name, one in found.items():
        noise = (one - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
        assert noise <= 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_outputs_and_gradients_are_equal_and_layers_share_their_graphs(recomputes):
    seen = {}
    for num_layers in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        plain = tiny.tiny_policy("qwen3", std=0.05, num_hidden_layers=num_layers)
        policy = copy.deepcopy(plain)
        if recomputes:
            recompute_activations(policy.causal_lm)
        assert compile_layers(policy, backend="aot_eager") is None
        seen[num_layers] = []
        for number in range(len(FORESTS)):
            for model in (plain, policy):
                model.train()
                model.zero_grad()
                model(forest(number)).logprobs_M.square().sum().backward()
            nearly(gradients(policy), gradients(plain))
            found, expected = (m.logprobs(forest(number)) for m in (policy, plain))
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
            seen[num_layers].append(graphs())
    # Fixed lengths, then any; each with and without gradients. Nothing after that.
    assert seen[2] == seen[5]
    assert seen[2][1] == seen[2][-1] <= 24
