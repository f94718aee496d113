"""Writing a policy as a directory that Hugging Face loads with the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laurel.models.background import Background
from laurel.models.export import write_model
from laurel.models.model_card import CARD
from laurel.models.policy import PolicyModel


def save_policy(
    directory: Path,
    model: PolicyModel,
    tokenizer: Any,
    *,
    card: str,
    background: Background | None = None,
) -> None:
    """Write weights, configuration, tokenizer and model card.

    With adapters, the weights are the merged ones, so the directory needs nothing besides itself;
    the adapters themselves lie in `adapter/`, for resuming and for small downloads.

    Args:
        directory: Exists, for the rank that writes.
        model: Whole, or spread over ranks, which then all call this; one of them writes.
        tokenizer: Its own.
        card: See `policy_card`.
        background: See `write_model`.
    """

    def write_rest() -> None:
        tokenizer.save_pretrained(directory)
        (directory / CARD).write_text(card, encoding="utf-8")

    write_model(directory, model, write_rest, background=background)
