"""GMPO, SAPO and DPPO against numbers worked by hand, and what they refuse."""

import math

import pytest
import torch

from laurel.config.grpo import PolicyLossConfig
from laurel.config.grpo_run import GRPORun
from policy_batches import gradient, labels, loss_of, outputs

torch.set_num_threads(1)


def of_token(old, current, advantage, **chosen):
    """The loss and the gradient of one token, by its probabilities under both policies."""
    loss = loss_of(token_level_loss=False, **chosen)
    old_log = [[math.log(old)]]
    batch, given = [labels([advantage], old_log, old=old_log)], outputs([math.log(current)])
    value = float(loss(given, batch, num_groups=1.0).loss.detach())
    return [value, *gradient(loss, given, batch)]


def near(values):
    return pytest.approx(values, rel=1e-6, abs=1e-12)  # labels are float32


def test_gmpo_by_hand():
    # Log-ratios 0.5 and -0.3 are 0.4 and -0.3 within the range: mean 0.05. The worse completion has
    # the same ratios, and what would lower 0.5 is not cut: mean 0.1.
    old = [[-1.0, -2.0], [-1.0, -2.0]]
    batch = [labels([2.0, -1.0], old, old=old)]
    loss = loss_of(loss_type="gmpo", token_level_loss=False)
    given = outputs([-0.5, -2.3, -0.5, -2.3])
    found = loss(given, batch, num_groups=loss.count(batch))
    better, worse = math.exp(0.05), math.exp(0.1)
    assert float(found.loss.detach()) == near((-2 * better + worse) / 2)
    assert gradient(loss, given, batch) == near([0, -better, worse / 2, worse / 2])
    assert (
        loss.metrics({k: float(v) for k, v in found.sums.items()})
        .keys()
        .isdisjoint({"clip_ratio/low_mean", "probs_ratio_clamped"})
    )


def test_gmpo_with_a_range_of_its_own():
    # The range [-0.1, 0.2]: -0.3 is cut to -0.1 where the advantage is negative.
    old = [[-1.0, -2.0]]
    batch = [labels([-1.0], old, old=old)]
    loss = loss_of(
        loss_type="gmpo", token_level_loss=False, gmpo={"clip_low": 0.1, "clip_high": 0.2}
    )
    given = outputs([-0.5, -2.3])
    assert float(loss(given, batch, num_groups=1.0).loss.detach()) == near(math.exp(0.2))
    assert gradient(loss, given, batch) == near([math.exp(0.2) / 2, 0])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("old", "current", "advantage", "tau"),
    [(0.4, 0.6, 2.0, 1.0), (0.4, 0.2, 2.0, 1.0), (0.4, 0.6, -1.0, 1.05), (0.4, 0.2, -1.0, 1.05)],
)
def test_sapo_by_hand(old, current, advantage, tau):
    ratio = current / old
    gate = sigmoid(tau * (ratio - 1))
    expected = [-advantage * gate * 4 / tau, -advantage * 4 * gate * (1 - gate) * ratio]
    assert of_token(old, current, advantage, loss_type="sapo") == near(expected)


def test_the_temperatures_of_sapo():
    chosen = {"loss_type": "sapo", "sapo": {"tau_positive": 2.0, "tau_negative": 4.0}}
    # Ratio 1.5: gates of 2 x 0.5 and 4 x 0.5.
    assert of_token(0.4, 0.6, 1.0, **chosen)[0] == near(-sigmoid(1.0) * 2)
    assert of_token(0.4, 0.6, -1.0, **chosen)[0] == near(sigmoid(2.0))


@pytest.mark.parametrize(
    ("old", "current", "advantage", "weight"),
    [
        (0.5, 0.6, 2.0, 1.2),  # 0.1 apart
        (0.5, 0.7, 2.0, 0.0),  # 0.2 apart, and it would go on
        (0.5, 0.7, -1.0, 1.4),  # it comes back
        (0.5, 0.3, -1.0, 0.0),
        (0.5, 0.3, 2.0, 0.6),
        # PPO would cut both ratios, of 3 and 1/3: rare tokens, which hardly move the policy.
        (0.001, 0.003, 2.0, 3.0),
        (0.003, 0.001, -1.0, 1 / 3),
        (0.001, 0.1, 2.0, 20.0),  # a ratio of 100
    ],
)
def test_dppo_of_total_variation(old, current, advantage, weight):
    expected = [-advantage * weight * math.log(current), -advantage * weight]
    assert of_token(old, current, advantage, loss_type="dppo") == near(expected)


def test_dppo_of_the_kl_divergence():
    # 0.5 log(0.5 / 0.7) + 0.5 log(0.5 / 0.3) = 0.0872.
    for high, weight in ((0.088, 1.4), (0.087, 0.0)):
        chosen = {"loss_type": "dppo", "dppo": {"divergence": "kl", "high": high}}
        assert of_token(0.5, 0.7, 2.0, **chosen)[1] == near(-2 * weight)
        assert of_token(0.5, 0.7, -2.0, **chosen)[1] == near(2 * 1.4)
    # The same distance downwards.
    for low, weight in ((0.088, 0.6), (0.087, 0.0)):
        chosen = {"loss_type": "dppo", "dppo": {"divergence": "kl", "low": low}}
        assert of_token(0.5, 0.3, -2.0, **chosen)[1] == near(2 * weight)


def test_certain_tokens_have_a_finite_divergence():
    for divergence in ("tv", "kl"):
        chosen = {"loss_type": "dppo", "dppo": {"divergence": divergence}}
        assert of_token(1.0, 1.0, 2.0, **chosen) == near([0.0, -2.0])
        assert of_token(1.0, 0.5, 2.0, **chosen) == near([math.log(2.0), -1.0])
        assert all(map(math.isfinite, of_token(0.5, 1.0, 2.0, **chosen)))


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"loss_type": "gmpo"}, "token_level_loss"),
        (
            {"loss_type": "gmpo", "token_level_loss": False, "normalizer": "tokens"},
            "by their length",
        ),
        ({"loss_type": "sapo", "ratio_clip_max": 0.28}, "loss_fn.sapo"),
        ({"loss_type": "dppo", "ratio_clip_c": 3.0}, "loss_fn.dppo"),
        *(
            (
                {"loss_type": name, "token_level_loss": False, "force_on_policy_ratio": True},
                "force_on_policy_ratio",
            )
            for name in ("gmpo", "sapo", "dppo")
        ),
        *(
            (
                {
                    "loss_type": name,
                    "token_level_loss": False,
                    "sequence_level_importance_ratios": True,
                },
                "GSPO",
            )
            for name in ("gmpo", "sapo", "dppo")
        ),
    ],
)
def test_what_does_not_fit_is_refused(chosen, named):
    with pytest.raises(ValueError, match=named):
        PolicyLossConfig(**chosen)


def test_advantages_of_steps_need_losses_of_tokens():
    loss = {"loss_type": "gmpo", "token_level_loss": False}
    with pytest.raises(ValueError, match="per_step"):
        GRPORun.model_validate({"loss_fn": loss, "grpo": {"adv_estimator": {"per_step": True}}})
