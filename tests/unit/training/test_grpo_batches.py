"""The optimizer steps of a batch of rollouts: how they are cut, and that it changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laurel.config.grpo import GRPOPolicyConfig
from laurel.config.policy import BatchLimits, NamedCall
from laurel.data.forest import Batcher, global_batches, to_forest
from laurel.grpo.loop import policy_logprobs
from laurel.training.learner import LocalLearner
from laurel.training.policy_loss import DemonstrationLabels, DemonstrationLoss, PolicyLabels
from policy_batches import labels, loss_of
from random_trees import alike
from tiny import PAD, random_groups, tiny_policy

torch.set_num_threads(1)  # more only cost, at this size

SHAPES = [(7, [3, 5, 2, 4]), (3, [1, 2, 6, 3]), (9, [2, 2, 8, 1])]


def some_labels(groups, *, used=True):
    rng = np.random.default_rng(3)
    found = []
    for group in groups:
        rows = [list(-rng.random(len(ids))) for ids in group.branches_ids_G]
        masks = [list(rng.random(len(ids)) < 0.8) for ids in group.branches_ids_G]
        for mask in masks:
            mask[0] = True
        found.append(
            labels(
                list(rng.normal(size=len(rows))),
                rows,
                masks=masks,
                old=rows,
                used=[used or bool(i % 2) for i in range(len(rows))],
            )
        )
    return found


def others_labels(groups, of_groups):
    """The labels, with what other models say."""
    rng = np.random.default_rng(4)

    def drawn(group):
        return tuple(-rng.random(len(ids)).astype(np.float32) for ids in group.branches_ids_G)

    return [
        replace(label, reference_GL=drawn(group), teacher_GL=drawn(group))
        for group, label in zip(groups, of_groups, strict=True)
    ]


def gradients(batch, of_batch, *, path="forest", **changes):
    """The gradient of one optimizer step in float64, and the tokens that it counted."""
    gradient, _, count = step_of(batch, of_batch, path=path, **changes)
    return gradient, count


def step_of(
    batch, of_batch, *, path="forest", share_prompts=True, loss=None, with_entropy=False, **changes
):
    """The same, and its metrics."""
    model = tiny_policy("qwen3", dtype=torch.float64, precision=torch.float64, path=path)
    model.with_entropy = with_entropy
    policy = GRPOPolicyConfig.model_validate({"max_total_sequence_length": 20, **changes})
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0}))
    limits = replace(policy.batch_limits, share_prompts=share_prompts)
    batcher = Batcher(path, limits, pad_id=PAD)
    micro_batches = batcher.cut(*batcher.divide(batch, of_batch, PolicyLabels.subset))
    loss = loss or loss_of()
    update = learner.update(micro_batches, loss)
    assert update.failure is None
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradient, update.metrics, loss.count(of_batch)


def assert_same(found, expected):
    """Equal but for the rounding of float32, in which every head computes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0
        assert (found[name] - value).norm() < 1e-6 * value.norm(), name


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 25))
def test_every_completion_comes_once_in_order_with_its_own_label(sizes, size):
    groups = random_groups(1, [(2, [1 + i % 3 for i in range(n)]) for n in sizes])
    of_groups = some_labels(groups)
    batches = global_batches(groups, of_groups, PolicyLabels.subset, size=size)
    counts = [sum(len(g.branches_ids_G) for g in part) for part, _ in batches]
    assert all(count == size for count in counts[:-1])
    assert 0 < counts[-1] <= size
    flat = [ids for part, _ in batches for g in part for ids in g.branches_ids_G]
    assert all(
        a is b for a, b in zip(flat, (ids for g in groups for ids in g.branches_ids_G), strict=True)
    )
    advantages = [a for _, part in batches for label in part for a in label.advantages_G]
    assert advantages == [a for label in of_groups for a in label.advantages_G]
    for part, part_labels in batches:
        for group, label in zip(part, part_labels, strict=True):
            assert len(group.branches_ids_G) == len(label.masks_GL)
            lengths = [len(ids) for ids in group.branches_ids_G]
            assert lengths == [len(mask) for mask in label.masks_GL]


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("size", [1, 5])
def test_the_gradients_of_the_parts_add_up_to_that_of_the_whole(size, used):
    """Each is a mean over its own tokens, so each counts as much as it has."""
    groups = random_groups(2, SHAPES)
    of_groups = some_labels(groups, used=used)
    whole, total = gradients(groups, of_groups)
    summed = {name: torch.zeros_like(g) for name, g in whole.items()}
    for part, part_labels in global_batches(groups, of_groups, PolicyLabels.subset, size=size):
        if sum(label.num_tokens for label in part_labels) == 0:
            continue
        gradient, count = gradients(part, part_labels)
        for name, value in gradient.items():
            summed[name] += value * count / total
    assert_same(summed, whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_packing": {"train_mb_tokens": 9}},
        {"sequence_packing": {"train_mb_tokens": 1000}},
        {"share_prompts": False},
        {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 3, "path": "padded"},
        {
            "sequence_packing": {"enabled": False, "train_mb_tokens": 30},
            "path": "padded",
        },
    ],
    ids=["small", "large", "alone", "padded", "dynamic"],
)
def test_how_a_step_is_computed_does_not_change_it(changes):
    groups = random_groups(2, SHAPES)
    of_groups = some_labels(groups, used=False)
    expected, _ = gradients(groups, of_groups)
    found, _ = gradients(groups, of_groups, **changes)
    assert_same(found, expected)


@pytest.mark.parametrize("budget", [3, 9])
@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        {"reference_policy_kl_penalty": 0.1},
        {"distillation": {"model_name": "a teacher", "weight": 0.7}},
    ],
    ids=["tokens", "sequences", "reference", "teacher"],
)
def test_a_group_larger_than_the_budget_is_computed_in_parts(budget, loss):
    """Those of 3 tokens cut prompts and completions, whose losses need all of their tokens."""
    groups = random_groups(2, SHAPES)
    of_groups = others_labels(groups, some_labels(groups, used=False))
    options = {"loss": loss_of(**loss), "with_entropy": True}
    expected, metrics, _ = step_of(groups, of_groups, **options)
    assert "entropy" in metrics
    small = {"sequence_packing": {"train_mb_tokens": budget}}
    found, same, _ = step_of(groups, of_groups, **options, **small)
    assert_same(found, expected)
    assert same == pytest.approx(metrics, rel=1e-6)


def test_a_group_in_parts_is_divided_where_one_rank_would_have_more_than_its_share():
    groups = random_groups(2, [(40, [20] * 4), (10, [15] * 2)])  # 120 and 40 tokens
    labels = [list(range(len(group.branches_ids_G))) for group in groups]
    for dp_size, expected in ((1, [4, 2]), (2, [2, 2, 2]), (4, [1, 1, 1, 1, 2])):
        limits = BatchLimits(forest_tokens=16)
        batcher = Batcher("forest", limits, pad_id=PAD, dp_size=dp_size)
        divided, their = batcher.divide(groups, labels, lambda of, some: [of[i] for i in some])
        assert [len(group.branches_ids_G) for group in divided] == expected
        assert [len(some) for some in their] == expected


@pytest.mark.parametrize("budget", [3, 9])
def test_one_loss_of_several_parts_that_is_not_finite_fails_the_step(budget):
    groups = random_groups(2, SHAPES)
    model = tiny_policy("qwen3", dtype=torch.float64, precision=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0}))
    batcher = Batcher("forest", BatchLimits(forest_tokens=budget), pad_id=PAD)
    for place in (0, 2):
        of_groups = some_labels(groups)
        of_groups[1].old_GL[place][0] = np.nan
        micro_batches = batcher.cut(*batcher.divide(groups, of_groups, PolicyLabels.subset))
        assert learner.update(micro_batches, loss_of()).failure == "the loss is nan"
        assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("budget", [3, 9])
def test_log_probabilities_of_a_large_group_are_computed_in_parts(budget, monkeypatch):
    groups = random_groups(2, SHAPES)
    model = tiny_policy("qwen3", dtype=torch.float64, precision=torch.float64)
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0}))
    sizes, compute, found = [], model.hidden_of_row, []
    monkeypatch.setattr(
        model,
        "hidden_of_row",
        lambda ids_T, *others: sizes.append(len(ids_T)) or compute(ids_T, *others),
    )
    for tokens in (1000, budget):
        sizes.clear()
        packing = {"train_mb_tokens": tokens}
        policy = GRPOPolicyConfig.model_validate({"sequence_packing": packing})
        batcher = Batcher("forest", policy.batch_limits, pad_id=PAD)
        found.append(policy_logprobs(learner.outputs, groups, batcher))
    assert len(sizes) > 1
    assert max(sizes) <= budget
    for whole, cut in zip(*found, strict=True):
        for one, other in zip(whole, cut, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


LOSSES = {
    "grpo": {"reference_policy_kl_penalty": 0.1},
    "sequences": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "sft": None,
}


@pytest.mark.parametrize("budget", [90, 1000])
@pytest.mark.parametrize("kind", LOSSES)
def test_completions_that_begin_alike_share_it_and_nothing_else_changes(kind, budget):
    groups, found = alike(), []
    if LOSSES[kind] is None:
        loss, subset = DemonstrationLoss(), DemonstrationLabels.subset
        of_groups = [
            DemonstrationLabels(masks_GL=one.masks_GL) for one in some_labels(groups, used=False)
        ]
    else:
        loss, subset = loss_of(**LOSSES[kind]), PolicyLabels.subset
        of_groups = [
            replace(one, reference_GL=tuple(np.full(len(row), -1.0, np.float32) for row in rows))
            for one in some_labels(groups, used=False)
            for rows in [one.masks_GL]
        ]
    for least in (None, 16):
        model = tiny_policy("qwen3", dtype=torch.float64, precision=torch.float64)
        model.with_entropy = True
        learner = LocalLearner(
            model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0})
        )
        batcher = Batcher(
            "forest", BatchLimits(forest_tokens=budget, least_shared=least), pad_id=PAD
        )
        logprobs = policy_logprobs(learner.outputs, groups, batcher)
        batch = batcher.cut(*batcher.divide(groups, of_groups, subset))
        update = learner.update(batch, loss)
        assert update.failure is None
        gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((sum(one.num_tokens for one in batch), update.metrics, gradient, logprobs))
    (plain, expected, reference, wanted), (shared, metrics, gradient, got) = found
    assert shared < 0.8 * plain
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert_same(gradient, reference)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), rtol=0, atol=1e-6)


def test_a_batch_that_shares_little_beyond_prompts_is_laid_out_as_before():
    # 16 tokens of 3 groups in common, which is less than a twentieth of all.
    start = random_groups(9, [(16, [1])])[0].trunk_ids
    groups = [
        replace(one, trunk_ids=np.concatenate((start, one.trunk_ids)))
        for one in random_groups(8, [(30, [200, 100]), (9, [150, 80]), (5, [220, 90])])
    ]
    limits = GRPOPolicyConfig.model_validate({"max_total_sequence_length": 1000}).batch_limits
    (micro_batch,) = Batcher("forest", limits, pad_id=PAD).cut(groups, groups)
    assert micro_batch.inputs.ends is None
    assert torch.equal(micro_batch.inputs.ids_T, to_forest(groups).ids_T)
    (shared,) = Batcher("forest", limits, pad_id=PAD).cut(alike(), alike())
    assert shared.inputs.ends is not None
