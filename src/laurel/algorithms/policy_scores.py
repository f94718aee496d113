"""Log-probabilities of many completions at once, under the policy or the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from laurel.algorithms.batches import part_of, shares
from laurel.data.forest import pack_evenly, pack_padded, pad, plant
from laurel.models.outputs import TokenOutputs
from laurel.types import PaddedRows, TokenForest, TokenGroup

if TYPE_CHECKING:
    from laurel.types import LogProbs


Logprobs = Callable[[Sequence[TokenForest | PaddedRows]], Iterable[TokenOutputs]]
"""`Learner.outputs` of a policy."""


def policy_logprobs(
    outputs: Logprobs,
    groups: Sequence[TokenGroup],
    *,
    path: Literal["forest", "padded"],
    batch_tokens: int,
    pad_id: int,
    share_prompts: bool = True,
    num_places: int = 1,
) -> list[list[LogProbs]]:
    """Log-probabilities of every token of every completion, without gradients and dropout.

    Args:
        outputs: Of the policy, or of the reference.
        groups: Prompts of at least one token, with their completions.
        path: How batches reach the model.
        batch_tokens: Token budget of one forward pass; larger groups are divided.
        pad_id: For models on the padded path.
        share_prompts: Compute a prompt once for all its completions.
        num_places: `Learner.num_places`.

    Returns:
        float32 [L] for each completion of each group, in order whatever the batches were.
    """
    is_forest = path == "forest"
    budget = batch_tokens if is_forest and share_prompts else None
    places = [
        (g, indices) for g, group in enumerate(groups) for indices in shares(group, budget=budget)
    ]
    parts = [part_of(groups[g], indices) for g, indices in places]
    if is_forest:
        sizes = [part.num_tokens for part in parts]
        packed = pack_evenly(sizes, batch_tokens, places=num_places)
    else:
        packed = pack_padded([part.lengths_G for part in parts], batch_tokens)
    chosen = [[parts[number] for number in numbers] for numbers in packed]
    batches = [
        plant(some, share_prompts=share_prompts) if is_forest else pad(some, pad_id=pad_id)
        for some in chosen
    ]
    found: dict[tuple[int, int], LogProbs] = {}
    for numbers, computed in zip(packed, outputs(batches), strict=True):
        logprobs_M = computed.logprobs_M.float().cpu().numpy()
        whose = [(places[n][0], branch) for n in numbers for branch in places[n][1]]
        ends = np.cumsum([len(groups[g].branches_ids_G[branch]) for g, branch in whose])
        found |= zip(whose, np.split(logprobs_M, ends[:-1]), strict=True)
    return [
        [found[g, branch] for branch in range(len(group.branches_ids_G))]
        for g, group in enumerate(groups)
    ]
