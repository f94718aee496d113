"""oneDNN's products, where they are chosen and where they may be used."""

import pytest
import torch
from torch import nn

from laurel.models.forest.policy import _OneDnnLinear, fast_matmul, prefers_onednn

if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    pytest.skip("this torch has no oneDNN", allow_module_level=True)


def one(bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(24, 7, bias=bias)
    layer.__class__ = _OneDnnLinear
    return layer, torch.randn(2, 5, 24)


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_same_but_for_rounding(bias):
    layer, x = one(bias)
    with torch.inference_mode():
        found, expected = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    assert found.shape == (2, 5, 7)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("bias", "trained"), [(True, True), (False, True), (True, False)])
def test_gradients_are_the_same_but_for_rounding(bias, trained):
    torch.manual_seed(0)
    x, weights = torch.randn(3, 40, 200), torch.randn(3, 40, 180)
    found = []
    for kind in (nn.Linear, _OneDnnLinear):
        torch.manual_seed(1)
        layer = nn.Linear(200, 180, bias=bias).requires_grad_(trained)
        layer.__class__ = kind
        inputs = x.clone().requires_grad_()
        outputs = layer(inputs)
        is_ours = type(outputs.grad_fn).__name__ == "_LinearProductBackward"
        assert is_ours == (kind is _OneDnnLinear)
        (outputs * weights).sum().backward()
        found.append([inputs.grad, *(p.grad for p in layer.parameters())])
    assert [grad is None for grad in found[0]] == [False] + [not trained] * (1 + bias)
    for expected, grad in zip(*found, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-4)


def test_small_gradients_and_other_dtypes_are_torchs():
    layer, x = one()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert layer.double()(x.double()).dtype == torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.float()(x).dtype == torch.bfloat16


def test_layers_are_what_they_were_afterwards():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.LayerNorm(4))
    before = [type(module) for module in model]
    inside = [_OneDnnLinear if prefers_onednn() else nn.Linear, *before[1:]]
    with fast_matmul(model):
        assert [type(module) for module in model] == inside
    assert [type(module) for module in model] == before
