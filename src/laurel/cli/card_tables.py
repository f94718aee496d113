"""Tables of evaluations for model cards, from the reports of `laurel eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laurel.errors import DataError
from laurel.models.model_card import EvaluationRow, EvaluationTable

_SUFFIX = "-report.json"
_TITLES = {
    "reward-bench": "RewardBench",
    "reward-bench-2": "RewardBench 2",
    "rm-bench": "RM-Bench",
    "judge-bench": "JudgeBench",
    "pairs": "Preference pairs",
    "best-of-n": "Best of n",
}


def read_evaluations(paths: Sequence[Path]) -> tuple[list[EvaluationTable], list[str]]:
    """The tables of some reports, and the names of the models that they are of.

    Args:
        paths: Directories that `--output` named, or single reports in them.

    Raises:
        DataError: There is no report, or one that cannot be read.
    """
    tables: list[EvaluationTable] = []
    models: list[str] = []
    for path in paths:
        for file in _reports(path.expanduser()):
            report = _read(file)
            try:
                tables.append(_table(report))
                models.append(str(report["model"]))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{file}: not as laurel eval writes it ({type(error).__name__}: {error}); "
                    "evaluate the model again with --output"
                ) from error
    return tables, models


def _reports(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob(f"*{_SUFFIX}"))
        if not found:
            held = ", ".join(sorted(one.name for one in path.iterdir())[:8]) or "nothing"
            raise DataError(
                f"--eval {path} holds no report (*{_SUFFIX}) of laurel eval ... --output. It "
                f"holds: {held}"
            )
        return found
    if not path.is_file():
        raise DataError(f"--eval {path}: there is no such file or directory")
    beside = path.with_name(f"{path.stem.removesuffix('-scores')}{_SUFFIX}")
    return [path if path.name.endswith(_SUFFIX) or not beside.is_file() else beside]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or "benchmark" not in content:
        raise DataError(f"{path} is no report of laurel eval; name the directory of --output")
    return content


def _table(report: dict[str, Any]) -> EvaluationTable:
    benchmark = str(report["benchmark"])
    final = report["final"]
    entries = [*(report["sections"] or report["subsets"]), final]
    # A figure without rows is absent there, and is no row here.
    rows = tuple(_row(entry) for entry in entries if entry["value"] is not None)
    return EvaluationTable(
        title=_TITLES.get(benchmark, benchmark),
        data=tuple(Path(str(one)).name or str(one) for one in report["data"]),
        num_rows=int(report["num_rows"]),
        rows=tuple(dict.fromkeys(rows)),
        notes=tuple(str(note) for note in report["notes"]),
    )


def _row(entry: dict[str, Any]) -> EvaluationRow:
    longer_wins = entry["longer_wins"]
    return EvaluationRow(
        name=str(entry["name"]),
        value=float(entry["value"]),
        longer_wins=None if longer_wins is None else float(longer_wins),
        num_rows=int(entry["num_rows"]),
        num_failures=int(entry["num_failures"]),
    )
