"""Completions that branch: what they share, what they are seeded with, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from laurel.config.grpo import TreeConfig
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import EnvironmentInterface
from laurel.errors import ConfigError
from laurel.grpo.branching import branch_off, tree_segments
from laurel.grpo.grading import RolloutInProgress
from laurel.grpo.metrics import rollout_metrics
from laurel.grpo.rollouts import Rollouts
from laurel.types import Branch, Generated, GenerationRequest, RolloutGroup
from policy_fakes import (
    SAMPLING,
    Judge,
    Say,
    ScriptedGenerator,
    ids_of,
    rollout,
    rollout_group,
    rollouts_of,
    saying,
    task,
)


def play(rollouts: Rollouts, *, number: int = 7, **options: Any) -> RolloutGroup:
    async def all_of_it() -> list[RolloutGroup]:
        given: dict[str, Any] = {"sampling": SAMPLING, "batch": (0, 0, 0)} | options
        return await rollouts.play([task("q")], num_generations=number, **given)

    try:
        (group,) = asyncio.run(all_of_it())
        return group
    finally:
        rollouts.close()


def by_seed(request: GenerationRequest) -> list[Any]:
    """What is said depends on the prompt and the seed alone, as with a real engine."""
    said = []
    for index, seed in enumerate(request.seeds_G):
        random = np.random.default_rng([seed, *request.prompt_ids.tolist()])
        size = min(request.sampling.max_new_tokens, 6)
        said.append((index, Say("".join(random.choice(list("abc."), size)))))
    return said


SEGMENTS = TreeConfig(branches=2, rounds=2, segment=2)


@pytest.mark.parametrize("judges", ["completion", "part", "group", "batch"])
def test_segments_are_continued_with_the_tokens_as_drawn(judges: Any) -> None:
    generator = ScriptedGenerator(by_seed)
    judge = Judge(lambda text, m: {"reward": text.count("a")}, judges=judges)
    group = play(rollouts_of(generator, judge=judge, tree=SEGMENTS))
    prompt = len(group.prompt_ids)
    assert [one.branch is None for one in group.rollouts_G] == [True] * 3 + [False] * 4
    for one in group.rollouts_G:
        text = one.messages[0].content
        assert (one.num_turns, len(one.messages), one.reward) == (1, 1, text.count("a"))
        assert one.ids_L.tolist() == ids_of(text).tolist()
        assert one.mask_L.all()
        assert len(one.logprobs_L) == len(one.ids_L)
        if one.branch is not None:
            source = group.rollouts_G[one.branch.of]
            assert 0 < one.branch.length < len(source.ids_L) - 1
            assert one.branch.length % 2 == 0
            shared = source.ids_L[: one.branch.length].tolist()
            assert one.ids_L[: one.branch.length].tolist() == shared
    # The group is scored as a whole, and each completion once.
    assert sum(map(len, judge.calls)) == 7
    if judges == "group":
        assert len(judge.calls) == 1
    asked = {request.id: request for request in generator.requests}
    for index, one in enumerate(group.rollouts_G[3:], start=3):
        request = asked[f"{group.id}-{index}-0"]
        assert one.branch is not None
        assert len(request.prompt_ids) == prompt + one.branch.length
        assert request.sampling.max_new_tokens == SAMPLING.max_new_tokens - one.branch.length
        assert request.branch_of == f"{group.id}-{one.branch.of}"
    seeds = [seed for request in generator.requests for seed in request.seeds_G]
    assert len(set(seeds)) == 7
    # All are kept until the group is finished, so that others can go on from them.
    assert sorted(generator.ended) == sorted(f"{group.id}-{i}" for i in range(7))


def test_the_first_completions_are_those_of_a_chain_and_the_tree_is_drawn_again() -> None:
    def once(seed: int = 7, **options: Any) -> list[list[int]]:
        made = play(rollouts_of(ScriptedGenerator(by_seed), seed=seed, **options))
        return [one.ids_L.tolist() for one in made.rollouts_G]

    assert once(tree=SEGMENTS) == once(tree=SEGMENTS)
    assert once(tree=SEGMENTS)[:3] == once()[:3]
    assert once(tree=SEGMENTS) != once(8, tree=SEGMENTS)


def test_separators_end_segments_and_where_there_is_none_completions_begin_anew() -> None:
    tree = TreeConfig(branches=3, rounds=1, segment="|")
    texts = iter(["ab|cde|", "x", "y", "z"])
    generator = ScriptedGenerator(lambda request: [(0, Say(next(texts)))])
    made = play(rollouts_of(generator, tree=tree), number=4)
    # The end of the last segment is that of the completion.
    assert [one.branch for one in made.rollouts_G] == [None] + [Branch(0, 3)] * 3
    assert sorted(one.messages[0].content for one in made.rollouts_G) == [
        *("ab|cde|", "ab|x", "ab|y", "ab|z"),
    ]
    texts = iter("abcd")
    generator = ScriptedGenerator(lambda request: [(0, Say(next(texts)))])
    made = play(rollouts_of(generator, tree=tree), number=4)
    assert len({request.id for request in generator.requests}) == 4
    assert [one.branch for one in made.rollouts_G] == [None] * 4
    assert sorted(one.messages[0].content for one in made.rollouts_G) == list("abcd")


def counting(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    turns = metadata.get("turns", 0) + 1
    metadata["turns"] = turns  # an environment may write into what it was given
    return {
        "rewards": {"begins with a": 1.0 if text.startswith("a") else 0.25},
        "over": turns == 3,
        "observation": {"role": "user", "content": f"n{turns}"},
        "metadata": metadata,
        "invalid": text.startswith("b"),
    }


TURNS = TreeConfig(branches=3, rounds=2)


class Stateless(Judge):
    close_conversations = EnvironmentInterface.close_conversations


@pytest.mark.parametrize("judges", ["group", "batch"])
def test_turns_are_continued_with_what_the_environment_had_said(judges: Any) -> None:
    generator = ScriptedGenerator(by_seed)
    judge = Stateless(counting, judges=judges)
    group = play(
        rollouts_of(generator, judge=judge, tree=TURNS, max_turns=5, max_length=99), number=8
    )
    assert sum(one.branch is not None for one in group.rollouts_G) == 6
    for one in group.rollouts_G:
        said = [m.content for m in one.messages if m.role == "assistant"]
        assert (one.num_turns, len(said), one.failure) == (3, 3, None)
        assert [m.content for m in one.messages if m.role == "user"] == ["n1", "n2"]
        assert one.reward == sum(1.0 if text.startswith("a") else 0.25 for text in said)
        assert one.components == {"begins with a": one.reward}
        assert one.invalid_turns == tuple(i for i in range(3) if said[i].startswith("b"))
        if one.branch is not None:
            source = group.rollouts_G[one.branch.of]
            for shared in ("ids_L", "mask_L", "logprobs_L"):
                ours, theirs = getattr(one, shared), getattr(source, shared)
                assert ours[: one.branch.length].tolist() == theirs[: one.branch.length].tolist()
            # It ends with what the environment said, and the policy goes on.
            assert not one.mask_L[one.branch.length - 1]
            assert one.mask_L[one.branch.length]
    # Turns that are shared are neither drawn nor judged again.
    num_judged = sum(map(len, judge.calls))
    assert 8 + 2 < num_judged < 8 * 3
    assert rollout_metrics([group])["tree/sampled_turns"] == num_judged
    assert num_judged == sum(len(request.seeds_G) for request in generator.requests)


def test_the_least_certain_places_come_first_and_each_once() -> None:
    class Certain(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Any:
            async for one in super().generate(request):
                for place, value in enumerate([0.0, 0.0, -0.1, 0.0, -3.0, 0.0, -2.0, 0.0]):
                    if place < len(one.logprobs_L):
                        one.logprobs_L[place] = value
                yield one

    def script(request: GenerationRequest) -> list[Any]:
        said = Say("abcdefgh"[: request.sampling.max_new_tokens])
        return [(i, said) for i in range(len(request.seeds_G))]

    tree = TreeConfig(branches=2, rounds=1, segment=2, choice="entropy")
    made = play(rollouts_of(Certain(script), tree=tree), number=3)
    lengths = [one.branch.length for one in made.rollouts_G if one.branch is not None]
    assert lengths == [4, 6]


def said(
    index: int, logprobs: list[float], *, branch: Branch | None = None, failure: str | None = None
) -> RolloutInProgress:
    """A completion of as many tokens as there are log-probabilities, sampled with version 3."""
    made = RolloutInProgress(index=index, metadata=None, branch=branch)
    made.turn_starts = [made.copy()]
    made.add_turn(more(logprobs, weight_version=3), text_of=str)
    made.failure = failure
    return made


def more(logprobs: list[float], *, weight_version: int) -> Generated:
    return Generated(
        index=0,
        ids_L=np.arange(len(logprobs), dtype=np.int32),
        logprobs_L=np.array(logprobs, np.float32),
        text="",
        finish_reason="stop",
        weight_version=weight_version,
    )


def continued(rollouts: list[RolloutInProgress], branches: int) -> list[RolloutInProgress]:
    tree = TreeConfig(branches=branches, rounds=1, segment=2, choice="entropy")
    return branch_off(rollouts, tree, lambda *_: (), np.random.SeedSequence(0), at_turns=False)


def test_places_are_new_ones_of_completions_that_have_not_failed() -> None:
    rollouts = [
        said(0, [-1.0] * 5),
        # The places before it branched off are those of the completion that it left.
        said(1, [-1.0] * 7, branch=Branch(0, 2)),
        said(2, [-9.0] * 9, failure="an error"),
    ]
    places = {one.branch for one in continued(rollouts, 9) if one.branch is not None}
    # Behind 4 of 5 tokens, and 6 of 7, is only the one that ends the completion.
    assert places == {Branch(0, 2), Branch(1, 4)}


def test_a_place_from_which_one_branched_comes_after_all_others() -> None:
    rollouts = [
        said(0, [-1.0, -1.0, -8.0, -1.0, -1.0, -1.0]),
        said(1, [-1.0] * 5, branch=Branch(0, 2)),
    ]
    branches = [one.branch for one in continued(rollouts, 2)]
    assert branches == [Branch(0, 4), Branch(0, 2)]


def test_what_is_continued_is_as_old_as_its_beginning() -> None:
    (begun,) = continued([said(0, [-1.0, -2.0, -3.0, -4.0])], 1)
    assert (begun.index, begun.branch, begun.weight_version) == (1, Branch(0, 2), 3)
    begun.add_turn(more([-5.0], weight_version=7), text_of=lambda ids: f"{len(ids)} tokens")
    assert begun.weight_version == 3
    assert (begun.messages[0].content, begun.begun) == ("3 tokens", None)
    assert begun.logprobs[0].tolist() == [-1.0, -2.0, -5.0]
    assert begun.masks[0].all()


def test_a_validation_does_not_branch_and_figures_count_what_was_drawn() -> None:
    rollouts = rollouts_of(ScriptedGenerator(by_seed), tree=SEGMENTS)
    made = play(rollouts, number=2, batch=(1, 0, 0))
    assert [one.branch for one in made.rollouts_G] == [None, None]
    group = rollout_group(
        rollout("abcd", 1.0), rollout("ab.cdef", 0.0, branch=Branch(0, 2)), rollout("x.", 0.0)
    )
    figures = rollout_metrics([group])
    assert figures["tree/sampled_tokens"] == 4 + 4 + 1
    # A turn that went on after its beginning was sampled.
    assert figures["tree/sampled_turns"] == 3
    assert figures["tree/shared_share"] == pytest.approx(2 / 11)
    assert not any("tree" in name for name in rollout_metrics([rollout_group(rollout("a", 1.0))]))


def test_segments_are_the_runs_of_tokens_between_branches() -> None:
    group = [
        rollout("abcdef", 1.0),
        rollout("abxy", 0.0, branch=Branch(0, 2)),
        rollout("abc...z", 0.0, branch=Branch(0, 3)),
        rollout("abc...zw", 0.0, branch=Branch(2, 6)),
    ]
    found = [[tuple(one) for one in path] for path in tree_segments(group)]
    assert found == [
        [(0, 2, 2), (1, 3, 1), (2, 6, 3)],
        [(0, 2, 2), (3, 4, 2)],
        [(0, 2, 2), (1, 3, 1), (4, 6, 0), (5, 7, 1)],
        [(0, 2, 2), (1, 3, 1), (4, 6, 0), (6, 8, 2)],
    ]


def test_a_conversation_whose_metadata_cannot_be_copied_fails_alone() -> None:
    def verdict(text: str, metadata: dict[str, Any]) -> dict[str, Any]:
        held = {"lock": threading.Lock()} if text == "b" else {}
        return {"over": "turns" in metadata, "metadata": {"turns": 1, **held}}

    tree = TreeConfig(branches=1, rounds=1)
    generator = ScriptedGenerator(saying("a", "b"))
    made = play(rollouts_of(generator, judge=Stateless(verdict), tree=tree, max_turns=3), number=3)
    failures = [one.failure for one in made.rollouts_G]
    assert (failures[0], failures[2]) == (None, None)
    assert "grpo.tree copies metadata" in (failures[1] or "")
    assert made.rollouts_G[2].branch is not None
    assert made.rollouts_G[2].branch.of == 0


def composite(*parts: Any) -> CompositeEnvironment:
    named = {f"part{index}": part for index, part in enumerate(parts)}
    return CompositeEnvironment({"parts": [{"env": name} for name in named]}, named)


def branching_over(*parts: Any) -> Rollouts:
    judge: Any = composite(*parts)
    return rollouts_of(ScriptedGenerator(by_seed), judge=judge, tree=TURNS, max_turns=3)


def test_environments_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(ConfigError, match="close_conversations"):
        rollouts_of(ScriptedGenerator(by_seed), judge=Judge(), tree=TURNS, max_turns=3)
    with pytest.raises(ConfigError, match="close_conversations"):
        branching_over(Stateless(), composite(Judge()))
    branching_over(Stateless(), composite(Stateless())).close()
    with pytest.raises(ConfigError, match="END"):
        rollouts_of(ScriptedGenerator(by_seed), judge=Judge(stop_strings=["END"]), tree=SEGMENTS)
