"""Scored pairs and lists, and what the reference implementation made of some."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from laurel.evaluation.statistics import ScoredList, ScoredPair
from laurel.types import Message

DATA = Path(os.environ.get("LAUREL_DATA", ""))

PROMPT = (Message("user", "?"),)


def make_pair(
    name: str,
    scores: tuple[float | None, float | None],
    subset: str | None = None,
    *,
    texts: tuple[str, str] = ("a long answer", "short"),
) -> ScoredPair:
    return ScoredPair(
        id=name,
        prompt=PROMPT,
        chosen=texts[0],
        rejected=texts[1],
        score_chosen=scores[0],
        score_rejected=scores[1],
        subset=subset,
    )


def make_pairs(subset: str, right: int, wrong: int, failed: int = 0) -> list[ScoredPair]:
    every: list[tuple[float | None, float | None]] = [(1.0, 0.0)] * right
    every += [(0.0, 1.0)] * wrong + [(None, 0.0)] * failed
    return [make_pair(f"{subset}/{i}", scores, subset) for i, scores in enumerate(every)]


def make_list(
    name: str,
    scores: Sequence[float | None],
    num_right: int = 1,
    subset: str | None = None,
    *,
    texts: Sequence[str] | None = None,
) -> ScoredList:
    return ScoredList(
        id=name,
        prompt=PROMPT,
        subset=subset,
        scores_G=tuple(scores),
        completions_G=tuple(texts or [f"answer {i}" for i in range(len(scores))]),
        is_right_G=tuple(i < num_right for i in range(len(scores))),
    )


@pytest.fixture(scope="session")
def pair() -> Callable[..., ScoredPair]:
    return make_pair


@pytest.fixture(scope="session")
def pairs() -> Callable[..., list[ScoredPair]]:
    """So many right, wrong and failed ones of a subset."""
    return make_pairs


@pytest.fixture(scope="session")
def scored_list() -> Callable[..., ScoredList]:
    """Right answers first."""
    return make_list


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], dict[str, Any]]:
    """Numbers that the reference implementation gave."""

    def read(name: str) -> dict[str, Any]:
        path = DATA.resolve().parent / "oracles" / f"{name}_oracle.json"
        if not path.is_file():
            pytest.skip(f"{path} is not here (LAUREL_DATA)")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    return read
