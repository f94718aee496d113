"""What a checkpoint of reward-model training holds."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from laurel.algorithms.learner import Learner
from laurel.algorithms.reward_scores import Scores, reward_scores
from laurel.algorithms.run_state import TRAINING_DATA, Position, RunState, leaves, write_bad_rows
from laurel.config.reward_training import RewardTrainingRun
from laurel.errors import CheckpointError
from laurel.models.model_card import CardFacts, reward_model_card
from laurel.models.scoring import GoldenScore, ScoringContract
from laurel.rewards.local import golden_by
from laurel.types import Group, PreferenceSample, TokenGroup

NUM_REFERENCE_GROUPS = 64
"""Training groups that the reference statistics fall back to without a validation set."""
NUM_GOLDEN_GROUPS = 3


class RewardRunState(RunState):
    """Checkpoints that are reward models."""

    def __init__(
        self,
        learner: Learner,
        *,
        contract: ScoringContract,
        path: Literal["forest", "padded"],
        weights_dtype: str,
        train: Sequence[PreferenceSample],
        golden: Sequence[Group],
        identity: Mapping[str, object],
        config_yaml: str,
        card: CardFacts,
        run_dir: Path,
        save_optimizer: bool,
        batch_tokens: int,
        saves_in_background: bool = False,
    ) -> None:
        """Hold what does not change during the run.

        Args:
            learner: The model with its optimizer.
            contract: The contract it scores by.
            path: How batches reach the model.
            weights_dtype: Of the model, e.g. `float32`.
            train: The training set.
            golden: Groups whose scores are kept in the contract.
            identity: See `settings_of`.
            config_yaml: The resolved configuration.
            card: What the model card says besides the figures of the checkpoint.
            run_dir: Where this run logs.
            save_optimizer: Whether the run can be resumed.
            batch_tokens: Token budget of a forward pass.
            saves_in_background: See `RunState`.
        """
        super().__init__(
            learner,
            identity={**identity, TRAINING_DATA: fingerprint(train)},
            config_yaml=config_yaml,
            run_dir=run_dir,
            save_optimizer=save_optimizer,
            saves_in_background=saves_in_background,
        )
        self.contract = contract
        self._path = path
        self._weights_dtype = weights_dtype
        self._train = train
        self._golden = golden
        self._card = card
        self._batch_tokens = batch_tokens
        self._reference: tuple[int, list[float]] = (-1, [])

    def remember_reference(self, scores_BG: Sequence[Sequence[float]], *, step: int) -> None:
        """Scores that the mean and standard deviation of the checkpoint of this step are of."""
        self._reference = (step, [score for scores_G in scores_BG for score in scores_G])

    def write_model(self, directory: Path, position: Position, *, in_background: bool) -> None:
        """See `RunState`."""
        contract = self._signed_contract(position.step)
        facts = self._card.measured(position.metrics)
        card = reward_model_card(facts, contract)
        self.learner.export(directory, card, contract=contract, in_background=in_background)
        facts.save(directory)

    def _signed_contract(self, step: int) -> ScoringContract:
        """The contract with reference statistics and golden scores of the weights as they are.

        Raises:
            CheckpointError: The model scores nothing any more. An earlier checkpoint stays newest.
        """
        golden = self._golden_scores()
        sound = tuple(g for g in golden if all(map(math.isfinite, g.values_K)))
        if golden and not sound:
            raise CheckpointError(
                "the scores of the model are not finite, so it is of no use. Go on from an earlier "
                "checkpoint with a lower policy.optimizer.kwargs.lr, or with "
                "policy.precision=float32"
            )
        measured_at, scores = self._reference
        if measured_at != step or not scores:
            scores = self._score_some_training_groups()
        scores = [score for score in scores if math.isfinite(score)]
        return self.contract.with_rules(
            mean=statistics.fmean(scores) if scores else None,
            std=statistics.pstdev(scores) if scores else None,
            num_reference=len(scores),
            golden=sound,
            golden_dtype=self._weights_dtype,
            versions=library_versions(),
        )

    def _score_some_training_groups(self) -> list[float]:
        tokens = [sample.tokens for sample in self._train[:NUM_REFERENCE_GROUPS]]
        values_NK = self._scores(self.learner.outputs, tokens, batch_tokens=self._batch_tokens)
        return [self.contract.scalar(row) for row in values_NK.tolist()]

    def _golden_scores(self) -> tuple[GoldenScore, ...]:
        """See `rewards.local.golden_scores`."""
        exactly = partial(self.learner.outputs, in_full_precision=True)
        # A budget of one token leaves each conversation by itself.
        score_alone = partial(self._scores, exactly, batch_tokens=1)
        return golden_by(score_alone, self.contract, self._golden) if self._golden else ()

    def _scores(
        self, outputs: Scores, tokens: Sequence[TokenGroup], *, batch_tokens: int
    ) -> np.ndarray:
        pad_id = self.contract.rules.pad_id or 0
        return reward_scores(
            outputs, tokens, path=self._path, batch_tokens=batch_tokens, pad_id=pad_id
        )


def settings_of(config: RewardTrainingRun) -> dict[str, object]:
    """What must be the same when a run goes on, by dotted name, or it would be another run.

    Besides what makes the arithmetic, this holds what a checkpoint brings with it (tokenizer,
    learning rate): a change of that would have no effect and must not pass in silence.
    """
    policy, data = config.policy, config.data
    settings = {
        "rm": config.rm.model_dump(mode="json", include={"seed", "loss"}),
        "policy": policy.model_dump(
            mode="json",
            include={
                "model_name", "scratch", "hf_config_overrides", "tokenizer", "reward_model_cfg",
                "train_global_batch_size", "precision", "optimizer", "scheduler",
            },
        )
        | {"dtensor_cfg": {"lora_cfg": policy.dtensor_cfg.lora_cfg.model_dump(mode="json")}},
        "data": data.model_dump(mode="json", include={"shuffle", "truncation_side"})
        | {"max_input_seq_length": data.max_input_seq_length or policy.max_total_sequence_length},
    }  # fmt: skip
    return dict(leaves("", settings))


def fingerprint(samples: Sequence[PreferenceSample]) -> str:
    """A hash of the tokens and judgements of a training set, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.trunk_ids.tobytes())
        for ids in sample.tokens.branches_ids_G:
            digest.update(b"|" + ids.tobytes())
        preference = sample.preference
        judged = (preference.ranks_G, preference.margin, preference.target)
        digest.update(repr((judged, preference.attributes_GK)).encode())
    return digest.hexdigest()[:16]


def write_bad_step(
    run_dir: Path, step: int, samples: Sequence[PreferenceSample], reason: str
) -> Path:
    """Keep the rows of a step that was not applied, for inspection."""
    rows = (
        {
            "source": sample.preference.source,
            "ranks": sample.preference.ranks_G,
            "lengths": sample.tokens.lengths_G,
            "prompt": [[m.role, m.content] for m in sample.preference.group.prompt],
            "completions": [
                [[m.role, m.content] for m in completion.messages]
                for completion in sample.preference.group.completions_G
            ],
        }
        for sample in samples
    )
    return write_bad_rows(run_dir, step, rows, reason=reason)


def library_versions() -> dict[str, str]:
    """Versions of what computes the scores."""
    import tokenizers
    import torch
    import transformers

    import laurel

    return {
        "laurel": laurel.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
