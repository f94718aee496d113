"""Log-probabilities of many groups: every token's, in order, however they were packed."""

from functools import partial

import numpy as np
import pytest
import torch

import threads
import tiny
from laurel.config.policy import BatchLimits, NamedCall
from laurel.data.forest import Batcher, to_forest
from laurel.grpo.loop import policy_logprobs
from laurel.models.forest.policy import Reference
from laurel.training.learner import LocalLearner

SGD = NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0})
SHAPES = [(12, [3, 1]), (40, [7, 9, 2]), (1, [5]), (12, [3]), (20, [4, 4, 4, 4])]


one_thread = threads.one_thread


def asked(model):
    return LocalLearner(model, optimizer=SGD).outputs


def batcher_of(path, budget, **limits):
    return Batcher(path, BatchLimits(forest_tokens=budget, **limits), pad_id=0)


@pytest.mark.parametrize("budget", [7, 60, 10_000])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("path", ["forest", "padded"])
def test_packing_changes_nothing(path, share_prompts, budget):
    model = tiny.tiny_policy("qwen3", path=path).train()
    groups = tiny.random_groups(0, SHAPES)
    batcher = batcher_of(path, budget, share_prompts=share_prompts)
    found = policy_logprobs(asked(model), groups, batcher)
    assert model.training
    whole = tiny.tiny_policy("qwen3")
    for group, of_group in zip(groups, found, strict=True):
        assert [len(x) for x in of_group] == [len(ids) for ids in group.branches_ids_G]
        assert all(x.dtype == np.float32 for x in of_group)
        expected = whole.logprobs(to_forest([group])).numpy()
        np.testing.assert_allclose(np.concatenate(of_group), expected, rtol=0, atol=2e-6)


def test_a_reference_is_asked_like_a_policy_and_stays_what_it_was():
    model, groups = tiny.tiny_policy("qwen3"), tiny.random_groups(1, SHAPES)
    learner = LocalLearner(model, optimizer=SGD, reference=Reference.of(model))

    def found(role):
        outputs = partial(learner.outputs, role=role)
        values = policy_logprobs(outputs, groups, batcher_of("forest", 100))
        return np.concatenate([logprobs_L for of_group in values for logprobs_L in of_group])

    before = found("model")
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    assert np.array_equal(found("reference"), before)
    assert not np.allclose(found("model"), before)
    assert policy_logprobs(asked(model), [], batcher_of("forest", 100)) == []


@pytest.mark.parametrize("path", ["forest", "padded"])
def test_a_group_larger_than_the_budget_takes_several_passes(path):
    model, sizes = tiny.tiny_policy("qwen3", path=path), []
    model.network.base_model.register_forward_pre_hook(
        lambda _, given, options: sizes.append(options["input_ids"].numel()), with_kwargs=True
    )
    groups = tiny.random_groups(2, [(20, [10] * 8), (5, [3])])  # 100 tokens, or 8 rows of 30
    policy_logprobs(asked(model), groups, batcher_of(path, 64))
    # The prompt, six branches and two; or two rows at a time. And the short one.
    assert sorted(sizes) == ([8, 20, 20, 60] if path == "forest" else [8, 60, 60, 60, 60])
