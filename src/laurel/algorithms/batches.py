"""Judged groups to micro-batches, as the policy section asks."""

from __future__ import annotations

from collections.abc import Sequence

from laurel.algorithms.learner import MicroBatch
from laurel.config.schema import PolicyConfig
from laurel.data.forest import pack, pack_padded, pad, plant
from laurel.models.reward_model import RewardModel
from laurel.types import Preference, PreferenceSample


class Batcher:
    """Cuts batches into micro-batches for one model."""

    def __init__(self, model: RewardModel, policy: PolicyConfig, *, pad_id: int) -> None:
        self._is_forest = model.path == "forest"
        self._policy = policy
        self._pad_id = pad_id

    def cut(
        self, samples: Sequence[PreferenceSample], *, micro_batch_size: int
    ) -> list[MicroBatch[Preference]]:
        """Micro-batches of all samples.

        Forests are filled up to the token budget. Padded rows too where dynamic batching is on, or
        packing is on and the model cannot read forests; otherwise they hold `micro_batch_size`
        groups each, in order.
        """
        tokens = [sample.tokens for sample in samples]
        policy = self._policy
        if self._is_forest:
            share = policy.sequence_packing.share_prompts
            sizes = [t.num_tokens if share else sum(t.lengths_G) for t in tokens]
            parts = pack(sizes, policy.token_budget(policy.sequence_packing))
        elif policy.dynamic_batching.enabled or policy.sequence_packing.enabled:
            dynamic, packing = policy.dynamic_batching, policy.sequence_packing
            budget = policy.token_budget(dynamic if dynamic.enabled else packing)
            parts = pack_padded([t.lengths_G for t in tokens], budget)
        else:
            starts = range(0, len(tokens), micro_batch_size)
            parts = [list(range(s, min(s + micro_batch_size, len(tokens)))) for s in starts]
        return [self._lay_out([samples[i] for i in indices]) for indices in parts]

    def _lay_out(self, samples: Sequence[PreferenceSample]) -> MicroBatch[Preference]:
        tokens = [sample.tokens for sample in samples]
        labels = [sample.preference for sample in samples]
        if self._is_forest:
            forest = plant(tokens, share_prompts=self._policy.sequence_packing.share_prompts)
            return MicroBatch(inputs=forest, labels=labels, num_tokens=len(forest.ids_T))
        rows = pad(tokens, pad_id=self._pad_id)
        return MicroBatch(inputs=rows, labels=labels, num_tokens=rows.ids_NL.numel())
