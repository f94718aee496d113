"""Writes and reads the three JSON files of a reward model's evaluation.

`NAME.json` holds the accuracy of each subset, and `NAME-scores.json` the score of each row, both in
the form that RewardBench's own programs write; `NAME-report.json` holds all that is shown.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laurel.errors import DataError, setting_of
from laurel.evaluation.results import Evaluation, read_json_object
from laurel.evaluation.statistics import (
    MeasuredCredits,
    ScoredList,
    ScoredPair,
)
from laurel.extensions.evaluation import reward_bench
from laurel.observe.console import conversation_text
from laurel.observe.files import replace_file

ABOUT = {"model_type": "Seq. Classifier", "chat_template": "tokenizer"}
"""The constant entries about the model in files of RewardBench's format."""
_SUFFIXES = ("-scores", "-report")


def check_output_directory(path: Path) -> None:
    """Check, before any work is done, that a directory can be created and written to.

    Raises:
        DataError: The path is a file or lies below one, or permission is missing.
    """
    there = path.expanduser()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        what = "is a file" if there == path.expanduser() else f"cannot be made: {there} is a file"
        raise DataError(f"{setting_of('--output', path)} {what}; name a directory")
    if not os.access(there, os.W_OK):
        raise DataError(
            f"{setting_of('--output', path)} cannot be written: no permission in {there}"
        )


def write_results(directory: Path, evaluation: Evaluation) -> list[Path]:
    """Write an evaluation's accuracies, scores and report as three JSON files; return their paths.

    Each file is written atomically and replaces an older one.

    Raises:
        DataError: A file cannot be written.
    """
    target = directory.expanduser()
    target.mkdir(parents=True, exist_ok=True)
    about = {"model": evaluation.model, **ABOUT}
    accuracies = {
        subset.name: subset.value
        for subset in evaluation.measured.subsets
        if subset.value is not None
    }
    contents = {
        "": {**about, **accuracies},
        "-scores": {**about, **_columns(evaluation)},
        "-report": evaluation.report(),
    }
    paths = []
    for suffix, content in contents.items():
        path = target / f"{evaluation.benchmark}{suffix}.json"
        with replace_file(path) as file:
            # Reports keep their order; the others have the reference's, by name.
            json.dump(content, file, indent=4, sort_keys=suffix != "-report", allow_nan=False)
            file.write("\n")
        paths.append(path)
    return paths


def _columns(evaluation: Evaluation) -> dict[str, list[Any]]:
    """Return one list per column, with one entry per row, empty for rows without a score."""
    credits = evaluation.measured.credits
    rows = evaluation.rows
    columns: dict[str, list[Any]] = {
        "id": [row.id for row in rows],
        "subset": [row.subset for row in rows],
        "results": [credits[row.id] for row in rows],
        "failure": [row.failure for row in rows],
        "prompt": [conversation_text(row.prompt) for row in rows],
    }
    pairs = [row for row in rows if isinstance(row, ScoredPair)]
    lists = [row for row in rows if isinstance(row, ScoredList)]
    if pairs:
        columns["text_chosen"] = [row.chosen for row in pairs]
        columns["text_rejected"] = [row.rejected for row in pairs]
        columns["scores_chosen"] = [row.score_chosen for row in pairs]
        columns["scores_rejected"] = [row.score_rejected for row in pairs]
    if lists:
        columns["text"] = [list(row.completions_G) for row in lists]
        columns["scores"] = [list(row.scores_G) for row in lists]
        columns["is_right"] = [list(row.is_right_G) for row in lists]
        columns["num_correct"] = [sum(row.is_right_G) for row in lists]
    return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """The results of one evaluation, read back from those of its files that exist."""

    path: Path
    model: str
    benchmark: str | None
    """The benchmark's name; None if only a file of accuracies exists, which does not name it."""
    subsets: Mapping[str, float | None]
    sections: Mapping[str, float | None]
    """The value of each metric by name; the final score is the last."""
    credits: MeasuredCredits | None
    """The credit of each row, 0 to 1, by its id; None if the file of scores is missing."""
    subset_of: Mapping[str, str | None] = field(default_factory=dict)
    """The subset of each row, by the row's id."""


def read_result(path: Path) -> StoredResult:
    """Read a stored result from any one of its three files, or from another program's accuracies.

    Raises:
        DataError: The file is none of these.
    """
    content = read_json_object(path)
    stem = path.stem
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    beside = {suffix: path.with_name(f"{stem}{suffix}.json") for suffix in _SUFFIXES}
    report = content if "benchmark" in content else _read_if_there(beside["-report"])
    scores = content if "results" in content else _read_if_there(beside["-scores"])
    if report is None:
        return _of_accuracies(path, content)
    try:
        sections = {
            section["name"]: section["value"] for section in (*report["sections"], report["final"])
        }
        subsets = {subset["name"]: subset["value"] for subset in report["subsets"]}
        credits = subset_of = None
        if scores is not None:
            credits = dict(zip(scores["id"], scores["results"], strict=True))
            subset_of = dict(zip(scores["id"], scores["subset"], strict=True))
        return StoredResult(
            path=path,
            model=str(report["model"]),
            benchmark=str(report["benchmark"]),
            subsets=subsets,
            sections=sections,
            credits=credits,
            subset_of=subset_of or {},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not as laurel eval writes it ({type(error).__name__}: {error}); evaluate the "
            "model again with --output"
        ) from error


def _of_accuracies(path: Path, content: Mapping[str, Any]) -> StoredResult:
    """Read a result of which only the file of accuracies, in RewardBench's format, exists."""
    accuracies = {
        name: float(value)
        for name, value in content.items()
        if name in reward_bench.NUM_ROWS or name in reward_bench.PRIOR_SETS
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    }
    if not accuracies:
        raise DataError(
            f"{path} holds no results: expected is a file that laurel eval ... --output wrote, or "
            "one with the accuracy of each subset of RewardBench, such as "
            '{"model": ..., "hep-python": 0.9, ...}'
        )
    sections = reward_bench.section_scores(accuracies)
    return StoredResult(
        path=path,
        model=str(content.get("model", path.stem)),
        benchmark=None,
        subsets=accuracies,
        credits=None,
        sections={**sections, reward_bench.FINAL: reward_bench.final_score(accuracies)},
    )


def _read_if_there(path: Path) -> dict[str, Any] | None:
    return read_json_object(path) if path.is_file() else None
