"""Rollouts that branch (`grpo.tree`): where completions part, and the tree that they make.

Some completions of a prompt begin as another one did, and go on by themselves. What they take over
are tokens as they were sampled, with the log-probabilities that they were sampled with: nothing is
tokenised anew, and only what comes after is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from laurel.config.grpo import TreeConfig
from laurel.errors import DataError
from laurel.grpo.grading import RolloutInProgress, TokenEnds
from laurel.types import Branch, Rollout

CHOICE = 0xFFFF_FFFF
"""A number of the seed with which places are chosen, so that it is none of the seeds with which
turns are sampled: these have the completion's index there."""


class _Place(NamedTuple):
    """The end of a beginning that other completions can continue."""

    source: RolloutInProgress
    length: int
    """The number of tokens after the prompt."""
    surprise: float
    """How unlikely the token was that was sampled next: minus its log-probability."""


def branch_off(
    rollouts: Sequence[RolloutInProgress],
    tree: TreeConfig,
    token_ends: TokenEnds,
    seed: np.random.SeedSequence,
    *,
    at_turns: bool,
) -> list[RolloutInProgress]:
    """Return the beginnings of the completions of a round, whose turns are still to be sampled.

    The choice depends on the completions, their order and the seed alone. Where there are fewer
    places than are asked for, some are continued several times; where there is none, because no
    completion has two segments, completions begin at the prompt.

    Args:
        token_ends: Finds the tokens at which segments end, as `ChatFormat.token_ends` does.
        seed: Of a choice at random.
        at_turns: Whether beginnings end with turns, not with segments.
    """
    places = [
        place
        for one in rollouts
        if one.failure is None
        for place in (_ends_of_turns(one) if at_turns else _ends_of_segments(one, tree, token_ends))
    ]
    chosen = _choose(places, tree, seed, [r.branch for r in rollouts if r.branch is not None])
    begun = []
    for index, place in enumerate(chosen, start=len(rollouts)):
        # Of several turns the conversation as it was; of one, the prompt and the tokens so far.
        source = rollouts[0] if place is None or not at_turns else place.source
        length = place.length if place is not None and at_turns else 0
        (before,) = [one for one in source.turn_starts or () if one.num_tokens == length]
        new = replace(before.copy(), index=index)
        if place is not None:
            new.branch = Branch(place.source.index, place.length)
        if place is not None and not at_turns:
            (ids,), (logprobs,) = place.source.ids, place.source.logprobs
            new.begun = (ids[: place.length], logprobs[: place.length])
            new.weight_version = place.source.weight_version
        begun.append(new)
    return begun


def _choose(
    places: Sequence[_Place],
    tree: TreeConfig,
    seed: np.random.SeedSequence,
    taken: Sequence[Branch],
) -> list[_Place | None]:
    if not places:
        return [None] * tree.branches
    if tree.choice == "entropy":
        # First where none has branched yet, then the least certain.
        order = sorted(
            range(len(places)),
            key=lambda i: (
                taken.count(Branch(places[i].source.index, places[i].length)),
                -places[i].surprise,
                i,
            ),
        )
        return [places[order[i % len(order)]] for i in range(tree.branches)]
    random, found = np.random.default_rng(seed), list[_Place | None]()
    while len(found) < tree.branches:
        found += [places[i] for i in random.permutation(len(places)).tolist()]
    return found[: tree.branches]


def _own_start(rollout: Rollout | RolloutInProgress) -> int:
    # What it took over belongs to the completion that it left.
    return 0 if rollout.branch is None else rollout.branch.length


def _ends_of_turns(rollout: RolloutInProgress) -> list[_Place]:
    logprobs = np.concatenate(rollout.logprobs)
    ends = [one.num_tokens for one in rollout.turn_starts or ()]
    start = _own_start(rollout)
    return [_Place(rollout, end, -float(logprobs[end])) for end in ends if end > start]


def _ends_of_segments(
    rollout: RolloutInProgress, tree: TreeConfig, token_ends: TokenEnds
) -> list[_Place]:
    (ids,), (logprobs,) = rollout.ids, rollout.logprobs
    if isinstance(tree.segment, int):
        ends = list(range(tree.segment, len(ids), tree.segment))
    else:
        text = rollout.messages[-1].content
        pieces = text.split(tree.segment)[:-1]
        places = np.cumsum([len(piece) + len(tree.segment) for piece in pieces]).tolist()
        try:
            ends = list(token_ends(ids, text, places)) if places else []
        except DataError:  # its tokens do not spell its text, so no end can be found
            ends = []
    # A beginning that only lacks the token that ends it would hardly be continued otherwise.
    wanted = sorted({end for end in ends if _own_start(rollout) < end < len(ids) - 1})
    return [_Place(rollout, end, -float(logprobs[end])) for end in wanted]


class Segment(NamedTuple):
    """The tokens of a completion between two places at which completions part."""

    id: int
    """The same for all completions of a group that hold it."""
    end: int
    """The number of the completion's tokens up to its end."""
    num_sampled: int
    """The number of its tokens that the policy wrote."""


def tree_segments(rollouts_G: Sequence[Rollout]) -> list[tuple[Segment, ...]]:
    """Return the segments of each completion of a group, from the prompt to its end.

    A group in which nothing branches has one for each completion.
    """
    cuts: list[set[int]] = [{len(rollout.ids_L)} for rollout in rollouts_G]
    for rollout in rollouts_G:
        if rollout.branch is not None:
            cuts[rollout.branch.of].add(rollout.branch.length)
    found: list[tuple[Segment, ...]] = []
    number = 0
    for rollout, ends in zip(rollouts_G, cuts, strict=True):
        start, path = _own_start(rollout), list[Segment]()
        if rollout.branch is not None:
            path = [one for one in found[rollout.branch.of] if one.end <= start]
        for end in sorted(ends):
            written = int(np.count_nonzero(rollout.mask_L[start:end]))
            path.append(Segment(number, end, written))
            start, number = end, number + 1
        found.append(tuple(path))
    return found


def num_sampled(rollout: Rollout) -> int:
    """Return how many tokens were sampled for a completion, without those that it took over."""
    return int(np.count_nonzero(rollout.mask_L[_own_start(rollout) :]))


def num_sampled_turns(rollout: Rollout) -> int:
    """Return how many turns were sampled for a completion, without those that it took over."""
    taken_over = rollout.mask_L[: _own_start(rollout)].astype(np.int8)
    return rollout.num_turns - int(np.count_nonzero(np.diff(taken_over) == -1))
