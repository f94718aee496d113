"""What a checkpoint of a training run holds, and going on from one."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laurel.algorithms.learner import Learner
from laurel.errors import CheckpointError
from laurel.models.export import model_card, save_reward_model
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import ScoringContract
from laurel.models.training_state import load_training_state, save_training_state
from laurel.rewards.local import golden_scores, score_tokens
from laurel.types import Group, PreferenceSample

TRAINING = "training"
"""Directory inside a checkpoint for what only resuming needs."""
RUN_DIR = "run_dir.txt"
CONFIG = "config.yaml"
NUM_REFERENCE_GROUPS = 64
"""Training groups that the reference statistics fall back to without a validation set."""
NUM_GOLDEN_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run is."""

    step: int = 0
    bad_steps: int = 0
    """Steps in a row that were not applied."""
    validated_at: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest of every metric a checkpoint can be chosen by."""

    def moved(self, *, metrics: Mapping[str, float], **changes: Any) -> Position:
        """The position after something happened; metrics are added to those there."""
        return replace(self, metrics={**self.metrics, **metrics}, **changes)


class RunState:
    """Writes and reads the checkpoints of one run."""

    def __init__(
        self,
        *,
        model: RewardModel,
        contract: ScoringContract,
        train: Sequence[PreferenceSample],
        golden: Sequence[Group],
        identity: Mapping[str, object],
        config_yaml: str,
        card: Mapping[str, Any],
        run_dir: Path,
        save_optimizer: bool,
        batch_tokens: int,
    ) -> None:
        """Hold what does not change during the run.

        Args:
            model: The model.
            contract: The contract it scores by.
            train: The training set.
            golden: Groups whose scores are kept in the contract.
            identity: Settings that must be the same when the run goes on.
            config_yaml: The resolved configuration.
            card: `base_model`, `data` and `settings` of the model card.
            run_dir: Where this run logs.
            save_optimizer: Whether the run can be resumed.
            batch_tokens: Token budget of a forward pass.
        """
        self.model = model
        self.contract = contract
        self.run_dir = run_dir
        self.identity = {**identity, "training data": fingerprint(train)}
        self._train = train
        self._golden = golden
        self._config_yaml = config_yaml
        self._card = card
        self._save_optimizer = save_optimizer
        self._batch_tokens = batch_tokens
        self._reference: list[float] = []

    def remember_reference(self, scores_BG: Sequence[Sequence[float]]) -> None:
        """Scores that the mean and standard deviation of the next checkpoint are of."""
        self._reference = [score for scores_G in scores_BG for score in scores_G]

    def write(self, directory: Path, learner: Learner, position: Position) -> None:
        """Fill a checkpoint directory: a Hugging Face model, and the state to go on."""
        contract = self._signed_contract()
        card = model_card(metrics=position.metrics, contract=contract, **self._card)
        save_reward_model(directory, self.model, contract, card=card)
        (directory / CONFIG).write_text(self._config_yaml, encoding="utf-8")
        if self._save_optimizer:
            (directory / TRAINING).mkdir()
            (directory / TRAINING / RUN_DIR).write_text(str(self.run_dir), encoding="utf-8")
            save_training_state(
                directory / TRAINING,
                optimizer=learner.optimizer,
                scheduler=learner.scheduler,
                extra={
                    "step": position.step,
                    "bad_steps": position.bad_steps,
                    "validated_at": position.validated_at,
                    "metrics": dict(position.metrics),
                    "identity": self.identity,
                },
            )

    def restore(self, directory: Path, learner: Learner) -> Position:
        """Put optimizer, schedule and random generators back; the weights are loaded already.

        Raises:
            CheckpointError: The checkpoint is of another run, or cannot be resumed.
        """
        if not (directory / TRAINING).is_dir():
            raise CheckpointError(
                f"{directory} was saved without its optimizer (checkpointing.save_optimizer=false) "
                "and cannot be resumed; start from its weights with policy.model_name, in another "
                "checkpoint_dir"
            )
        extra = load_training_state(
            directory / TRAINING, optimizer=learner.optimizer, scheduler=learner.scheduler
        )
        saved = extra["identity"]
        changed = [
            f"{name}: {saved.get(name)!r} then, {value!r} now"
            for name, value in self.identity.items()
            if saved.get(name) != value
        ]
        if changed:
            raise CheckpointError(
                f"{directory} is of another run ({'; '.join(changed)}). Give this run another "
                "checkpointing.checkpoint_dir, or restore what changed."
            )
        return Position(
            step=extra["step"],
            bad_steps=extra["bad_steps"],
            validated_at=extra["validated_at"],
            metrics=extra["metrics"],
        )

    def _signed_contract(self) -> ScoringContract:
        """The contract with reference statistics and golden scores of the weights as they are."""
        scores = self._reference or self._score_some_training_groups()
        return self.contract.with_rules(
            mean=statistics.fmean(scores) if scores else None,
            std=statistics.pstdev(scores) if scores else None,
            num_reference=len(scores),
            golden=golden_scores(self.model, self.contract, self._golden),
            golden_dtype=str(self.model.precision).removeprefix("torch."),
            versions=library_versions(),
        )

    def _score_some_training_groups(self) -> list[float]:
        tokens = [sample.tokens for sample in self._train[:NUM_REFERENCE_GROUPS]]
        values_NK = score_tokens(
            self.model, tokens, batch_tokens=self._batch_tokens,
            pad_id=self.contract.rules.pad_id or 0,
        )  # fmt: skip
        return [self.contract.scalar(row) for row in values_NK.tolist()]


def read_run_dir(directory: Path) -> Path | None:
    """Where the run that saved a checkpoint logged, if that still exists."""
    try:
        found = Path((directory / TRAINING / RUN_DIR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.is_dir() else None


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
    return digest.hexdigest()


def write_bad_step(
    run_dir: Path, step: int, samples: Sequence[PreferenceSample], reason: str
) -> Path:
    """Keep the rows of a step that was not applied, for inspection."""
    path = run_dir / "bad_steps" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            group = sample.preference.group
            row = {
                "reason": reason,
                "source": sample.preference.source,
                "ranks": sample.preference.ranks_G,
                "lengths": sample.tokens.lengths_G,
                "prompt": [[m.role, m.content] for m in group.prompt],
                "completions": [
                    [[m.role, m.content] for m in completion.messages]
                    for completion in group.completions_G
                ],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


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
