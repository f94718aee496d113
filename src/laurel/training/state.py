"""Writes the checkpoints of a training run, and resumes from them."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from laurel.data.forest import Batcher
from laurel.errors import CheckpointError
from laurel.models.checkpoint.card import CardFacts, policy_card, reward_model_card
from laurel.models.checkpoint.store import Written
from laurel.models.scoring import ScoringContract
from laurel.rewards.scorer import by_completion, golden_by
from laurel.training.learner import Learner, reward_values
from laurel.training.learner_group import ModelFacts
from laurel.training.stopping import Position
from laurel.types import PreferenceSample, TokenGroup

TRAINING = "training"
"""The directory in a checkpoint that only resuming needs."""
RUN = "run.json"
"""The file in `TRAINING` with the run's log directory and first day, and its rows' fingerprints."""
TRAINING_DATA = "training data"
VALIDATION_DATA = "validation data"
CONFIG = "config.yaml"
"""The file in a checkpoint with the resolved configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointParts:
    """What the checkpoints of a run hold besides model and optimizer, whatever it trains."""

    card: CardFacts
    """The facts of the model card besides the checkpoint's metrics."""
    run_dir: Path
    """The log directory of the run."""
    config_yaml: str = ""
    """The resolved configuration."""
    save_optimizer: bool = True
    """Whether checkpoints hold what resuming needs."""
    saves_in_background: bool = False
    """Whether training goes on while a checkpoint is written."""
    day: date | None = None
    """The day on which the run began, if something that it loads anew prints it."""


class RunState(ABC):
    """Writes and restores the checkpoints of one run."""

    def __init__(self, learner: Learner, parts: CheckpointParts, rows: Mapping[str, str]) -> None:
        """Take what does not change during the run.

        Args:
            parts: What checkpoints hold besides them.
            rows: Fingerprints of the rows, which must be unchanged for the run to be resumed.
        """
        self.learner = learner
        self.rows = rows
        self.run_dir = parts.run_dir
        self.saves_in_background = parts.saves_in_background
        self._parts = parts
        self.hurries = False
        """Whether a signal has broken a validation off, so that there is little time to save."""

    @abstractmethod
    def write_model(self, directory: Path, position: Position, *, in_background: bool) -> None:
        """Write the model as a directory that Hugging Face loads, as `Learner.export` describes."""

    def more(self) -> dict[str, Any]:
        """Return the algorithm's own state, in types that `checkpoint.state.encode` accepts."""
        return {}

    def restore_more(self, more: Mapping[str, Any]) -> None:
        """Restore the algorithm's own state, which `more` returned."""
        assert not more, f"nothing here remembers {', '.join(more)}"

    def write(self, directory: Path, position: Position, *, in_background: bool = False) -> Written:
        """Fill a checkpoint directory with a Hugging Face model and the state for resuming.

        Args:
            directory: An empty directory.
            in_background: Whether only to begin, so that training can go on meanwhile.

        Returns:
            A function that reports on the writing.
        """
        if not in_background:
            self._write(directory, position, in_background=False)
            return lambda is_awaited: 0.0
        try:
            self._write(directory, position, in_background=True)
        except Exception:
            # Writing must not go on in a directory that is about to be deleted.
            with suppress(Exception):
                self.learner.written(is_awaited=True)
            raise
        return lambda is_awaited: self.learner.written(is_awaited=is_awaited)

    def _write(self, directory: Path, position: Position, *, in_background: bool) -> None:
        self.write_model(directory, position, in_background=in_background)
        (directory / CONFIG).write_text(self._parts.config_yaml, encoding="utf-8")
        if not self._parts.save_optimizer:
            return
        (directory / TRAINING).mkdir()
        run: dict[str, Any] = {"run_dir": str(self.run_dir), "identity": dict(self.rows)}
        if self._parts.day is not None:
            run["day"] = self._parts.day.isoformat()
        (directory / TRAINING / RUN).write_text(json.dumps(run, indent=1), encoding="utf-8")
        self.learner.save_state(
            directory / TRAINING,
            {
                "step": position.step,
                "bad_steps": position.bad_steps,
                "validated_at": position.validated_at,
                "metrics": dict(position.metrics),
                "before": dict(position.before),
                "best_watched": position.best_watched,
                "num_stale": position.num_stale,
                "more": self.more(),
            },
            in_background=in_background,
        )

    def restore(self, directory: Path) -> Position:
        """Restore optimizer, schedule and random generators; the weights are loaded already.

        Raises:
            CheckpointError: The checkpoint belongs to another run, or cannot be resumed.
        """
        check_same_rows(directory, self.rows)
        extra = self.learner.load_state(directory / TRAINING)
        self.restore_more(extra.get("more", {}))
        return Position(
            step=extra["step"],
            bad_steps=extra["bad_steps"],
            validated_at=extra["validated_at"],
            metrics=extra["metrics"],
            before=extra.get("before", {}),  # older checkpoints have none
            best_watched=extra.get("best_watched"),
            num_stale=extra.get("num_stale", 0),
        )


def check_same_rows(directory: Path, rows: Mapping[str, str]) -> None:
    """Refuse to resume from the checkpoint of a run with other rows.

    Args:
        rows: The fingerprints as in `RunState`.

    Raises:
        CheckpointError: The checkpoint belongs to another run, or cannot be resumed.
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
        # The checkpoints of earlier versions do not know the rows of validation.
        changed = [(n, saved[n], now) for n, now in rows.items() if saved.get(n, now) != now]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if changed:
        raise another_run(directory, changed)


def another_run(directory: Path, changed: Sequence[tuple[str, object, object]]) -> CheckpointError:
    """Return the error for a checkpoint of a run with other settings or rows.

    Args:
        changed: What changed: its name, its value then, and its value now.
    """
    weightiest = sorted(changed, key=lambda one: _weight(one[0]))
    named = [
        f"{name}: {_shown(before)} then, {_shown(now)} now"
        for name, before, now in weightiest[:_MOST_NAMED]
    ]
    if len(changed) > _MOST_NAMED:
        named.append(
            f"and {len(changed) - _MOST_NAMED} more; {directory / CONFIG} has what was set then"
        )
    return CheckpointError(
        f"{directory} is of another run ({'; '.join(named)}). Give this run another "
        "checkpointing.checkpoint_dir, or restore what changed."
    )


# The number of changes that the message names.
_MOST_NAMED = 4
# The most important changes come first; the others follow in the order of the file.
_WEIGHTIEST = ("policy.model_name", "policy.scratch", "policy.optimizer", "data.")


def _weight(name: str) -> int:
    firsts = (i for i, begin in enumerate(_WEIGHTIEST) if name.startswith(begin))
    return next(firsts, len(_WEIGHTIEST))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# The number of characters of a value that are shown.
_LONGEST = 80


def read_run_dir(directory: Path) -> Path | None:
    """Read the log directory of the run that saved a checkpoint, if it still exists."""
    try:
        found = Path(json.loads((directory / TRAINING / RUN).read_bytes())["run_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.is_dir() else None


def read_day(directory: Path) -> date | None:
    """Read the day on which the run that saved a checkpoint began; None if it does not say."""
    try:
        return date.fromisoformat(json.loads((directory / TRAINING / RUN).read_bytes())["day"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_bad_rows(
    run_dir: Path, step: int, rows: Iterable[Mapping[str, object]], *, reason: str
) -> Path:
    """Write the rows of a step that was not applied to a file, one line of JSON each.

    Returns the path of the file.
    """
    path = run_dir / "bad_steps" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair, which UTF-8 cannot hold, becomes the JSON escape that can.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps({"reason": reason, **row}, ensure_ascii=False) + "\n")
    return path


# The contents of a checkpoint of reward-model training.

NUM_REFERENCE_GROUPS = 64
"""The number of training groups for reference statistics if there is no validation set."""
FEW_REFERENCE_GROUPS = 8
"""The same if a signal has broken the validation off, after which little time is left."""
NUM_GOLDEN_GROUPS = 3


class RewardRunState(RunState):
    """Writes and restores the checkpoints of a reward model's run."""

    def __init__(
        self,
        learner: Learner,
        parts: CheckpointParts,
        facts: ModelFacts,
        *,
        train: Sequence[PreferenceSample],
        validation: Sequence[Sequence[PreferenceSample]],
        batcher: Batcher,
    ) -> None:
        """Take what does not change during the run.

        Args:
            parts: What checkpoints hold besides them.
            facts: What is known of the model, with its scoring contract.
            validation: The sets of preferences that the model is validated on. The contract holds
                golden scores of the first, or else of the training set.
        """
        rows = {
            TRAINING_DATA: samples_fingerprint(train),
            VALIDATION_DATA: samples_fingerprint(chain.from_iterable(validation)),
        }
        super().__init__(learner, parts, rows)
        assert facts.contract is not None
        self.contract = facts.contract
        self._weights_dtype = facts.weights_dtype
        self._train = train
        golden = validation[0] if validation else train
        self._golden = [sample.preference.group for sample in golden[:NUM_GOLDEN_GROUPS]]
        self._batcher = batcher
        self._reference: tuple[int, list[float]] = (-1, [])

    def remember_reference(self, scores_BG: Sequence[Sequence[float]], *, step: int) -> None:
        """Keep the scores from which the reference statistics of this step's checkpoint come."""
        self._reference = (step, [score for scores_G in scores_BG for score in scores_G])

    def write_model(self, directory: Path, position: Position, *, in_background: bool) -> None:
        """Write the reward model with its scoring contract and card."""
        contract = self._signed_contract(position.step)
        facts = self._parts.card.measured(
            position.metrics, before=position.before, num_steps=position.step
        )
        card = reward_model_card(facts, contract)
        self.learner.export(directory, card, contract=contract, in_background=in_background)
        facts.save(directory)

    def _signed_contract(self, step: int) -> ScoringContract:
        # Reference statistics and golden scores are computed with the current weights.
        exactly = partial(self.learner.outputs, in_full_precision=True)
        score_alone = partial(reward_values, exactly, batcher=self._batcher.of_singles())
        golden = golden_by(score_alone, self.contract, self._golden) if self._golden else ()
        sound = tuple(g for g in golden if all(map(math.isfinite, g.values_K)))
        if golden and not sound:
            raise CheckpointError(
                "the scores of the model are not finite, so it is unusable. Resume from an earlier "
                "checkpoint with a lower policy.optimizer.kwargs.lr, or with "
                "policy.precision=float32"
            )
        measured_at, scores = self._reference
        if measured_at != step or not scores:
            count = FEW_REFERENCE_GROUPS if self.hurries else NUM_REFERENCE_GROUPS
            tokens = [sample.tokens for sample in self._train[:count]]
            values_NK = reward_values(self.learner.outputs, tokens, self._batcher.filled())
            counts = [count for group in tokens for count in group.num_reads_G]
            scores = [self.contract.scalar(row) for row in by_completion(values_NK, counts)]
        scores = [score for score in scores if math.isfinite(score)]
        return self.contract.with_rules(
            mean=statistics.fmean(scores) if scores else None,
            std=statistics.pstdev(scores) if scores else None,
            num_reference=len(scores),
            golden=sound,
            golden_dtype=self._weights_dtype,
            versions=library_versions(),
        )


def samples_fingerprint(samples: Iterable[PreferenceSample]) -> str:
    """Return a hash of the tokens and preferences of a training set, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.trunk_ids.tobytes())
        for ids in sample.tokens.branches_ids_G:
            # The mark tells the same tokens, cut elsewhere, apart.
            digest.update(b"|" + ids.tobytes())
        preference = sample.preference
        values = (preference.ranks_G, preference.margin, preference.target)
        digest.update(repr((values, preference.attributes_GK)).encode())
        if preference.steps_GS is not None:
            digest.update(repr(preference.steps_GS).encode())
    return digest.hexdigest()[:16]


def write_bad_step(
    run_dir: Path, step: int, samples: Sequence[PreferenceSample], reason: str
) -> Path:
    """Write the rows of a step that was not applied to a file, and return its path."""
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
    """Return the versions of the libraries that compute scores."""
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


# The contents of a checkpoint of a policy (supervised fine-tuning, GRPO).


class PolicyRunState(RunState):
    """Writes and restores the checkpoints of a policy's run."""

    def write_model(self, directory: Path, position: Position, *, in_background: bool) -> None:
        """Write the policy with its card."""
        facts = self._parts.card.measured(
            position.metrics, before=position.before, num_steps=position.step
        )
        self.learner.export(directory, policy_card(facts), in_background=in_background)
        facts.save(directory)


def fingerprint_of_tokens(groups: Sequence[TokenGroup]) -> str:
    """Return a hash of the tokens of a training set, in order."""
    return hash_of(
        "|".join(str(ids.tolist()) for ids in (group.trunk_ids, *group.branches_ids_G))
        for group in groups
    )


def hash_of(texts: Iterable[str]) -> str:
    """Return a hash of texts, in order."""
    digest = hashlib.sha256()
    for text in texts:
        # Rows may hold unpaired surrogates, which UTF-8 cannot.
        digest.update(text.encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()[:16]
