"""Reads the reports of `laurel eval` as tables for a model's card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from laurel.errors import DataError
from laurel.evaluation.results import read_json_object
from laurel.models.checkpoint.card import EvaluationRow, EvaluationTable

_SUFFIX = "-report.json"
_ROW = TypeAdapter(EvaluationRow)
_TITLES = {
    "reward-bench": "RewardBench",
    "reward-bench-2": "RewardBench 2",
    "rm-bench": "RM-Bench",
    "judge-bench": "JudgeBench",
    "pairs": "Preference pairs",
    "best-of-n": "Best of n",
    "process-bench": "ProcessBench",
}


def read_evaluations(paths: Sequence[Path]) -> tuple[list[EvaluationTable], list[str]]:
    """Read evaluation reports; return their tables and the names of the evaluated models.

    Raises:
        DataError: There is no report, or a report cannot be read.
    """
    tables: list[EvaluationTable] = []
    models: list[str] = []
    for path in paths:
        for file in _reports(path.expanduser()):
            report = read_json_object(file)
            if "benchmark" not in report:
                raise DataError(
                    f"{file} is no report of laurel eval; name the directory of --output"
                )
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
        reports = sorted(path.glob(f"*{_SUFFIX}"))
        if not reports:
            names = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise DataError(
                f"--eval {path} holds no report (*{_SUFFIX}) of laurel eval ... --output. It "
                f"holds: {names}"
            )
        return reports
    if not path.is_file():
        raise DataError(f"--eval {path}: there is no such file or directory")
    beside = path.with_name(f"{path.stem.removesuffix('-scores')}{_SUFFIX}")
    return [path if path.name.endswith(_SUFFIX) or not beside.is_file() else beside]


def _table(report: dict[str, Any]) -> EvaluationTable:
    benchmark = str(report["benchmark"])
    final = report["final"]
    entries = [*(report["sections"] or report["subsets"]), final]
    # A metric without rows has no value there, and is no row here.
    rows = [_ROW.validate_python(entry) for entry in entries if entry["value"] is not None]
    return EvaluationTable(
        title=_TITLES.get(benchmark, benchmark),
        data=tuple(Path(str(entry)).name or str(entry) for entry in report["data"]),
        num_rows=int(report["num_rows"]),
        rows=tuple(dict.fromkeys(rows)),
        notes=tuple(str(note) for note in report["notes"]),
        **({"by_length": "if the longest step was wrong"} if benchmark == "process-bench" else {}),
    )
