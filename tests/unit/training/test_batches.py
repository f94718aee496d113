"""However a batch is cut and laid out, the model sees the same and learns the same."""

from itertools import chain
from typing import Any

import pytest
import torch

from laurel.config.policy import NamedCall, PolicyConfig
from laurel.config.reward_model import LossConfig
from laurel.models.forest.decoder import RewardModel
from laurel.training.batches import Batcher
from laurel.training.learner import LocalLearner
from laurel.training.losses import RewardLoss
from laurel.types import PaddedRows, Preference, PreferenceSample, TokenForest, group_of
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


def cut(path, *, micro_batch_size=1, **changes):
    model = model_of(path)
    limits = policy(train_micro_batch_size=micro_batch_size, **changes).batch_limits
    batcher = Batcher(model.path, limits, pad_id=PAD)
    rows = samples()
    return model, batcher.cut([row.tokens for row in rows], [row.preference for row in rows])


def ids(batch):
    return [[int(label.group.id) for label in micro.labels] for micro in batch]


DYNAMIC: dict[str, Any] = {
    "sequence_packing": {"enabled": False, "train_mb_tokens": 60},
    "dynamic_batching": {"enabled": True},
}


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
    _, batch = cut("forest", sequence_packing={"train_mb_tokens": 90, "share_prompts": False})
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
    _, dynamic = cut("padded", sequence_packing=packing, dynamic_batching={"enabled": True})
    assert ids(wanted) == ids(dynamic)
    assert len(wanted) > 1


def test_dynamic_batches_are_of_similar_lengths_within_the_budget():
    _, batch = cut("padded", **DYNAMIC)
    # By the longest of each: 41 alone (82), then 17 (3 rows, 51), 14 (28) + 12 (56), 10 + 6 (40).
    assert ids(batch) == [[4], [3], [1, 0], [5, 2]]
    assert [micro.num_tokens for micro in batch] == [82, 51, 56, 40]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "forest, small budget": ("forest", {"sequence_packing": {"train_mb_tokens": 30}}),
    "forest, not shared": ("forest", {"sequence_packing": {"share_prompts": False}}),
    "forest, not shared, small": (
        "forest",
        {"sequence_packing": {"share_prompts": False, "train_mb_tokens": 40}},
    ),
    "padded, fixed": ("padded", {}),
    "padded, dynamic": ("padded", DYNAMIC),
}


def step(path, changes, size):
    """The figures and the gradients (as the change of a step of plain descent)."""
    model, batch = cut(path, micro_batch_size=size, **changes)
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
