"""What may not change the loss of a batch: how it is split, ordered and rounded on the way."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.reward_model import LossConfig
from laurel.training.losses import RewardLoss
from laurel.types import Preference, group_of

NAN = math.nan


def judged(*ranks, **fields):
    """A judged group; only what the loss reads is filled in."""
    group = group_of([], ["answer"] * len(ranks), group_id="g")
    return Preference(group=group, ranks_G=ranks, **fields)


def loss_of(**chosen):
    return RewardLoss(LossConfig(**chosen))


EVERY_SETTING: dict[str, dict[str, Any]] = {
    "bradley_terry": {"use_margin": True, "label_smoothing": 0.1},
    "centred": {"center_rewards_coefficient": 0.01},
    "plackett_luce": {"type": "plackett_luce", "center_rewards_coefficient": 0.01},
    "davidson": {"type": "davidson", "use_margin": True, "label_smoothing": 0.1},
    "rao_kupper": {"type": "rao_kupper", "tie_parameter": 0.3},
    "regression": {"type": "regression"},
}
every_setting = pytest.mark.parametrize("chosen", EVERY_SETTING.values(), ids=EVERY_SETTING.keys())


@every_setting
def test_scores_of_lower_precision_and_autocast_change_nothing(chosen):
    loss, batch = loss_of(**chosen), [judged(0, 1), judged(1, 0, 1)]
    if chosen.get("type") == "regression":
        ratings = [((1.0, NAN), (0.3, 0.1)), ((1.0, 2.0),) * 3]
        batch = [judged(*p.ranks_G, attributes_GK=r) for p, r in zip(batch, ratings, strict=True)]
        loss = RewardLoss(LossConfig(**chosen), reward_weights_K=(0.1, 0.7))
    half = torch.linspace(-1.3, 2.1, 10).view(5, 2).bfloat16()
    half = half if chosen.get("type") == "regression" else half[:, :1]

    expected = loss(half.float(), batch, num_groups=2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(half, batch, num_groups=2.0)

    assert found.loss.dtype == torch.float32
    assert torch.equal(found.loss, expected.loss)
    assert found.sums == expected.sums


@every_setting
def test_a_micro_batch_without_a_lesson_has_no_loss_and_no_gradient(chosen):
    loss, rank = loss_of(**chosen), judged(0)
    # A single completion without ratings; its score is not even finite.
    scores = torch.full((1, 1), math.inf, requires_grad=True)
    output = loss(scores, [rank], num_groups=8.0)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0.0]]
    empty = torch.zeros((0, 1), requires_grad=True)
    loss(empty, [], num_groups=8.0).loss.backward()
    assert empty.grad is not None


@st.composite
def batches(draw):
    """A batch, the scores of its completions for two attributes, and where it is cut."""
    score = st.floats(-20, 20, allow_nan=False)
    batch: list[Preference] = []
    for _ in range(draw(st.integers(1, 6))):
        ranks = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        rating = st.one_of(score, st.just(NAN))
        ratings = draw(st.none() | st.tuples(*[st.tuples(rating, rating)] * len(ranks)))
        batch.append(
            judged(
                *ranks,
                margin=draw(st.floats(0, 3)),
                target=draw(st.floats(0.5, 1)),
                attributes_GK=ratings,
            )
        )
    size = sum(len(preference.ranks_G) for preference in batch)
    scores = draw(st.lists(st.tuples(score, score).map(list), min_size=size, max_size=size))
    cuts = draw(st.lists(st.integers(0, len(batch)), max_size=3))
    return batch, scores, [0, *sorted(cuts), len(batch)]


@every_setting
@given(drawn=batches())
@settings(max_examples=40, deadline=None)
def test_splitting_a_batch_changes_neither_loss_nor_gradient(chosen, drawn):
    batch, rows, cuts = drawn
    kind = chosen.get("type")
    if kind == "plackett_luce":
        batch = [judged(*preference.ranks_G) for preference in batch]
    loss = loss_of(**chosen)
    num_groups = max(loss.count(batch), 1.0)
    width = 2 if kind == "regression" else 1
    whole = torch.tensor(rows, dtype=torch.float64)[:, :width].requires_grad_()
    parts = whole.detach().clone().requires_grad_()

    expected = loss(whole, batch, num_groups=num_groups)
    expected.loss.backward()
    total, row = 0.0, 0
    for start, end in pairwise(cuts):
        size = sum(len(preference.ranks_G) for preference in batch[start:end])
        output = loss(parts[row : row + size], batch[start:end], num_groups=num_groups)
        output.loss.backward()
        total, row = total + float(output.loss.detach()), row + size

    assert sum(loss.count(batch[a:b]) for a, b in pairwise(cuts)) == loss.count(batch)
    assert total == pytest.approx(float(expected.loss.detach()), rel=1e-12, abs=1e-12)
    assert whole.grad is not None
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)


@given(drawn=batches(), random=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_completions_does_not_matter(drawn, random):
    batch, rows, _ = drawn
    for chosen in ({"use_margin": True}, {"type": "plackett_luce"}, {"type": "rao_kupper"}):
        loss, shuffled, order, row = loss_of(**chosen), [], [], 0
        original = [judged(*preference.ranks_G, margin=preference.margin) for preference in batch]
        for preference in original:
            places = list(range(len(preference.ranks_G)))
            random.shuffle(places)
            ranks = [preference.ranks_G[place] for place in places]
            shuffled.append(judged(*ranks, margin=preference.margin))
            order += [row + place for place in places]
            row += len(places)
        scores = torch.tensor(rows, dtype=torch.float64)[:, :1]
        one = loss(scores, original, num_groups=1.0)
        other = loss(scores[order], shuffled, num_groups=1.0)
        torch.testing.assert_close(other.loss, one.loss, rtol=1e-12, atol=1e-12)
        assert loss.metrics(other.sums) == pytest.approx(loss.metrics(one.sums), rel=1e-12)
