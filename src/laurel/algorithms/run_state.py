"""What a checkpoint of a training run holds, and going on from one."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laurel.algorithms.learner import Learner
from laurel.config.reward_training import RewardTrainingRun
from laurel.errors import CheckpointError
from laurel.models.export import model_card, save_reward_model
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import ScoringContract
from laurel.models.training_state import load_training_state, save_training_state
from laurel.rewards.local import golden_scores, score_tokens
from laurel.types import Group, PreferenceSample

TRAINING = "training"
"""Directory inside a checkpoint for what only resuming needs."""
RUN = "run.json"
"""In there: where the run logs, and the settings that make it this run."""
TRAINING_DATA = "training data"
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
    """What was measured of the weights of this very step. Nothing older: an old figure would make
    weights the best that nobody has measured, or that gave no finite figure."""

    def stepped(self, *, bad_steps: int, metrics: Mapping[str, float]) -> Position:
        """The position one step on."""
        return replace(self, step=self.step + 1, bad_steps=bad_steps, metrics=metrics)

    def validated(self, metrics: Mapping[str, float]) -> Position:
        """The same position with the figures of a validation."""
        return replace(self, validated_at=self.step, metrics={**self.metrics, **metrics})


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
            identity: See `settings_of`.
            config_yaml: The resolved configuration.
            card: `base_model`, `data` and `settings` of the model card.
            run_dir: Where this run logs.
            save_optimizer: Whether the run can be resumed.
            batch_tokens: Token budget of a forward pass.
        """
        self.model = model
        self.contract = contract
        self.run_dir = run_dir
        self.identity = {**identity, TRAINING_DATA: fingerprint(train)}
        self._train = train
        self._golden = golden
        self._config_yaml = config_yaml
        self._card = card
        self._save_optimizer = save_optimizer
        self._batch_tokens = batch_tokens
        self._reference: tuple[int, list[float]] = (-1, [])

    def remember_reference(self, scores_BG: Sequence[Sequence[float]], *, step: int) -> None:
        """Scores that the mean and standard deviation of the checkpoint of this step are of."""
        self._reference = (step, [score for scores_G in scores_BG for score in scores_G])

    def write(self, directory: Path, learner: Learner, position: Position) -> None:
        """Fill a checkpoint directory: a Hugging Face model, and the state to go on."""
        contract = self._signed_contract(position.step)
        card = model_card(metrics=position.metrics, contract=contract, **self._card)
        save_reward_model(directory, self.model, contract, card=card)
        (directory / CONFIG).write_text(self._config_yaml, encoding="utf-8")
        if self._save_optimizer:
            (directory / TRAINING).mkdir()
            run = {"run_dir": str(self.run_dir), "identity": self.identity}
            (directory / TRAINING / RUN).write_text(json.dumps(run, indent=1), encoding="utf-8")
            save_training_state(
                directory / TRAINING,
                optimizer=learner.optimizer,
                scheduler=learner.scheduler,
                extra={
                    "step": position.step,
                    "bad_steps": position.bad_steps,
                    "validated_at": position.validated_at,
                    "metrics": dict(position.metrics),
                },
            )

    def restore(self, directory: Path, learner: Learner) -> Position:
        """Put optimizer, schedule and random generators back; the weights are loaded already.

        Raises:
            CheckpointError: The checkpoint is of another run, or cannot be resumed.
        """
        check_same_run(directory, self.identity)
        extra = load_training_state(
            directory / TRAINING, optimizer=learner.optimizer, scheduler=learner.scheduler
        )
        return Position(
            step=extra["step"],
            bad_steps=extra["bad_steps"],
            validated_at=extra["validated_at"],
            metrics=extra["metrics"],
        )

    def _signed_contract(self, step: int) -> ScoringContract:
        """The contract with reference statistics and golden scores of the weights as they are.

        Raises:
            CheckpointError: The model scores nothing any more. An earlier checkpoint stays newest.
        """
        golden = golden_scores(self.model, self.contract, self._golden)
        sound = tuple(g for g in golden if all(map(math.isfinite, g.values_K)))
        if golden and not sound:
            raise CheckpointError("the scores of the model are not finite, so it is of no use")
        measured_at, scores = self._reference
        if measured_at != step or not scores:
            scores = self._score_some_training_groups()
        scores = [score for score in scores if math.isfinite(score)]
        return self.contract.with_rules(
            mean=statistics.fmean(scores) if scores else None,
            std=statistics.pstdev(scores) if scores else None,
            num_reference=len(scores),
            golden=sound,
            golden_dtype=str(self.model.weights_dtype).removeprefix("torch."),
            versions=library_versions(),
        )

    def _score_some_training_groups(self) -> list[float]:
        tokens = [sample.tokens for sample in self._train[:NUM_REFERENCE_GROUPS]]
        values_NK = score_tokens(
            self.model, tokens, batch_tokens=self._batch_tokens,
            pad_id=self.contract.rules.pad_id or 0,
        )  # fmt: skip
        return [self.contract.scalar(row) for row in values_NK.tolist()]


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
    return dict(_leaves("", settings))


def check_same_run(directory: Path, identity: Mapping[str, object]) -> None:
    """Refuse to go on from the checkpoint of a run whose settings were others.

    Args:
        directory: The checkpoint.
        identity: See `settings_of`; with the training data, where that is known already.

    Raises:
        CheckpointError: It is of another run, or cannot be resumed.
    """
    path = directory / TRAINING / RUN
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{directory} was saved without its optimizer (checkpointing.save_optimizer=false) "
            "and cannot be resumed; start from its weights with policy.model_name, in another "
            "checkpoint_dir"
        )
    try:
        saved = json.loads(path.read_bytes())["identity"]
        names = [n for n in {**saved, **identity} if n != TRAINING_DATA or n in identity]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    changed = [
        f"{name}: {saved.get(name)!r} then, {identity.get(name)!r} now"
        for name in names
        if saved.get(name) != identity.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{directory} is of another run ({'; '.join(changed)}). Give this run another "
            "checkpointing.checkpoint_dir, or restore what changed."
        )


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value


def read_run_dir(directory: Path) -> Path | None:
    """Where the run that saved a checkpoint logged, if that still exists."""
    try:
        found = Path(json.loads((directory / TRAINING / RUN).read_bytes())["run_dir"])
    except (OSError, ValueError, KeyError, TypeError):
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
    return digest.hexdigest()[:16]


def write_bad_step(
    run_dir: Path, step: int, samples: Sequence[PreferenceSample], reason: str
) -> Path:
    """Keep the rows of a step that was not applied, for inspection."""
    path = run_dir / "bad_steps" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair, which UTF-8 cannot hold, becomes the JSON escape that can.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
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
