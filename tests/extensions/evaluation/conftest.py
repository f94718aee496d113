"""Scored pairs and lists, and what the reference implementation made of some."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from laurel.evaluation.statistics import ScoredList, ScoredPair
from laurel.types import Message

DATA = Path(os.environ.get("LAUREL_DATA", ""))

PROMPT = (Message("user", "?"),)


def make_pair(name, scores, subset=None, *, texts=("a long answer", "short")):
    return ScoredPair(
        id=name,
        prompt=PROMPT,
        chosen=texts[0],
        rejected=texts[1],
        score_chosen=scores[0],
        score_rejected=scores[1],
        subset=subset,
    )


def make_pairs(subset, right, wrong, failed=0):
    every: list[tuple[float | None, float | None]] = [(1.0, 0.0)] * right
    every += [(0.0, 1.0)] * wrong + [(None, 0.0)] * failed
    return [make_pair(f"{subset}/{i}", scores, subset) for i, scores in enumerate(every)]


def make_list(name, scores, num_right=1, subset=None, *, texts=None):
    return ScoredList(
        id=name,
        prompt=PROMPT,
        subset=subset,
        scores_G=tuple(scores),
        completions_G=tuple(texts or [f"answer {i}" for i in range(len(scores))]),
        is_right_G=tuple(i < num_right for i in range(len(scores))),
    )


@pytest.fixture(scope="session")
def pair():
    return make_pair


@pytest.fixture(scope="session")
def pairs():
    """So many right, wrong and failed ones of a subset."""
    return make_pairs


@pytest.fixture(scope="session")
def scored_list():
    """Right answers first."""
    return make_list


@pytest.fixture(scope="session")
def oracle():
    """Numbers that the reference implementation gave."""

    def read(name):
        path = DATA.resolve().parent / "oracles" / f"{name}_oracle.json"
        if not path.is_file():
            pytest.skip(f"{path} is not here (LAUREL_DATA)")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    return read
