"""Log-probabilities on a GPU: as on the CPU; and in bfloat16 with float32 sums."""

import copy
import dataclasses

import pytest
import torch

import tiny
from laurel.data.forest import to_forest
from laurel.models.forest.compiled import compile_layers
from laurel.models.forest.lockstep import BACKWARD, FORWARD, idle_pass
from laurel.models.forest.outputs import all_logits, token_logprobs
from laurel.models.forest.parts import backward_in_parts
from laurel.models.loading.policy import check_policy_paths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
DEVICE = torch.device("cuda")
SHAPES = [(40, [5, 1, 30]), (1, [7]), (3, [2, 2])]


@pytest.mark.parametrize("name", sorted(tiny.LANGUAGE_MODELS))
def test_the_self_check_passes_and_the_cpu_says_the_same(name):
    model = tiny.tiny_policy(name, std=0.05)
    forest = to_forest(tiny.random_groups(0, SHAPES))
    expected_M = model.logprobs(forest)
    model.to(DEVICE)
    assert check_policy_paths(model) < 1e-4
    torch.testing.assert_close(model.logprobs(forest).cpu(), expected_M, rtol=0, atol=1e-4)


def test_passes_over_a_part_draw_the_same_dropout(monkeypatch):
    model = tiny.tiny_policy("llama", attention_dropout=0.5).to(DEVICE).train()
    forest = dataclasses.replace(to_forest(tiny.random_groups(1, SHAPES)), part_tokens=25)
    seen, own = {}, model.hidden_of_row

    def hidden_of_row(ids_T, positions_T, plan):
        hidden_TD = own(ids_T, positions_T, plan)
        rows = plan.read_X.to(hidden_TD.device)
        seen.setdefault(tuple(ids_T.tolist()), []).append(hidden_TD[rows].detach())
        return hidden_TD

    def loss_of(outputs, some):
        loss = outputs.logprobs_M.square().sum()
        return loss, loss.detach()

    monkeypatch.setattr(model, "hidden_of_row", hidden_of_row)
    units = [[n] for n in range(forest.num_completions)]
    backward_in_parts(model, forest, units, loss_of)
    again = [passes for passes in seen.values() if len(passes) > 1]
    assert again
    for first, *others in again:
        assert all(torch.equal(first, other) for other in others)


def test_a_pass_that_is_made_for_others_draws_and_changes_nothing():
    model = tiny.tiny_policy("llama", attention_dropout=0.5).to(DEVICE).train()
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    idle_pass(model, FORWARD)
    assert all(weight.grad is None for weight in model.parameters())
    idle_pass(model, BACKWARD)
    assert not any(weight.grad.any() for weight in model.parameters())
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_products_of_bfloat16_are_exact_and_summed_in_float32(softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16().to(DEVICE).requires_grad_()
        for shape in ((16, 64), (200, 64), (200,))
    )
    targets = torch.randint(0, 200, (16,), generator=generator).to(DEVICE)
    rules = {"softcap": softcap, "logit_scale": 0.5, "temperature": 0.7}
    factors = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    exact = token_logprobs(factors[0], targets, factors[1], bias_V=factors[2], **rules)
    found = token_logprobs(hidden, targets, weight, bias_V=bias, chunk_size=5, **rules)
    assert found.logprobs_M.dtype == torch.float32
    torch.testing.assert_close(found.logprobs_M.double(), exact.logprobs_M, rtol=0, atol=1e-4)
    logits = all_logits(hidden, weight, bias_V=bias)
    wanted = (hidden.double() @ weight.double().T + bias.double()).detach()
    torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=1e-4)
    ours = torch.autograd.grad(found.logprobs_M.sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad(exact.logprobs_M.sum(), factors)
    for gradient, wanted in zip(ours, theirs, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - wanted).norm() <= 2e-2 * wanted.norm()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt-oss"])
def test_compiled_layers_compute_the_same(name):
    plain = tiny.tiny_policy(name, std=0.05, head_dim=16).to(DEVICE)
    model = copy.deepcopy(plain)
    assert compile_layers(model) is None
    for seed in (0, 1):
        forest = to_forest(tiny.random_groups(seed, SHAPES[seed:]))
        expected_M, found_M = (one(forest).logprobs_M for one in (plain, model))
        torch.testing.assert_close(found_M, expected_M, rtol=0, atol=1e-5)
        for one in (expected_M, found_M):
            one.square().sum().backward()
        torch.testing.assert_close(model.logprobs(forest), expected_M.detach(), rtol=0, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm()


def test_the_head_multiplies_in_the_precision_of_the_decoder():
    model = tiny.tiny_policy("qwen3", std=0.05, precision=torch.bfloat16).to(DEVICE)
    forest = to_forest(tiny.random_groups(0, SHAPES))
    low_M = model(forest).logprobs_M
    assert low_M.dtype == torch.float32
    low_M.sum().backward()
    assert model.head.weight.grad.dtype == torch.float32
    with model.in_full_precision():
        full_M = model.logprobs(forest)
    assert 0 < (low_M.detach() - full_M).abs().max() < 0.1
