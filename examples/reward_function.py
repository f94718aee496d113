"""A reward as a Python function: see configs/grpo_function.yaml, grpo_several_models.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | None,
    extra_info: Mapping[str, Any],
    length_penalty: float = 0.0,
) -> dict[str, float]:
    """1 where the last word is the known answer, less a little for every word.

    Args:
        data_source: Name of the data set, where the rows have such a column.
        solution_str: What the policy answered.
        ground_truth: The known answer.
        extra_info: What else the row has, and the `prompt` as messages.
        length_penalty: Taken off for each word; from `kwargs`.

    Returns:
        The `score`; the other numbers are logged beside it.
    """
    words = solution_str.split()
    right = float(bool(words) and words[-1].strip(".$") == ground_truth)
    return {"score": right - length_penalty * len(words), "right": right, "words": len(words)}


async def brevity(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: Mapping[str, Any]
) -> float:
    """1 for the shortest answers, 0 for long ones. It may be async, e.g. to ask a service."""
    return 1.0 / (1.0 + len(solution_str.split()) / 100)
