"""Tokens drawn by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.generation.transformers import batch
from laurel.generation.transformers.batch import SamplingRows, keep_likeliest, sample_tokens

HALF = torch.tensor([0.5, 0.25, 0.125, 0.125])


def rows(count, *, temperature=1.0, top_p=1.0, top_k=0):
    is_filtered = top_p < 1 or top_k > 0
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.full((count,), top_k),
        tuple(range(count)) if is_filtered else (),
        temperature == 0,
    )


def drawn(weights, uniforms, **how):
    logits_NV = weights.log().expand(len(uniforms), -1).clone()
    numbers_N = torch.tensor(uniforms, dtype=torch.float64)
    return sample_tokens(logits_NV, rows(len(uniforms), **how), numbers_N)


@pytest.mark.parametrize(
    ("how", "uniforms", "tokens", "shares"),
    [
        # Cumulative: 0.5, 0.75, 0.875, 1.
        (
            {},
            [0.0, 0.499, 0.501, 0.749, 0.751, 0.874, 0.876, 1 - 2**-53],
            [0, 0, 1, 1, 2, 2, 3, 3],
            [0.5, 0.25, 0.125, 0.125],
        ),
        # Squares of 4 : 2 : 1 : 1 at half the temperature are 16 : 4 : 1 : 1, of 22.
        (
            {"temperature": 0.5},
            [15.9 / 22, 16.1 / 22, 20.1 / 22, 21.1 / 22],
            [0, 1, 2, 3],
            [16 / 22, 4 / 22, 1 / 22, 1 / 22],
        ),
        ({"temperature": 0.0}, [0.01, 0.99], [0, 0], [0.5, 0, 0, 0]),
        # Of the first two, 0.5 : 0.25, the first takes 2/3; what is reported is not cut.
        ({"top_k": 2}, [0.66, 0.67, 0.999], [0, 1, 1], [0.5, 0.25, 0, 0]),
    ],
    ids=["plain", "temperature", "greedy", "tail"],
)
def test_the_token_is_where_the_cumulative_distribution_passes_the_number(
    how, uniforms, tokens, shares
):
    found = drawn(HALF, uniforms, **how)
    assert found.tokens_N.tolist() == tokens
    expected = [math.log(shares[token]) for token in tokens]
    assert found.logprobs_N.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.logprobs_N.dtype == torch.float32


def test_a_token_without_probability_is_never_drawn():
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    found = drawn(weights, [0.0, 0.5, 1 - 2**-53])
    assert found.tokens_N.tolist() == [1, 3, 3]


@pytest.mark.parametrize(
    ("weights", "top_k", "top_p", "kept"),
    [
        ([4, 3, 2, 1], 2, 1.0, [4, 3, 0, 0]),
        ([4, 3, 2, 1], 9, 1.0, [4, 3, 2, 1]),
        ([4, 3, 2, 1], 0, 0.3, [4, 0, 0, 0]),
        ([4, 3, 2, 1], 0, 0.41, [4, 3, 0, 0]),
        ([4, 3, 2, 1], 0, 0.95, [4, 3, 2, 1]),
        ([4, 3, 2, 1], 3, 0.76, [4, 3, 0, 0]),  # of 9: 4/9 is too little, 7/9 is enough
        ([4, 3, 2, 1], 3, 0.79, [4, 3, 2, 0]),
        ([4, 3, 2, 1], 0, 1e-9, [4, 0, 0, 0]),
        ([2, 2, 2, 1], 1, 1.0, [2, 2, 2, 0]),  # as likely as the last one kept
    ],
)
def test_the_likeliest_are_kept(weights, top_k, top_p, kept):
    order = [2, 0, 3, 1]
    rows_NV = torch.tensor([weights], dtype=torch.float32)[:, order]
    found = keep_likeliest(rows_NV, torch.tensor([top_k]), torch.tensor([top_p]))
    assert found[0].tolist() == [float(kept[i]) for i in order]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.sampled_from([5, 255, 256, 257, 2000]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    top_k=st.sampled_from([0, 1, 3, 300]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_any_tail_is_that_of_a_full_sort(seed, size, spread, top_k, top_p):
    """Also where the share is larger than what is tried first."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(1, size, generator=generator) * spread).exp()
    top_k = min(top_k, size)
    found = keep_likeliest(weights, torch.tensor([top_k]), torch.tensor([top_p]))[0]
    order = weights[0].double().sort(descending=True, stable=True)
    kept = order.values[: top_k or size]
    before = kept.cumsum(0) - kept
    edge = float(torch.tensor(top_p)) * float(kept.sum())
    count = len(kept) if top_p == 1.0 else int((before < edge).sum())
    assert set(found.nonzero()[:, 0].tolist()) >= set(order.indices[: count - 1].tolist())
    assert abs(int((found > 0).sum()) - count) <= 1  # a sum may fall on the edge itself
    assert torch.equal(found[found > 0], weights[0][found > 0])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(2, 9))
def test_a_row_does_not_depend_on_the_others(seed, count):
    generator = torch.Generator().manual_seed(seed)
    logits_NV = torch.randn(count, 600, generator=generator) * 3
    uniform_N = torch.rand(count, generator=generator, dtype=torch.float64)
    how = SamplingRows(
        torch.linspace(0, 2, count),
        torch.linspace(0.2, 1, count),
        torch.arange(count) * 7,
        tuple(range(count)),
        True,
    )
    together = sample_tokens(logits_NV.clone(), how, uniform_N)
    for row in range(count):
        one = slice(row, row + 1)
        alone_how = SamplingRows(
            how.temperature_N[one], how.top_p_N[one], how.top_k_N[one], (0,), row == 0
        )
        alone = sample_tokens(logits_NV[one].clone(), alone_how, uniform_N[one])
        assert alone.tokens_N.item() == together.tokens_N[row].item()
        assert alone.logprobs_N.item() == together.logprobs_N[row].item()


def test_many_rows_go_through_in_chunks():
    width = batch.NUMBERS_AT_A_TIME // 2  # so two rows are a chunk
    logits_NV = torch.full((5, width), -100.0)
    for row in range(5):
        logits_NV[row, 3 * row] = 0.0
    how = SamplingRows(torch.ones(5), torch.ones(5), torch.tensor([0, 0, 0, 1, 0]), (3,), False)
    found = sample_tokens(logits_NV, how, torch.full((5,), 0.5, dtype=torch.float64))
    assert found.tokens_N.tolist() == [0, 3, 6, 9, 12]


def test_logits_that_are_not_numbers_show_in_the_log_probabilities():
    logits_NV = torch.zeros(2, 4)
    logits_NV[1, 2] = torch.nan
    found = sample_tokens(logits_NV, rows(2), torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert found.logprobs_N.isfinite().tolist() == [True, False]
