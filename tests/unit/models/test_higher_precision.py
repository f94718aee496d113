import copy

import pytest
import torch
from torch import nn

import tiny
from laurel.data.forest import to_forest
from laurel.models.forest.decoder import weights_as


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2-sliding", "llama", "gemma2", "gemma3", "phi", "gpt-oss"]
)
def test_it_is_the_model_with_widened_weights(name):
    model = tiny.tiny_reward_model(name, dtype=torch.bfloat16, precision=torch.bfloat16)
    wide = copy.deepcopy(model).float()
    wide.precision = torch.float32
    batch = to_forest(tiny.random_groups(0, [(20, [3, 5]), (7, [1])]))
    with torch.inference_mode():
        expected, before = wide(batch), model(batch)
        with weights_as(model, torch.float32):
            assert torch.equal(model(batch), expected)
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert torch.equal(model(batch), before)
    assert not torch.equal(before, expected)


def test_a_computation_that_raises_leaves_the_weights_as_they_were():
    inner = nn.Linear(2, 2, dtype=torch.bfloat16)
    model = nn.Sequential(inner, nn.Linear(3, 3))
    own = dict(inner._parameters)
    refusal = pytest.raises(RuntimeError, match="shapes cannot be multiplied")
    with refusal, weights_as(model, torch.float32):
        model(torch.ones(1, 2))
    for module in model:
        assert all(isinstance(p, nn.Parameter) for p in module._parameters.values())
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert dict(inner._parameters) == own


def test_modules_that_share_weights_do_so_afterwards():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    with weights_as(model, torch.float64):
        assert model(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
    assert second.weight is first.weight
