"""Every error Laurel raises on purpose, drawn as one tree.

::

    LaurelError
    |-- UserError                     something you gave us cannot be used; exit code 2
    |   |-- ConfigError (ValueError)          a key, a value or an override
    |   |-- DataError (ValueError)            a file or a row
    |   |-- ModelError (ValueError)           a model, tokenizer or chat template
    |   |   `-- ScoringContractError          a model does not give the scores it was saved with
    |   |-- CheckpointError (OSError)         a directory that is torn, altered or foreign
    |   `-- MissingDependencyError (ImportError)   an extra is not installed
    `-- TrainingError (RuntimeError)  the run itself went wrong; exit code 1
        `-- NonFiniteError            loss or gradient were NaN or infinite too often

Each is also the standard class a caller would expect, is picklable (it may cross a process), and
its message says what was wrong, where, and what to do.
"""

from __future__ import annotations


class LaurelError(Exception):
    """Root of the tree."""

    exit_code = 1


class UserError(LaurelError):
    """Something the user gave cannot be used; the message says how to mend it."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration key, value or override that cannot be used."""


class DataError(UserError, ValueError):
    """A data file or row that cannot be used."""


class ModelError(UserError, ValueError):
    """A model, tokenizer or chat template that cannot be used."""


class ScoringContractError(ModelError):
    """A model whose scores differ from those it was saved with."""


class CheckpointError(UserError, OSError):
    """A checkpoint directory that is torn, altered, foreign or busy."""


class MissingDependencyError(UserError, ImportError):
    """An optional package that is needed here and not installed."""

    @classmethod
    def of(cls, package: str, *, extra: str, purpose: str) -> MissingDependencyError:
        """The error with the command that mends it."""
        return cls(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'laurel-rl[{extra}]'"
        )


class TrainingError(LaurelError, RuntimeError):
    """A run that cannot go on."""


class NonFiniteError(TrainingError):
    """The loss or the gradient was NaN or infinite for too many steps."""
