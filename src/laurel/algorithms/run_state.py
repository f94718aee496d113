"""What a checkpoint of a training run holds, and going on from one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laurel.algorithms.learner import Learner
from laurel.errors import CheckpointError
from laurel.models.save_under_way import Written

TRAINING = "training"
"""Directory inside a checkpoint for what only resuming needs."""
RUN = "run.json"
"""In there: where the run logs, and the settings that make it this run."""
TRAINING_DATA = "training data"
CONFIG = "config.yaml"


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


class RunState(ABC):
    """Writes and reads the checkpoints of one run."""

    def __init__(
        self,
        learner: Learner,
        *,
        identity: Mapping[str, object],
        config_yaml: str,
        run_dir: Path,
        save_optimizer: bool,
        saves_in_background: bool = False,
    ) -> None:
        """Hold what does not change during the run.

        Args:
            learner: The model with its optimizer.
            identity: By dotted name, what must be the same when a run goes on, or it would be
                another run.
            config_yaml: The resolved configuration.
            run_dir: Where this run logs.
            save_optimizer: Whether the run can be resumed.
            saves_in_background: Whether training goes on while a checkpoint is written.
        """
        self.learner = learner
        self.identity = identity
        self.run_dir = run_dir
        self.saves_in_background = saves_in_background
        self._config_yaml = config_yaml
        self._save_optimizer = save_optimizer

    @abstractmethod
    def write_model(self, directory: Path, position: Position, *, in_background: bool) -> None:
        """Write the weights as a directory that Hugging Face loads: see `Learner.export`."""

    def more(self) -> dict[str, Any]:
        """What the algorithm itself must remember; see `state_encoding.encode`."""
        return {}

    def take_back(self, more: Mapping[str, Any]) -> None:
        """The same, from a checkpoint."""
        assert not more, f"nothing here remembers {', '.join(more)}"

    def write(self, directory: Path, position: Position, *, in_background: bool = False) -> Written:
        """Fill a checkpoint directory: a Hugging Face model, and the state to go on.

        Args:
            directory: Exists and is empty.
            position: Where the run is.
            in_background: Only begin; training may go on meanwhile.

        Returns:
            Whom to ask for the end.
        """
        if not in_background:
            self._write(directory, position, in_background=False)
            return lambda is_awaited: 0.0
        try:
            self._write(directory, position, in_background=True)
        except Exception:
            # What was begun must not go on in a directory that is about to be deleted.
            with suppress(Exception):
                self.learner.written(is_awaited=True)
            raise
        return lambda is_awaited: self.learner.written(is_awaited=is_awaited)

    def _write(self, directory: Path, position: Position, *, in_background: bool) -> None:
        self.write_model(directory, position, in_background=in_background)
        (directory / CONFIG).write_text(self._config_yaml, encoding="utf-8")
        if not self._save_optimizer:
            return
        (directory / TRAINING).mkdir()
        run = {"run_dir": str(self.run_dir), "identity": self.identity}
        (directory / TRAINING / RUN).write_text(json.dumps(run, indent=1), encoding="utf-8")
        self.learner.save_state(
            directory / TRAINING,
            {
                "step": position.step,
                "bad_steps": position.bad_steps,
                "validated_at": position.validated_at,
                "metrics": dict(position.metrics),
                "more": self.more(),
            },
            in_background=in_background,
        )

    def restore(self, directory: Path) -> Position:
        """Put optimizer, schedule and random generators back; the weights are loaded already.

        Raises:
            CheckpointError: The checkpoint is of another run, or cannot be resumed.
        """
        check_same_run(directory, self.identity)
        extra = self.learner.load_state(directory / TRAINING)
        self.take_back(extra.get("more", {}))
        return Position(
            step=extra["step"],
            bad_steps=extra["bad_steps"],
            validated_at=extra["validated_at"],
            metrics=extra["metrics"],
        )


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
    changed = sorted((n for n in names if saved.get(n) != identity.get(n)), key=_weight)
    if changed:
        told = [
            f"{name}: {_shown(saved.get(name))} then, {_shown(identity.get(name))} now"
            for name in changed[:_TOLD]
        ]
        if len(changed) > _TOLD:
            told.append(
                f"and {len(changed) - _TOLD} more; {directory / CONFIG} has what was set then"
            )
        raise CheckpointError(
            f"{directory} is of another run ({'; '.join(told)}). Give this run another "
            "checkpointing.checkpoint_dir, or restore what changed."
        )


_TOLD = 4
"""Settings that are told by name where a run is another one."""
_WEIGHTIEST = ("policy.model_name", TRAINING_DATA, "policy.scratch", "policy.optimizer", "data.")
"""What says most of why it is another run, in this order; the rest come as they are written."""


def _weight(name: str) -> int:
    firsts = (i for i, begin in enumerate(_WEIGHTIEST) if name.startswith(begin))
    return next(firsts, len(_WEIGHTIEST))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_LONGEST = 80
"""Letters of a value that are shown."""


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The entries of nested mappings, by dotted name."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value


def read_run_dir(directory: Path) -> Path | None:
    """Where the run that saved a checkpoint logged, if that still exists."""
    try:
        found = Path(json.loads((directory / TRAINING / RUN).read_bytes())["run_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.is_dir() else None


def write_bad_rows(
    run_dir: Path, step: int, rows: Iterable[Mapping[str, object]], *, reason: str
) -> Path:
    """Keep the rows of a step that was not applied, for inspection; JSON, a line each."""
    path = run_dir / "bad_steps" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair, which UTF-8 cannot hold, becomes the JSON escape that can.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps({"reason": reason, **row}, ensure_ascii=False) + "\n")
    return path
