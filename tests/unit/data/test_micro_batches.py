"""However a batch is cut and laid out, the model sees the same and learns the same."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from laurel.config.policy import BatchLimits, NamedCall, PolicyConfig
from laurel.config.reward_model import LossConfig
from laurel.data.forest import Batcher
from laurel.models.forest.decoder import RewardModel
from laurel.training.epochs import StepOrder
from laurel.training.learner import LocalLearner
from laurel.training.losses import RewardLoss
from laurel.types import PaddedRows, Preference, PreferenceSample, TokenForest, group_of
from random_trees import dialogues
from tiny import PAD, random_groups, tiny_classifier, tiny_reward_model

torch.set_num_threads(1)  # more only cost, at this size

SHAPES = [(7, [3, 5]), (12, [1, 2]), (0, [4, 6]), (9, [2, 2, 8]), (30, [11, 3]), (5, [5, 1])]
RANKS = [(0, 1), (1, 0), (0, 1), (2, 0, 1), (0, 1), (1, 0)]
SIZES = [15, 15, 10, 21, 44, 11]
"""Distinct tokens of each group."""
LENGTHS = [(10, 12), (13, 14), (4, 6), (11, 11, 17), (41, 33), (10, 6)]


def samples():
    return [
        PreferenceSample(
            preference=Preference(
                group=group_of([], ["x"] * len(ranks), group_id=tokens.id), ranks_G=ranks
            ),
            tokens=tokens,
        )
        for tokens, ranks in zip(random_groups(5, SHAPES), RANKS, strict=True)
    ]


def model_of(path):
    if path == "forest":
        return tiny_reward_model("qwen3")
    classifier = tiny_classifier("qwen3")
    classifier.set_attn_implementation("sdpa")
    return RewardModel(classifier, head_name="score", path="padded", precision=torch.float32)


def policy(**changes):
    return PolicyConfig.model_validate({"max_total_sequence_length": 50, **changes})


def cut(path, *, micro_batch_size=1, share_prompts=True, **changes):
    model = model_of(path)
    limits = policy(train_micro_batch_size=micro_batch_size, **changes).batch_limits
    limits = replace(limits, share_prompts=share_prompts)
    batcher = Batcher(model.path, limits, pad_id=PAD)
    rows = samples()
    return model, batcher.cut([row.tokens for row in rows], [row.preference for row in rows])


def ids(batch):
    return [[int(label.group.id) for label in micro.labels] for micro in batch]


DYNAMIC: dict[str, Any] = {"sequence_packing": {"enabled": False, "train_mb_tokens": 60}}


def test_forests_are_filled_up_to_the_budget():
    _, batch = cut("forest", sequence_packing={"train_mb_tokens": 50})
    assert sorted(chain.from_iterable(ids(batch))) == list(range(6))
    for micro, groups in zip(batch, ids(batch), strict=True):
        assert isinstance(micro.inputs, TokenForest)
        assert micro.num_tokens == sum(SIZES[g] for g in groups) <= 50
        assert micro.inputs.num_completions == sum(len(RANKS[g]) for g in groups)
    assert len(batch) == 3  # 116 tokens cannot be in fewer


def test_a_group_beyond_the_budget_travels_alone():
    _, batch = cut("forest", sequence_packing={"train_mb_tokens": 20})
    assert [4] in ids(batch)
    assert [3] in ids(batch)


def test_without_sharing_every_completion_brings_its_prompt():
    _, batch = cut("forest", share_prompts=False, sequence_packing={"train_mb_tokens": 90})
    for micro, groups in zip(batch, ids(batch), strict=True):
        assert micro.num_tokens == sum(sum(LENGTHS[g]) for g in groups) <= 90


def test_padded_rows_are_cut_by_number():
    _, batch = cut("padded", micro_batch_size=4, sequence_packing={"enabled": False})
    assert ids(batch) == [[0, 1, 2, 3], [4, 5]]
    assert [micro.num_tokens for micro in batch] == [9 * 17, 4 * 41]
    for micro in batch:
        assert isinstance(micro.inputs, PaddedRows)


def test_packing_that_the_model_cannot_do_still_fills_the_budget_with_rows():
    _, wanted = cut("padded", sequence_packing={"train_mb_tokens": 120})
    packing = {"enabled": False, "train_mb_tokens": 120}
    _, dynamic = cut("padded", sequence_packing=packing)
    assert ids(wanted) == ids(dynamic)
    assert len(wanted) > 1


def test_dynamic_batches_are_of_similar_lengths_within_the_budget():
    _, batch = cut("padded", **DYNAMIC)
    # By the longest of each: 41 alone (82), then 17 (3 rows, 51), 14 (28) + 12 (56), 10 + 6 (40).
    assert ids(batch) == [[4], [3], [1, 0], [5, 2]]
    assert [micro.num_tokens for micro in batch] == [82, 51, 56, 40]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "forest, small budget": ("forest", {"sequence_packing": {"train_mb_tokens": 30}}),
    "forest, not shared": ("forest", {"share_prompts": False}),
    "forest, not shared, small": (
        "forest",
        {"share_prompts": False, "sequence_packing": {"train_mb_tokens": 40}},
    ),
    "padded, fixed": ("padded", {}),
    "padded, dynamic": ("padded", DYNAMIC),
}


def step(path, changes, size):
    """The figures and the gradients (as the change of a step of plain descent)."""
    return learn(*cut(path, micro_batch_size=size, **changes))


def learn(model, batch):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0}))
    update = learner.update(batch, RewardLoss(LossConfig()))
    assert update.failure is None
    return update.metrics, {n: before[n] - p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_loss_and_the_same_step(way, size):
    path, changes = WAYS[way]
    expected, reference = step("forest", {"sequence_packing": {"train_mb_tokens": 1000}}, 1)
    found, gradients = step(path, changes, size)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    scale = torch.linalg.vector_norm(torch.cat([g.flatten() for g in reference.values()]))
    for name, gradient in gradients.items():
        assert torch.linalg.vector_norm(gradient - reference[name]) <= 1e-5 * scale, name


def test_rows_that_share_their_beginning_meet_in_a_forest_within_the_budget():
    groups = dialogues()
    limits = BatchLimits(forest_tokens=200, least_shared=16)
    labels = [int(group.id) for group in groups]
    batch = Batcher("forest", limits, pad_id=PAD).cut(groups, labels)
    # 20 tokens, 3 answers of 30 that are gone on from, and others of 25, 24 and 23.
    assert sorted(sorted(micro.labels) for micro in batch) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(micro.num_tokens == 182 for micro in batch)
    plain = Batcher("forest", BatchLimits(forest_tokens=200), pad_id=PAD).cut(groups, labels)
    assert sum(m.num_tokens for m in plain) > 1.4 * sum(m.num_tokens for m in batch)
    few = BatchLimits(forest_tokens=110, least_shared=16)
    small = Batcher("forest", few, pad_id=PAD).cut(groups, labels)
    assert sorted(label for micro in small for label in micro.labels) == list(range(9))
    sizes = {int(group.id): group.num_tokens for group in groups}
    for micro in small:
        assert micro.num_tokens <= max(110, *(sizes[label] for label in micro.labels))


def test_no_rank_idles_where_all_rows_share_their_beginning():
    groups = dialogues()
    largest = {}
    for dp_size in (1, 2, 4):
        limits = BatchLimits(forest_tokens=1000, least_shared=16)
        batch = Batcher("forest", limits, pad_id=PAD, dp_size=dp_size).cut(groups, groups)
        assert len(batch) <= dp_size
        assert sorted(group.id for micro in batch for group in micro.labels) == list("012345678")
        largest[dp_size] = max(micro.num_tokens for micro in batch)
    assert largest[1] == 3 * 182 - 2 * 20  # all in one tree
    assert largest[2] < 0.65 * largest[1]
    assert largest[4] < 0.5 * largest[1]
    # A dialogue is not torn apart where its copies would take longer than a rank that idles.
    few = Batcher("forest", BatchLimits(forest_tokens=200, least_shared=16), pad_id=PAD, dp_size=2)
    assert [micro.num_tokens for micro in few.cut(groups, groups)] == [182] * 3


def test_what_is_shared_changes_neither_loss_nor_step():
    groups, found = dialogues(), []
    preferences = [
        Preference(group=group_of([], ["x", "y"], group_id=one.id), ranks_G=(0, 1))
        for one in groups
    ]
    for least in (None, 16):
        model = tiny_reward_model("qwen3")
        limits = BatchLimits(forest_tokens=200, least_shared=least)
        batch = Batcher("forest", limits, pad_id=PAD).cut(groups, preferences)
        found.append(learn(model, batch))
    (expected, reference), (metrics, change) = found
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    wanted, got = (torch.cat([g.flatten() for g in some.values()]) for some in (reference, change))
    assert float((got - wanted).norm() / wanted.norm()) <= 1e-5


def test_rows_of_a_dialogue_stay_together_in_an_order_of_step_and_seed():
    units = [[0, 3], [1], [2, 4, 5]]
    order = StepOrder(6, 4, shuffle=True, seed=1, units=units)
    for epoch in range(4):
        rows = order.rows(2 * epoch) + order.rows(2 * epoch + 1)
        assert sorted(rows) == list(range(6))
        assert all(str(unit)[1:-1] in str(rows) for unit in units)
        again = StepOrder(6, 4, shuffle=True, seed=1, units=units)
        assert again.rows(2 * epoch + 1) == rows[4:]
    plain = StepOrder(6, 4, shuffle=False, seed=1, units=units)
    assert plain.rows(0) + plain.rows(1) == [0, 3, 1, 2, 4, 5]
