"""Log-probabilities by hand and by autograd; the one shift; no matrix of all logits in memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from laurel.data.forest import to_forest, to_padded
from laurel.errors import DataError
from laurel.models.forest.outputs import (
    all_logits,
    gradients_on_gpu,
    predictors,
    reduce_on_gpu,
    token_logprobs,
    usual_chunk_size,
)
from laurel.planning.memory import CHUNK_LOGITS

HEADS = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "scaled": {"logit_scale": 3.0, "temperature": 1.5},
    "capped": {"softcap": 2.0},
    "all": {"softcap": 2.0, "temperature": 0.7, "logit_scale": 0.3},
}


def drawn(tokens=7, width=5, vocabulary=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    return hidden, weight, bias, torch.randint(0, vocabulary, (tokens,), generator=generator)


def plainly(hidden, weight, bias, *, temperature=1.0, softcap=None, logit_scale=1.0):
    """Log-probabilities of the whole vocabulary, `[M, V]`, as anyone would write them."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def test_a_distribution_by_hand():
    """Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8; the squares' at temperature 1/2."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    hidden, targets = torch.ones(3, 1), torch.tensor([0, 1, 2])
    out = token_logprobs(hidden, targets, weight, with_entropy=True)
    torch.testing.assert_close(out.logprobs_M.exp(), torch.tensor([0.125, 0.25, 0.625]))
    entropy = -sum(p * math.log(p) for p in (0.125, 0.25, 0.625))
    torch.testing.assert_close(out.entropy_M, torch.full((3,), entropy))
    cold = token_logprobs(hidden, targets, weight, temperature=0.5).logprobs_M.exp()
    torch.testing.assert_close(cold, torch.tensor([1.0, 4.0, 25.0]) / 30)
    assert token_logprobs(hidden, targets, weight).entropy_M is None


def test_entropy_by_hand_at_its_ends():
    """Nothing known: the logarithm of the vocabulary. All known: 0, and no NaN."""
    weight = torch.eye(4)
    hidden = torch.tensor([[0.0, 0, 0, 0], [1e4, 0, 0, 0]])
    out = token_logprobs(hidden, torch.tensor([2, 0]), weight, with_entropy=True)
    torch.testing.assert_close(out.entropy_M, torch.tensor([math.log(4), 0.0]))
    torch.testing.assert_close(out.logprobs_M, torch.tensor([-math.log(4), 0.0]))
    assert not out.entropy_M.requires_grad


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_values_and_gradients_are_those_of_the_plain_formula(kind, has_bias):
    hidden, weight, bias, targets = drawn()
    bias = bias if has_bias else None
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    out = token_logprobs(
        hidden, targets, weight, bias_V=bias, chunk_size=3, with_entropy=True, **HEADS[kind]
    )
    whole = plainly(hidden, weight, bias, **HEADS[kind])
    expected = whole.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(out.logprobs_M, expected, rtol=0, atol=1e-12)
    entropy = -(whole.exp() * whole).sum(1).detach()
    torch.testing.assert_close(out.entropy_M, entropy, rtol=0, atol=1e-12)
    by_logprobs = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    found = torch.autograd.grad(out.logprobs_M, inputs, by_logprobs)
    wanted = torch.autograd.grad(expected, inputs, by_logprobs)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_token_without_a_gradient_gives_none():
    """And the others get what they would get without it."""
    hidden, weight, _, targets = drawn()
    rows = torch.tensor([1, 4])
    by_logprobs = torch.zeros(7, dtype=torch.float64)
    by_logprobs[rows] = torch.tensor([2.0, -1.0], dtype=torch.float64)
    out = token_logprobs(hidden, targets, weight, chunk_size=2).logprobs_M
    by_hidden, by_weight = torch.autograd.grad(out, (hidden, weight), by_logprobs)
    few = token_logprobs(hidden[rows], targets[rows], weight).logprobs_M
    wanted = torch.autograd.grad(few, (hidden, weight), by_logprobs[rows])
    torch.testing.assert_close(by_hidden, wanted[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(by_weight, wanted[1], rtol=0, atol=1e-14)
    none = token_logprobs(hidden, targets, weight).logprobs_M * 0.0
    for gradient in torch.autograd.grad(none.sum(), (hidden, weight)):
        assert not gradient.any()


def test_only_what_is_trained_gets_a_gradient():
    hidden, weight, bias, targets = drawn()
    out = token_logprobs(hidden, targets, weight.detach(), bias_V=bias.detach()).logprobs_M
    (by_hidden,) = torch.autograd.grad(out.sum(), hidden)
    whole = plainly(hidden, weight, bias).gather(1, targets[:, None]).sum()
    torch.testing.assert_close(by_hidden, torch.autograd.grad(whole, hidden)[0], rtol=0, atol=1e-12)
    out = token_logprobs(hidden.detach(), targets, weight, bias_V=bias).logprobs_M
    by_weight, by_bias = torch.autograd.grad(out.sum(), (weight, bias))
    whole = plainly(hidden, weight, bias).gather(1, targets[:, None]).sum()
    wanted = torch.autograd.grad(whole, (weight, bias))
    torch.testing.assert_close(by_weight, wanted[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(by_bias, wanted[1], rtol=0, atol=1e-12)
    assert not token_logprobs(hidden.detach(), targets, weight.detach()).logprobs_M.requires_grad


def test_inputs_in_bfloat16_are_summed_in_float32():
    """Logits rounded to bfloat16 would be off by up to a hundredth and more; these are not."""
    hidden, weight, bias, targets = drawn(16, 64, 200, dtype=torch.bfloat16)
    exact = plainly(hidden.double(), weight.double(), bias.double())
    exact = exact.gather(1, targets[:, None])[:, 0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = token_logprobs(hidden, targets, weight, bias_V=bias).logprobs_M
        logits = all_logits(hidden, weight, bias_V=bias)
    assert out.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)
    rounded = (hidden @ weight.T + bias).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (rounded.double() - exact).abs().max() > 1e-2
    gradients = torch.autograd.grad(out.sum(), (hidden, weight, bias))
    wanted = torch.autograd.grad(exact.sum(), (hidden, weight, bias))
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


class Largest(TorchDispatchMode):
    """Remembers how large the largest tensor was that any operation made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_is_larger_than_a_chunk_forward_or_backward(kind, with_entropy):
    """40 tokens of 3,000 words would be 120,000 logits; with chunks of 4, no tensor passes 12,000.

    The same measurement sees the whole matrix when one chunk may hold it.
    """
    hidden, weight, bias, targets = drawn(40, 3, 3000, dtype=torch.float32)
    for chunk_size, expected in ((4, 12_000), (40, 120_000)):
        with Largest() as largest:
            out = token_logprobs(
                hidden,
                targets,
                weight,
                bias_V=bias,
                chunk_size=chunk_size,
                with_entropy=with_entropy,
                **HEADS[kind],
            )
            out.logprobs_M.square().sum().backward()
        assert largest.numel == expected


def test_a_chunk_is_about_16_million_logits_on_a_cpu():
    vocabulary = CHUNK_LOGITS["cpu"] // 4
    weight, targets = torch.zeros(vocabulary, 1), torch.zeros(9, dtype=torch.int64)
    with Largest() as largest, torch.no_grad():
        token_logprobs(torch.zeros(9, 1), targets, weight)
    assert largest.numel == 4 * vocabulary == 2**24


def test_chunks_on_a_gpu_hold_16_times_as_much_and_are_equally_long():
    """2**28 // 151,936 = 1,766 tokens at most: 4,096 tokens are 3 chunks of 1,366 or fewer."""
    assert usual_chunk_size(151_936, "cpu", num_tokens=4096) == 110
    assert usual_chunk_size(151_936, "cuda", num_tokens=4096) == 1366
    assert usual_chunk_size(151_936, "cuda", num_tokens=1766) == 1766
    # The plan holds the longest chunk of any micro-batch.
    longest = max(usual_chunk_size(151_936, "cuda", num_tokens=n) for n in range(1, 4097))
    assert longest == CHUNK_LOGITS["cuda"] // 151_936 == 1766
    assert usual_chunk_size(2**29, "cuda", num_tokens=5) == 1
    assert usual_chunk_size(32_768, "cuda", num_tokens=0) == 1
    # Meta tensors stand for those of a GPU.
    hidden, weight = (torch.empty(*shape, device="meta") for shape in ((4096, 2), (151_936, 2)))
    with Largest() as largest, torch.no_grad():
        token_logprobs(hidden, torch.empty(4096, dtype=torch.int64, device="meta"), weight)
    assert largest.numel == 1366 * 151_936


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_the_reductions_of_a_gpu_are_those_of_the_plain_formula(kind):
    hidden, weight, _, targets = drawn()
    products = (hidden @ weight.T).detach().requires_grad_()
    cap = HEADS[kind].get("softcap")
    finished = products if cap is None else cap * torch.tanh(products / cap)
    whole = finished.log_softmax(-1)
    expected = whole.gather(1, targets[:, None])[:, 0]
    entropy = torch.empty(len(targets), dtype=torch.float64)
    logprobs, logsum = reduce_on_gpu(finished.detach().clone(), targets, entropy)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(logsum, finished.logsumexp(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(1), rtol=0, atol=1e-12)
    by_logprobs = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    slopes = None if cap is None else 1 - (finished.detach() / cap) ** 2
    found = gradients_on_gpu(finished.detach().clone(), targets, by_logprobs, slopes)
    (wanted,) = torch.autograd.grad(expected, products, by_logprobs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 2**16), share_prompts=st.booleans())
def test_every_token_is_predicted_by_the_one_before_it(shapes, seed, share_prompts):
    groups = tiny.random_groups(seed, shapes)
    forest, rows = to_forest(groups, share_prompts=share_prompts), to_padded(groups, pad_id=0)
    before, targets = [], []
    for group in groups:
        for ids in group.branches_ids_G:
            before += [group.trunk_ids[-1], *ids[:-1]]
            targets += list(ids)
    for batch, ids in ((forest, forest.ids_T), (rows, rows.ids_NL.flatten())):
        index_M, targets_M = predictors(batch)
        assert targets_M.tolist() == targets
        assert ids[index_M].tolist() == before
    index_M, _ = predictors(forest)
    tokens = [t for tree in forest.trees for branch in tree.nodes[1:] for t in range(*branch)]
    assert (forest.positions_T[index_M] + 1).tolist() == forest.positions_T[tokens].tolist()


def test_a_completion_without_a_prompt_is_an_error():
    groups = tiny.random_groups(0, [(3, [2]), (0, [3])])
    for batch in (to_forest(groups), to_padded(groups, pad_id=0)):
        with pytest.raises(DataError, match=r"has no prompt.*at least one token"):
            predictors(batch)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_gradients_are_those_of_finite_differences(kind):
    hidden, weight, bias, targets = drawn(tokens=4, width=3, vocabulary=6)

    def logprobs(hidden, weight, bias):
        out = token_logprobs(hidden, targets, weight, bias_V=bias, chunk_size=3, **HEADS[kind])
        return out.logprobs_M

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))


def test_predictors_by_hand():
    #  trunk a: 0 1 2 | 3 4 | 5 ; trunk b: 6 | 7 8 9
    groups = tiny.random_groups(0, [(3, [2, 1]), (1, [3])])
    forest, rows = to_forest(groups), to_padded(groups, pad_id=0)
    index, targets = predictors(forest)
    assert index.tolist() == [2, 3, 2, 6, 7, 8]
    assert targets.tolist() == forest.ids_T[[3, 4, 5, 7, 8, 9]].tolist()
    assert index.dtype == targets.dtype == torch.int64
    flat, same = predictors(rows)  # rows of 5, 4 and 4 tokens, all 5 wide
    assert flat.tolist() == [2, 3, 7, 10, 11, 12]
    assert same.tolist() == targets.tolist()
