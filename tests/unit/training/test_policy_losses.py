"""Every option of the policy's loss, by hand."""

import math

import numpy as np
import pytest
import torch

from laurel.models.forest.outputs import TokenOutputs
from laurel.training.policy_loss import DemonstrationLabels, DemonstrationLoss
from policy_batches import gradient, labels, loss_of, outputs

torch.set_num_threads(1)


def per_token(ratios, advantages, **chosen):
    """Loss and gradient of completions of one token whose old log-probability was -1."""
    loss = loss_of(**chosen)
    values, slopes = [], []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        batch = [labels([advantage], [[-1.0]], old=[[-1.0]])]
        given = outputs([-1.0 + math.log(ratio)])
        values.append(float(loss(given, batch, num_groups=1.0).loss.detach()))
        slopes += gradient(loss, given, batch)
    return [values, slopes]


RATIOS = [1.5, 0.5, 1.5, 0.5, 1.1, 5.0]
ADVANTAGES = [2.0, 2.0, -1.0, -1.0, 2.0, -1.0]


@pytest.mark.parametrize(
    ("chosen", "losses", "slopes"),
    [
        # The gradient of a ratio by its log-probability is the ratio itself.
        ({}, [-2.4, -1.0, 1.5, 0.8, -2.2, 5.0], [0, -1.0, 1.5, 0, -2.2, 5.0]),
        (
            {"ratio_clip_min": 0.6, "ratio_clip_max": 0.6},
            [-3.0, -1.0, 1.5, 0.5, -2.2, 5.0],
            [-3.0, -1.0, 1.5, 0.5, -2.2, 5.0],
        ),
        (
            {"ratio_clip_max": 0.05},
            [-2.1, -1.0, 1.5, 0.8, -2.1, 5.0],
            [0, -1.0, 1.5, 0, 0, 5.0],
        ),
        ({"ratio_clip_c": 3.0}, [-2.4, -1.0, 1.5, 0.8, -2.2, 3.0], [0, -1.0, 1.5, 0, -2.2, 0]),
        # The losses are -A C(r) log p, with log p = log r - 1.
        (
            {"loss_type": "cispo"},
            [
                -2.4 * (math.log(1.5) - 1),
                -1.6 * (math.log(0.5) - 1),
                1.2 * (math.log(1.5) - 1),
                0.8 * (math.log(0.5) - 1),
                -2.2 * (math.log(1.1) - 1),
                1.2 * (math.log(5.0) - 1),
            ],
            [-2.4, -1.6, 1.2, 0.8, -2.2, 1.2],
        ),
        (
            {"loss_type": "reinforce"},
            [-a * (math.log(r) - 1) for r, a in zip(RATIOS, ADVANTAGES, strict=True)],
            [-2.0, -2.0, 1.0, 1.0, -2.0, 1.0],
        ),
        (
            {"force_on_policy_ratio": True},
            [-2.0, -2.0, 1.0, 1.0, -2.0, 1.0],
            [-2.0, -2.0, 1.0, 1.0, -2.0, 1.0],
        ),
    ],
    ids=["ppo", "ppo, wide", "ppo, uneven", "dual clip", "cispo", "reinforce", "on policy"],
)
def test_the_actor_term(chosen, losses, slopes):
    found = per_token(RATIOS, ADVANTAGES, **chosen)
    assert found[0] == pytest.approx(losses, rel=1e-12)
    assert found[1] == pytest.approx(slopes, rel=1e-12)


def test_gspo_has_one_ratio_per_completion():
    # Log-ratios 0.3 and -0.1: mean 0.1, ratio e^0.1. The second completion: 0.5, cut to 1.2.
    old = [[-1.0, -2.0], [-1.0]]
    batch = [labels([2.0, 3.0], old, old=old)]
    loss = loss_of(sequence_level_importance_ratios=True, token_level_loss=False)
    given = outputs([-0.7, -2.1, -0.5])
    found = loss(given, batch, num_groups=loss.count(batch))
    ratio = math.exp(0.1)
    assert float(found.loss.detach()) == pytest.approx((-2 * ratio - 3 * 1.2) / 2, rel=1e-12)
    # Each token moves the mean by half.
    slopes = gradient(loss, given, batch)
    assert slopes == pytest.approx([-ratio, -ratio, 0.0], rel=1e-12)
    figures = loss.metrics(found.sums)
    assert figures["probs_ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-12)
    assert figures["probs_ratio"] == pytest.approx((2 * ratio + math.exp(0.5)) / 3, rel=1e-12)
    assert figures["clip_ratio/high_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("chosen", "denominator", "expected"),
    [
        # -A sums to -2 -2 -2 3 over tokens; its means per completion are -2 and 3.
        ({}, 4.0, -3.0 / 4),
        ({"token_level_loss": False}, 2.0, 1.0 / 2),
        ({"normalizer": "sequences"}, 2.0, 1.0 / 2),
        ({"normalizer": "tokens", "token_level_loss": False}, 4.0, -3.0 / 4),
        ({"normalizer": "max_length"}, 20.0, -3.0 / 20),
    ],
)
def test_how_tokens_are_put_together(chosen, denominator, expected):
    loss = loss_of(max_length=10, **chosen)
    batch = [
        labels(
            [2.0, -3.0, 7.0, 5.0],
            [[0.0] * 4, [0.0] * 2, [0.0] * 3, [0.0]],
            masks=[[True, False, True, True], [False, True], [True] * 3, [False]],
            used=[True, True, False, True],
        )
    ]
    assert loss.count(batch) == denominator
    found = loss(outputs([-1.0] * 10), batch, num_groups=denominator)
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-12)
    figures = loss.metrics(found.sums)
    assert figures["loss"] == pytest.approx(expected, rel=1e-12)
    assert figures["global_valid_toks"] == 4.0
    assert figures["global_valid_seqs"] == figures["num_valid_samples"] == 2.0


# Weights old / behaviour: 1.5 and 0.5 in the first completion, 3 in the second.
BEHAVIOUR = [[-1.0, -1.0], [-1.0]]
OLD = [-1.0 + math.log(1.5), -1.0 + math.log(0.5), -1.0 + math.log(3.0)]
RANGE = {"truncated_importance_sampling_ratio": 2.0}
LOW = {**RANGE, "truncated_importance_sampling_ratio_min": 0.8}


@pytest.mark.parametrize(
    ("chosen", "weights", "outside"),
    [
        ({}, [1.5, 0.5, 3.0], None),
        ({"truncated_importance_sampling_type": "tis", **RANGE}, [1.5, 0.5, 2.0], 1 / 3),
        ({"truncated_importance_sampling_type": "tis", **LOW}, [1.5, 0.8, 2.0], 2 / 3),
        ({"truncated_importance_sampling_type": "icepop", **LOW}, [1.5, 0.0, 0.0], 2 / 3),
        # Geometric means: sqrt(0.75) = 0.87 and 3.
        ({"truncated_importance_sampling_type": "seq-mask-tis", **LOW}, [1.5, 0.5, 0.0], 1 / 2),
        # Products: 0.75 and 3.
        ({"truncated_importance_sampling_type": "seq-tis", **LOW}, [0.8, 0.8, 2.0], 1.0),
        ({"truncated_importance_sampling_type": "seq-tis", **RANGE}, [0.75, 0.75, 2.0], 1 / 2),
    ],
)
def test_importance_sampling_correction(chosen, weights, outside):
    loss = loss_of(use_importance_sampling_correction=True, loss_type="reinforce", **chosen)
    batch = [labels([1.0, 1.0], BEHAVIOUR)]  # the first update: old is current
    given = outputs(OLD)
    assert gradient(loss, given, batch) == pytest.approx([-w for w in weights], rel=1e-12)
    figures = loss.metrics(loss(given, batch, num_groups=1.0).sums)
    assert figures["sampling_importance_ratio"] == pytest.approx(sum(weights) / 3, rel=1e-12)
    assert figures.get("is_oob_ratio") == (None if outside is None else pytest.approx(outside))


def test_sequence_level_correction_is_the_product():
    loss = loss_of(
        use_importance_sampling_correction=True,
        sequence_level_importance_ratios=True,
        token_level_loss=False,
    )
    slopes = gradient(loss, outputs(OLD), [labels([1.0, 1.0], BEHAVIOUR)])
    assert slopes == pytest.approx([-0.75 / 2, -0.75 / 2, -3.0], rel=1e-12)


def test_the_correction_uses_the_old_policy_where_there_is_one():
    loss = loss_of(use_importance_sampling_correction=True)
    batch = [labels([1.0], [[-1.5]], old=[[-1.0]])]
    given = outputs([-1.0 + math.log(1.1)])
    found = float(loss(given, batch, num_groups=1.0).loss.detach())
    assert found == pytest.approx(-1.1 * math.exp(0.5), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        # d = reference - current = 0.25. The slope is that of the estimate plus the estimate.
        ("k1", -0.25, 1.0 - 0.25),
        ("k2", 0.03125, -0.25 + 0.03125),
        ("k3", math.exp(0.25) - 1.25, (1.0 - math.exp(0.25)) + (math.exp(0.25) - 1.25)),
    ],
)
def test_divergence_from_the_reference(kind, value, slope):
    loss = loss_of(reference_policy_kl_penalty=0.5, reference_policy_kl_type=kind)
    batch = [labels([0.0], [[-1.0]], reference=[[-0.75]])]
    given = outputs([-1.0])
    found = loss(given, batch, num_groups=1.0)
    assert float(found.loss.detach()) == pytest.approx(0.5 * value, rel=1e-12)
    assert loss.metrics(found.sums)["kl_penalty"] == pytest.approx(value, rel=1e-12)
    assert gradient(loss, given, batch) == pytest.approx([0.5 * slope], rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expected_gradient_is_that_of_the_divergence_itself(kind):
    """Over all tokens that the policy could draw, weighted by how likely it draws them."""
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    logprobs = torch.log_softmax(logits, 0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)

    loss = loss_of(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
    found = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        batch = [labels([0.0], [[0.0]], reference=[[float(reference[token])]])]
        one = loss(TokenOutputs(logprobs[token : token + 1], None), batch, num_groups=1.0)
        (slopes,) = torch.autograd.grad(one.loss, logits, retain_graph=True)
        found += logprobs[token].exp().detach() * slopes
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # labels are float32


def test_the_divergence_is_clamped():
    loss = loss_of(
        reference_policy_kl_penalty=1.0, kl_input_clamp_value=2.0, kl_output_clamp_value=3.0
    )
    # d = 1.5 stays; 5 becomes 2, and e^2 - 3 = 4.39 becomes 3.
    batch = [labels([0.0] * 2, [[0.0]] * 2, reference=[[-0.5], [3.0]])]
    found = float(loss(outputs([-2.0, -2.0]), batch, num_groups=1.0).loss.detach())
    assert found == pytest.approx(math.exp(1.5) - 2.5 + 3.0, rel=1e-12)


def test_the_divergence_is_corrected_by_the_generator():
    loss = loss_of(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    batch = [labels([0.0], [[-1.5]], reference=[[-0.75]])]
    given = outputs([-1.0])
    k3, weight = math.exp(0.25) - 1.25, math.exp(0.5)
    found = float(loss(given, batch, num_groups=1.0).loss.detach())
    assert found == pytest.approx(weight * k3, rel=1e-12)
    assert gradient(loss, given, batch) == pytest.approx([weight * -0.25], rel=1e-12)


def test_the_reference_is_read_only_where_the_loss_needs_it():
    assert loss_of(reference_policy_kl_penalty=0.1).needs_reference
    assert not loss_of().needs_reference
    in_reward = loss_of(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    assert not in_reward.needs_reference
    figures = in_reward.metrics(
        in_reward(outputs([-1.0]), [labels([1.0], [[-1.0]])], num_groups=1.0).sums
    )
    assert figures["loss"] == -1.0
    assert "kl_penalty" not in figures


def test_a_teacher_moves_the_advantages_of_tokens():
    # The teacher finds the first token likelier by 0.5, the second less likely by 1; the completion
    # is 2 better than its group, the other 1 worse.
    old = [[-1.0, -2.0], [-3.0]]
    batch = [labels([2.0, -1.0], old, old=old, teacher=[[-0.5, -3.0], [-3.0]])]
    loss = loss_of(distillation={"model_name": "t", "weight": 0.5})
    assert loss.needs_teacher
    given = outputs([-1.0, -2.0, -3.0])
    assert gradient(loss, given, batch) == pytest.approx([-2.25, -1.5, 1.0], rel=1e-12)
    alone = loss_of(distillation={"model_name": "t", "rewards": False})
    assert gradient(alone, given, batch) == pytest.approx([-0.5, 1.0, 0.0], rel=1e-12)
    clamped = loss_of(distillation={"model_name": "t", "rewards": False, "clamp_value": 0.75})
    assert gradient(clamped, given, batch) == pytest.approx([-0.5, 0.75, 0.0], rel=1e-12)
    found = alone(given, batch, num_groups=3.0)
    figures = alone.metrics({name: float(value) for name, value in found.sums.items()})
    assert figures["teacher_gap"] == pytest.approx(-0.5 / 3, rel=1e-6)
    # Without an advantage from rewards there still is something to learn.
    silent = labels([0.0], [[-1.0]], teacher=[[-0.5]])
    assert alone.has_signal(silent)
    assert not loss_of().has_signal(silent)
    assert not alone.has_signal(labels([0.0], [[-1.0]], used=[False], teacher=[[-0.5]]))


def test_distillation_has_the_gradient_of_the_divergence_from_the_teacher():
    # A policy over three tokens, all sampled in proportion: sum of p (log p - log q) by its logits.
    logits = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.9], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)
    loss = loss_of(distillation={"model_name": "t", "rewards": False})
    slopes = []
    for k in range(3):
        now = logprobs.detach()[k].item()
        row = [labels([0.0], [[now]], teacher=[[teacher[k].item()]])]
        slopes.append(gradient(loss, outputs([now]), row)[0])
    weights = logprobs.detach().exp() * torch.tensor(slopes, dtype=torch.float64)
    (found,) = torch.autograd.grad((weights * torch.log_softmax(logits, 0)).sum(), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"distillation": {"weight": 2.0}}, "distillation.model_name"),
        (
            {
                "distillation": {"model_name": "t"},
                "sequence_level_importance_ratios": True,
                "token_level_loss": False,
            },
            "sequence_level_importance_ratios",
        ),
        (
            {"distillation": {"model_name": "t"}, "loss_type": "gmpo", "token_level_loss": False},
            "gmpo",
        ),
    ],
)
def test_distillation_that_does_not_fit_is_refused(chosen, named):
    with pytest.raises(ValueError, match=named):
        loss_of(**chosen)


def test_positive_examples_are_imitated():
    loss = loss_of(positive_example_nll_weight=0.5)
    batch = [labels([1.0, -1.0, 0.0], [[0.0, 0.0], [0.0], [0.0]], rewards=[1.0, 0.0, None])]
    given = outputs([-0.5, -1.5, -3.0, -4.0])
    assert gradient(loss, given, batch) == [-1.5, -1.5, 1.0, 0.0]
    found = loss(given, batch, num_groups=4.0)
    assert float(found.loss.detach()) == pytest.approx((-2 + 1 + 0.5 * 2.0) / 4)
    assert loss.metrics(found.sums)["positive_nll_loss"] == 1.0


def test_the_figures_of_an_update():
    loss = loss_of()
    # Ratios 1.5 (A > 0: cut), 0.5 (A > 0), 0.5 (A < 0: cut); behaviour agrees but for the last.
    old = [[-1.0, -1.0], [-1.0]]
    batch = [labels([2.0, -1.0], [[-1.0, -1.0], [-2.0]], old=old)]
    values = [-1.0 + math.log(1.5), -1.0 + math.log(0.5), -1.0 + math.log(0.5)]
    found = loss.metrics(loss(outputs(values, entropy=[1.0, 2.0, 6.0]), batch, num_groups=3.0).sums)
    middle = math.log((math.exp(-1) + math.exp(-2)) / 2)
    to_middle = [math.expm1(middle - x) - (middle - x) for x in (-1.0, -2.0)]
    drawn = [1.5, 0.5, 0.5 * math.e]
    assert found == pytest.approx(
        {
            "loss": (-2.4 - 1.0 + 0.8) / 3,
            "global_valid_toks": 3.0,
            "global_valid_seqs": 2.0,
            "num_valid_samples": 2.0,
            "num_extreme_ratios": 0.0,
            "probs_ratio": 2.5 / 3,
            "probs_ratio_min": 0.5,
            "probs_ratio_max": 1.5,
            "probs_ratio_clamped": 2.8 / 3,
            "probs_ratio_clamped_min": 0.8,
            "probs_ratio_clamped_max": 1.2,
            "clip_ratio/low_mean": 1 / 3,
            "clip_ratio/high_mean": 1 / 3,
            "clip_ratio/region_mean": 2 / 3,
            "token_mult_prob_error": (2 + math.e) / 3,
            "token_mult_prob_error_max": math.e,
            "gen_kl_error": (math.e - 2) / 3,
            "policy_kl_error": math.exp(-1) / 3,
            "js_divergence_error": sum(to_middle) / 2 / 3,
            "sampling_importance_ratio": (2 + math.e) / 3,
            "sampling_importance_ratio_before_truncation": (2 + math.e) / 3,
            "approx_entropy": -sum(d * v for d, v in zip(drawn, values, strict=True)) / 3,
            "entropy": 3.0,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("gap", [1000.0, -1000.0])
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"loss_type": "cispo"},
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        {"use_importance_sampling_correction": True},
        {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": None},
        {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
    ],
)
def test_no_difference_is_too_large(chosen, gap):
    loss = loss_of(**chosen)
    far = -1001.0 if gap > 0 else -1.0
    batch = [labels([-1.0], [[far]], old=[[far]], reference=[[-1.0 if gap < 0 else far]])]
    logprobs = torch.tensor([far + gap], requires_grad=True)
    found = loss(TokenOutputs(logprobs, None), batch, num_groups=1.0)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert all(math.isfinite(value) for value in loss.metrics(found.sums).values())
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert loss.metrics(found.sums)["num_extreme_ratios"] == 1.0


def test_nothing_to_learn_from_has_no_means():
    loss = loss_of(positive_example_nll_weight=1.0)
    batch = [labels([1.0], [[-1.0]], used=[False])]
    given = outputs([math.nan])
    assert loss.count(batch) == 0.0
    assert gradient(loss, given, batch) == [0.0]
    assert loss.metrics(loss(given, batch, num_groups=1.0).sums) == {
        "global_valid_toks": 0.0,
        "global_valid_seqs": 0.0,
        "num_valid_samples": 0.0,
        "num_extreme_ratios": 0.0,
    }


def test_demonstrations_by_hand():
    loss = DemonstrationLoss()
    batch = [
        DemonstrationLabels(masks_GL=(np.array([True, False]),)),
        DemonstrationLabels(masks_GL=(np.array([True]), np.array([False]))),
    ]
    given = outputs([-1.0, math.nan, -2.5, math.inf], entropy=[1.0, math.nan, 2.0, math.nan])
    assert loss.count(batch) == 2.0
    found = loss(given, batch, num_groups=2.0)
    assert float(found.loss.detach()) == 1.75
    assert gradient(loss, given, batch) == [-1.0, 0.0, -1.0, 0.0]  # type: ignore[arg-type]
    assert loss.metrics(found.sums) == {
        "num_valid_tokens": 2.0,
        "num_valid_samples": 2.0,
        "loss": 1.75,
        "perplexity": math.exp(1.75),
        "entropy": 1.5,
    }
    empty = [DemonstrationLabels(masks_GL=(np.array([False]),))]
    assert loss.metrics(loss(outputs([0.0]), empty, num_groups=1.0).sums) == {
        "num_valid_tokens": 0.0,
        "num_valid_samples": 0.0,
    }


def test_outputs_of_another_size_are_refused():
    with pytest.raises(AssertionError, match="2 tokens in the branches"):
        loss_of()(outputs([-1.0]), [labels([1.0], [[-1.0, -1.0]])], num_groups=1.0)


@pytest.mark.parametrize(
    ("advantages", "used", "rewards", "nll", "expected"),
    [
        ([0.0, 0.5], [True, True], [0.0, 1.0], 0.0, True),
        ([0.0, 0.5], [True, False], [0.0, 1.0], 0.0, False),
        ([0.0, 0.0], [True, True], [1.0, 1.0], 0.0, False),
        ([0.0, 0.0], [True, True], [1.0, 1.0], 0.1, True),  # right answers are imitated
        ([0.0, 0.0], [True, True], [0.0, -1.0], 0.1, False),
        ([0.0, 0.0], [True, False], [None, 1.0], 0.1, False),
    ],
)
def test_what_there_is_to_learn_from(advantages, used, rewards, nll, expected):
    group = labels(advantages, [[-1.0], [-1.0]], used=used, rewards=rewards)
    assert loss_of(positive_example_nll_weight=nll).has_signal(group) is expected
