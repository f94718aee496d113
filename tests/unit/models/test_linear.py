import copy
import platform

import pytest
import torch
from torch import nn

from laurel.models.linear import (
    OneDnnLinear,
    library_for,
    multiply_with,
    preferred_library,
)

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch was built without oneDNN",
)


def pair(inputs, outputs, *, bias):
    """A plain layer, and the same one with oneDNN's products."""
    torch.manual_seed(inputs + outputs)
    plain = nn.Linear(inputs, outputs, bias=bias)
    other = copy.deepcopy(plain)
    assert multiply_with("onednn", other) == 1
    assert type(other) is OneDnnLinear
    return plain, other


def close(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm()) <= 1e-6 * float(wanted.norm())


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((1, 300, 96), 64), ((2, 3, 5, 64), 96), ((1, 7), 5), ((40, 1), 1), ((33, 128), 128)],
)
def test_outputs_and_gradients_are_those_of_the_plain_layer(shape, outputs, bias):
    plain, other = pair(shape[-1], outputs, bias=bias)
    mine = torch.randn(shape).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    found, wanted = other(mine), plain(theirs)
    assert close(found, wanted)
    slope = torch.randn_like(wanted)
    found.backward(slope)
    wanted.backward(slope)
    assert close(mine.grad, theirs.grad)
    for got, expected in zip(other.parameters(), plain.parameters(), strict=True):
        assert close(got.grad, expected.grad)
        assert got.grad.shape == got.shape


@needs_onednn
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
        lambda x: torch.stack((x, x), dim=-1).flatten(1)[:, ::2],
        lambda x: x[:1].expand_as(x),
        lambda x: x[:, :1].expand_as(x),
        lambda x: x.flip(0)[::1],
    ],
    ids=["transposed", "sliced", "stepped", "one row", "one column", "flipped"],
)
def test_the_memory_order_of_inputs_and_gradients_changes_nothing(view):
    plain, other = pair(48, 48, bias=True)
    input, slope = torch.randn(20, 48), torch.randn(20, 48)
    for layer in (plain, other):
        layer(view(input)).backward(view(slope))
    assert close(other(view(input)), plain(view(input)))
    assert close(other.weight.grad, plain.weight.grad)
    assert close(other.bias.grad, plain.bias.grad)


@needs_onednn
def test_only_the_gradients_that_are_wanted_are_computed():
    _, other = pair(8, 8, bias=True)
    other.weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    other(x).sum().backward()
    assert other.weight.grad is None
    assert torch.equal(other.bias.grad, torch.full((8,), 3.0))
    assert close(x.grad, other.weight.sum(0).expand(3, 8))


@needs_onednn
def test_other_dtypes_autocast_and_empty_inputs_are_left_to_torch():
    plain, other = pair(16, 8, bias=True)
    x = torch.randn(5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert other(x).dtype == torch.bfloat16
        assert torch.equal(other(x), plain(x))
    assert other(torch.randn(0, 16)).shape == (0, 8)
    assert torch.equal(other.double()(x.double()), plain.double()(x.double()))


@needs_onednn
def test_activation_checkpointing_recomputes_the_same():
    _, other = pair(16, 16, bias=False)
    x = torch.randn(5, 16, requires_grad=True)
    other(x).square().sum().backward()
    kept, other.weight.grad = other.weight.grad, None
    again = torch.utils.checkpoint.checkpoint(lambda x: other(x).square().sum(), x,
                                              use_reentrant=False)  # fmt: skip
    again.backward()
    assert torch.equal(other.weight.grad, kept)


def test_layers_change_back_and_keep_names_and_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert multiply_with("onednn", model) == 2
    assert multiply_with("onednn", model) == 0
    assert multiply_with("torch", model) == 2
    assert type(model[0]) is type(model[2][0]) is nn.Linear
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("vendor", "vectors", "library"),
    [
        ("AuthenticAMD", "AVX512", "onednn"),
        ("AuthenticAMD", "AVX2", "torch"),
        ("GenuineIntel", "AVX512", "torch"),
        ("", "DEFAULT", "torch"),
    ],
)
def test_onednn_is_chosen_where_mkl_leaves_vectors_unused(vendor, vectors, library):
    assert library_for(vendor=vendor, vectors=vectors) == library


def test_the_choice_here_fits_the_machine():
    assert preferred_library() in ("torch", "onednn")
    if platform.machine() not in ("x86_64", "AMD64"):
        assert preferred_library() == "torch"
