"""Holds the results of a reward model's evaluation, and reads the JSON files of `laurel eval`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laurel import __version__
from laurel.errors import DataError
from laurel.evaluation.statistics import Figure, Measured, ScoredList, ScoredPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of evaluating one model on one benchmark."""

    benchmark: str
    title: str
    model: str
    data: tuple[str, ...]
    measured: Measured
    baseline: Measured
    """The metrics of a baseline that scores each answer by its length."""
    rows: Sequence[ScoredPair | ScoredList]
    num_completions: int
    num_truncated: int
    failures: tuple[str, ...]
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)
    by_contract: Measured | None = None
    """The metrics under the model's own scoring contract.

    It is None unless `measured` copies another program's tokens.
    """

    @property
    def baseline_name(self) -> str:
        """What the length baseline does, as the heading of its column."""
        # Steps of one answer do not compete.
        return "longest step" if self.benchmark == "process-bench" else "longer wins"

    def beside(self, figure: Figure) -> float | None:
        """Return the length baseline's value of a metric; None if it has none."""
        return _value_in(self.baseline, figure)

    def under_contract(self, figure: Figure) -> float | None:
        """Return the value of a metric under the model's own contract; None if it has none."""
        return None if self.by_contract is None else _value_in(self.by_contract, figure)

    def report(self) -> dict[str, Any]:
        """Return all results that are shown, as JSON-compatible values."""
        measured = self.measured
        return {
            "benchmark": self.benchmark,
            "model": self.model,
            "data": list(self.data),
            "laurel": __version__,
            "seconds": round(self.seconds, 1),
            "num_rows": len(self.rows),
            "num_completions": self.num_completions,
            "num_truncated": self.num_truncated,
            "num_failures": len(self.failures),
            "first_failure": self.failures[0] if self.failures else None,
            "subsets": [self._entry(one) for one in measured.subsets],
            "sections": [self._entry(one) for one in measured.sections],
            "final": self._entry(measured.final),
            "notes": list(measured.notes),
            **self.details,
        }

    def _entry(self, figure: Figure) -> dict[str, Any]:
        return {
            "name": figure.name,
            "value": figure.value,
            "longer_wins": self.beside(figure),
            **({"by_contract": self.under_contract(figure)} if self.by_contract else {}),
            "num_rows": figure.num_rows,
            "num_failures": figure.num_failures,
        }


def _value_in(measured: Measured, figure: Figure) -> float | None:
    every = (*measured.subsets, *measured.sections, measured.final)
    return next((one.value for one in every if one.name == figure.name), None)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        DataError: The file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object; name a file that laurel eval wrote")
    return content
