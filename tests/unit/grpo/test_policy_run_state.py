"""Rollouts in a checkpoint, and fingerprints of what a run learns from."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.grpo.rollouts import RolloutStats
from laurel.grpo.source import (
    Batch,
    batch_from_dict,
    batch_to_dict,
    fingerprint_of_tasks,
    write_bad_rollouts,
)
from laurel.models.checkpoint.state import decode, encode
from laurel.training.state import fingerprint_of_tokens
from laurel.types import Branch, Message, Rollout, RolloutGroup, TokenGroup
from policy_fakes import ids_of, rollout, task

TEXTS = st.text(max_size=5)
ROLLOUTS = st.builds(
    lambda length, reward, texts, flags, components: Rollout(
        messages=tuple(Message("assistant", text) for text in texts),
        ids_L=np.arange(length, dtype=np.int32),
        mask_L=np.arange(length) % 2 == 0,
        logprobs_L=-np.arange(length, dtype=np.float32) / 3,
        reward=reward,
        components=components,
        failure="broken" if reward is None else None,
        truncated=flags,
        num_turns=length,
        weight_version=length + 1,
        answer=texts[0] if texts else None,
        branch=Branch(0, length) if flags else None,
    ),
    st.integers(1, 4),
    st.none() | st.floats(allow_nan=False),
    st.lists(TEXTS, max_size=2),
    st.booleans(),
    st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=2),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(ROLLOUTS, min_size=1, max_size=3), st.integers(0, 9))
def test_a_batch_comes_back_from_a_checkpoint_as_it_was(rollouts, number):
    asked = task("q", task_id="train:rows.jsonl:7", ground_truth="4")
    batch = Batch(
        step=number,
        groups=[
            RolloutGroup(
                id=f"0-{number}",
                task=asked,
                prompt_ids=ids_of("q>"),
                rollouts_G=tuple(rollouts),
                greedy=rollouts[-1] if number % 2 else None,
            ),
        ],
        stats=RolloutStats(generation=1.5, environment=0.25, exposed=0.125),
        num_batches=number + 1,
        num_discarded=number,
        num_without_signal=2,
    )
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(encode(batch_to_dict(batch), "batch", tensors)))
    again = batch_from_dict(decode(tree, tensors), {asked.id: asked})
    assert replace(again, groups=[], stats=RolloutStats()) == replace(
        batch, groups=[], stats=RolloutStats()
    )
    assert again.stats == batch.stats
    (group,) = again.groups
    assert group.task is asked
    assert group.id == f"0-{number}"
    assert group.prompt_ids.tolist() == ids_of("q>").tolist()
    assert group.prompt_ids.dtype == np.int32
    greedy = [] if group.greedy is None else [group.greedy]
    assert len(greedy) == number % 2
    for before, after in zip(
        [*rollouts, *rollouts[-1:][: len(greedy)]], [*group.rollouts_G, *greedy], strict=True
    ):
        for name in Rollout.__dataclass_fields__:
            one, other = getattr(before, name), getattr(after, name)
            if isinstance(one, np.ndarray):
                assert one.dtype == other.dtype
                assert one.tobytes() == other.tobytes()
            else:
                assert one == other, name


def test_a_fingerprint_of_tasks_sees_what_is_learned_from_and_nothing_else():
    tasks = [task("a", ground_truth="1"), task("b", ground_truth="2")]
    base = fingerprint_of_tasks(tasks)
    assert fingerprint_of_tasks([replace(t, source="elsewhere:3") for t in tasks]) == base
    assert fingerprint_of_tasks(tasks[::-1]) != base
    assert fingerprint_of_tasks([tasks[0], task("b", ground_truth="3")]) != base
    assert fingerprint_of_tasks([replace(tasks[0], environment="other"), tasks[1]]) != base
    other_prompt = replace(tasks[0], prompt=(Message("user", "a "),))
    assert fingerprint_of_tasks([other_prompt, tasks[1]]) != base
    assert fingerprint_of_tasks([task("\ud800")]) != fingerprint_of_tasks([task("\ud801")])


def test_a_fingerprint_of_tokens_sees_every_token_and_border():
    def group(trunk, *branches):
        return TokenGroup(
            id="x",
            trunk_ids=np.array(trunk, dtype=np.int32),
            branches_ids_G=tuple(np.array(b, dtype=np.int32) for b in branches),
        )

    base = fingerprint_of_tokens([group([1, 2], [3, 4])])
    assert fingerprint_of_tokens([replace(group([1, 2], [3, 4]), id="y")]) == base
    for other in (group([1], [2, 3, 4]), group([1, 2], [3], [4]), group([1, 2], [3, 5])):
        assert fingerprint_of_tokens([other]) != base


@pytest.mark.parametrize("text", ["plain", "\ud800 lone", "line\nbreak"])
def test_the_rollouts_of_a_bad_step_are_kept(tmp_path, text):
    said = rollout("abc", 0.5, messages=(Message("assistant", text),))
    failed = replace(said, reward=None, failure="broken")
    asked = replace(task("q"), source="rows.jsonl:3")
    group = RolloutGroup(
        id="0-0-0-0", task=asked, prompt_ids=ids_of("q"), rollouts_G=(said, failed)
    )
    path = write_bad_rollouts(tmp_path, 7, [group], "the loss is nan")
    assert path == tmp_path / "bad_steps" / "step_7.jsonl"
    (line,) = path.read_text(encoding="utf-8").splitlines()
    row = json.loads(line)
    assert row["reason"] == "the loss is nan"
    assert row["source"] == "rows.jsonl:3"
    assert row["rewards"] == [0.5, None]
    assert row["lengths"] == [3, 3]
    if text != "\ud800 lone":
        assert row["completions"] == [[["assistant", text]]] * 2
