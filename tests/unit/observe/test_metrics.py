import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.observe.metrics import (
    PREFERENCE_METRICS,
    attribute_metrics,
    is_lower_better,
    preference_metrics,
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Whole numbers, so that shifting a group changes no margin by rounding.
groups = st.lists(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 3)), min_size=1, max_size=5),
    min_size=1,
    max_size=8,
)


def split(groups_BG):
    scores_BG = [[float(score) for score, _ in group] for group in groups_BG]
    return scores_BG, [[rank for _, rank in group] for group in groups_BG]


def test_pairs_worked_by_hand():
    # Margins: 2 (right), -1 (wrong; the better one stands second), 0 (an exact tie, so wrong).
    metrics = preference_metrics(
        scores_BG=[[3.0, 1.0], [1.0, 0.0], [2.0, 2.0]],
        ranks_BG=[[0, 1], [1, 0], [0, 1]],
        lengths_BG=[[5, 4], [2, 1], [3, 3]],
    )
    confidences = [sigmoid(2), sigmoid(1), 0.5]  # each in a bin of its own
    assert metrics == pytest.approx(
        {
            "accuracy": 1 / 3,
            "rewards_chosen_mean": (3 + 0 + 2) / 3,
            "rewards_rejected_mean": (1 + 1 + 2) / 3,
            "rewards_mean": 9 / 6,
            # squares: 3: 2.25, 1: 0.25, 1: 0.25, 0: 2.25, 2: 0.25, 2: 0.25 -> 5.5
            "rewards_std": math.sqrt(5.5 / 6),
            "margin_mean": 1 / 3,
            # deviations 5/3, -4/3, -1/3 -> squares 25/9, 16/9, 1/9 -> 42/9
            "margin_std": math.sqrt(42 / 9 / 3),
            "score_ties": 1 / 3,
            "ece": ((1 - confidences[0]) + confidences[1] + confidences[2]) / 3,
            # scores 3 1 1 0 2 2 have the ranks 6 2.5 2.5 1 4.5 4.5
            # lengths 5 4 2 1 3 3 have the ranks 6 5 2 1 3.5 3.5
            # deviations from 3.5: (2.5 -1 -1 -2.5 1 1) and (2.5 1.5 -1.5 -2.5 0 0)
            # product 6.25 - 1.5 + 1.5 + 6.25 = 12.5; squares 16.5 and 17
            "score_length_correlation": 12.5 / math.sqrt(16.5 * 17),
            # longer side: first is the better, second is the worse, third neither, which is half
            "longer_wins_baseline": 0.5,
            "num_valid_samples": 3.0,
        },
        abs=1e-12,
    )


def test_a_list_of_three_counts_every_pair_and_top1():
    metrics = preference_metrics(
        # First list: the best has the highest score; of its 3 pairs (0,1), (0,2), (1,2) the last is
        # wrong. Second: two share the best rank, and the highest score is the worst one's.
        scores_BG=[[5.0, 1.0, 2.0], [1.0, 0.0, 3.0]],
        ranks_BG=[[0, 1, 2], [0, 0, 1]],
    )
    assert metrics["top1"] == 0.5
    assert preference_metrics([[2.0, 2.0, 0.0]], [[0, 1, 2]])["top1"] == 0.0, "a strict lead"
    # Equal best ones are one another's peers, not rivals.
    assert preference_metrics([[2.0, 2.0, 0.0]], [[0, 0, 1]])["top1"] == 1.0
    # With an unknown score nobody knows which is highest.
    assert "top1" not in preference_metrics([[2.0, math.nan, 0.0]], [[0, 1, 2]])
    assert metrics["num_valid_samples"] == 5.0
    assert metrics["accuracy"] == pytest.approx(2 / 5)
    assert metrics["margin_mean"] == pytest.approx((4 + 3 - 1 - 2 - 3) / 5)


@pytest.mark.parametrize(
    ("scores_BG", "ranks_BG"),
    [([], []), ([[1.0, 2.0]], [[0, 0]]), ([[1.0]], [[0]]), ([[]], [[]])],
)
def test_without_a_pair_nothing_is_measured(scores_BG, ranks_BG):
    assert preference_metrics(scores_BG, ranks_BG) == {"num_valid_samples": 0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_nonfinite_scores_are_left_out_and_counted(bad):
    metrics = preference_metrics(
        [[bad, 1.0], [2.0, 1.0], [3.0, bad, 1.0]],
        [[0, 1], [0, 1], [0, 1, 2]],
        lengths_BG=[[9, 9], [2, 1], [3, 9, 1]],
    )
    assert metrics["num_nonfinite"] == 2.0
    assert metrics["num_valid_samples"] == 2.0
    assert metrics["accuracy"] == 1.0
    assert metrics["rewards_mean"] == pytest.approx((1 + 2 + 1 + 3 + 1) / 5)
    assert all(map(math.isfinite, metrics.values()))
    assert {*metrics, "top1", "loss"} == set(PREFERENCE_METRICS)


def test_correlation_with_length_is_absent_where_undefined():
    same_length = preference_metrics([[1.0, 2.0]], [[0, 1]], lengths_BG=[[3, 3]])
    same_score = preference_metrics([[1.0, 1.0]], [[0, 1]], lengths_BG=[[3, 4]])
    no_lengths = preference_metrics([[1.0, 2.0]], [[0, 1]])
    for metrics in (same_length, same_score, no_lengths):
        assert "score_length_correlation" not in metrics
    assert "longer_wins_baseline" not in no_lengths
    # Monotone but not linear: Spearman is exactly 1.
    curved = preference_metrics([[0.0, 1.0], [8.0, 27.0]], [[1, 0], [1, 0]], [[1, 2], [3, 4]])
    assert curved["score_length_correlation"] == pytest.approx(1.0)


def test_std_survives_a_large_mean():
    # 30 +- 0.01, half each: the population deviation is 0.01. In float32 E[x^2] - E[x]^2 is noise.
    scores_BG = [[30.01, 29.99] for _ in range(8)]
    metrics = preference_metrics(scores_BG, [[0, 1]] * 8)
    assert metrics["rewards_std"] == pytest.approx(0.01, rel=1e-6)
    assert metrics["margin_std"] == 0.0
    assert preference_metrics([[0.1, 0.1, 0.1]], [[0, 1, 2]])["rewards_std"] == 0.0


def ece(*margins):
    return preference_metrics([[margin, 0.0] for margin in margins], [[0, 1]] * len(margins))["ece"]


def test_calibration_error_worked_by_hand():
    # sigmoid(0.1) = 0.525 and sigmoid(0.15) = 0.537 share the first bin [0.50, 0.55): one right,
    # one wrong, so |1/2 - mean| * 2 pairs. sigmoid(3) = 0.953 is alone in the last [0.95, 1].
    first = abs(0.5 - (sigmoid(0.1) + sigmoid(0.15)) / 2)
    expected = (2 * first + (1 - sigmoid(3))) / 3
    assert ece(0.1, -0.15, 3.0) == pytest.approx(expected, abs=1e-12)


def test_calibration_error_at_the_ends():
    assert ece(1000.0) == 0.0  # sure and right; no overflow either
    assert ece(-1000.0) == 1.0  # sure and wrong
    assert ece(0.0) == 0.5  # a tie: confidence 1/2, wrong


@given(groups, st.lists(st.integers(-1000, 1000), min_size=8, max_size=8))
def test_shifting_a_groups_scores_changes_no_comparison(groups_BG, shifts_B):
    scores_BG, ranks_BG = split(groups_BG)
    shifted_BG = [
        [score + shift for score in scores_G]
        for scores_G, shift in zip(scores_BG, shifts_B, strict=False)
    ]
    before = preference_metrics(scores_BG, ranks_BG)
    after = preference_metrics(shifted_BG, ranks_BG)
    invariant = {"accuracy", "score_ties", "margin_mean", "margin_std", "ece", "top1"}
    assert before.keys() == after.keys()
    for name in invariant & before.keys():
        assert before[name] == after[name]


@given(groups, st.randoms(use_true_random=False))
def test_order_of_groups_and_completions_does_not_matter(groups_BG, random):
    scores_BG, ranks_BG = split(groups_BG)
    lengths_BG = [[abs(int(score)) % 7 for score in scores_G] for scores_G in scores_BG]
    mixed = [
        list(zip(*group, strict=True))
        for group in zip(scores_BG, ranks_BG, lengths_BG, strict=True)
    ]
    for group in mixed:
        random.shuffle(group)
    random.shuffle(mixed)
    parts = [[[row[part] for row in group] for group in mixed] for part in range(3)]
    before = preference_metrics(scores_BG, ranks_BG, lengths_BG)
    after = preference_metrics(parts[0], parts[1], parts[2])
    assert after == pytest.approx(before, rel=1e-12, abs=1e-12)


def test_sizes_must_agree():
    with pytest.raises(ValueError, match=r"scores \[2\] and ranks \[3\]"):
        preference_metrics([[1.0, 2.0]], [[0, 1, 2]])
    with pytest.raises(ValueError, match="lengths"):
        preference_metrics([[1.0, 2.0]], [[0, 1]], [[1], [2]])


def test_attributes_worked_by_hand():
    metrics = attribute_metrics(
        predictions_NK=[[1.0, 0.0], [2.0, 5.0], [3.0, 7.0]],
        targets_NK=[[2.0, math.nan], [2.0, 4.0], [5.0, math.nan]],
        names=["helpfulness", "verbosity"],
    )
    # helpfulness: squares 1, 0, 4. Deviations (-1 0 1) and (-1 -1 2): 3 / sqrt(2 * 6).
    assert metrics == pytest.approx(
        {
            "mse/helpfulness": 5 / 3,
            "pearson/helpfulness": 3 / math.sqrt(12),
            "mse/verbosity": 1.0,  # one rating: no correlation
        }
    )


def test_attributes_without_ratings_have_no_metrics():
    assert attribute_metrics([[1.0]], [[math.nan]], ["helpfulness"]) == {}
    assert attribute_metrics([], [], ["helpfulness"]) == {}
    # A constant prediction correlates with nothing.
    constant = attribute_metrics([[1.0], [1.0]], [[1.0], [3.0]], ["a"])
    assert constant == {"mse/a": 2.0}


def test_nonfinite_predictions_are_left_out_and_counted():
    metrics = attribute_metrics([[math.nan], [1.0], [math.inf]], [[1.0], [3.0], [2.0]], ["a"])
    assert metrics == {"mse/a": 4.0, "num_nonfinite": 2.0}
    metrics = preference_metrics([[math.nan, 1.0]], [[0, 1]])
    assert metrics == {"num_valid_samples": 0.0, "num_nonfinite": 1.0}


@pytest.mark.parametrize(
    ("name", "is_lower"),
    [
        ("loss", True),
        ("val:validation-default_loss", True),
        ("validation-default/ece", True),
        ("validation-default_mse/helpfulness", True),
        ("train/num_nonfinite", True),
        ("timing/train/total_step_time", True),
        ("val:validation-loss_accuracy", False),
        ("validation-hard-time/top1", False),
        ("validation-default_pearson/loss", False),
        ("timing/train/valid_tokens_per_sec_per_gpu", False),
        ("flossy", False),
    ],
)
def test_whether_lower_is_better(name, is_lower):
    assert is_lower_better(name) == is_lower


def test_correlation_of_tiny_differences():
    tiny = attribute_metrics([[0.0], [1e-200], [2e-200]], [[0.0], [1.0], [2.0]], ["a"])
    assert tiny["pearson/a"] == pytest.approx(1.0)
