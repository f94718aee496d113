"""A reward function that scores as `WordScorer` does."""

from __future__ import annotations

from typing import Any

from fakes import WordScorer
from laurel.types import Message


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **settings: Any
) -> float:
    said = [Message(one["role"], one["content"]) for one in extra_info["prompt"]]
    score = WordScorer(**settings)._score((*said, Message("assistant", solution_str)))
    if score.value is None:
        raise ValueError(score.failure)
    return score.value
