"""What plain transformers makes of a directory that was written here: the test of an export.

Nothing here asks Laurel's own models, attention or contract: text is rendered, tokenised, padded
and pooled by the classes that a user of the directory has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laurel.errors import ScoringContractError
from laurel.models.scoring import ScoringRules
from laurel.models.tokenizer import first_line
from laurel.types import Conversation

ROWS = 4
"""Conversations of one padded batch."""


def plain_scores(
    directory: Path, conversations: Sequence[Conversation], *, device: torch.device
) -> np.ndarray:
    """Scores `[N, K]` of conversations by `AutoModelForSequenceClassification`.

    In padded batches, neighbours of different lengths together.

    Raises:
        ScoringContractError: It does not load, or only with weights left out or made up.
    """
    from transformers import AutoModelForSequenceClassification

    model, tokenizer = _load(AutoModelForSequenceClassification, directory, device)
    rules = ScoringRules.read(directory)
    rows = [_ids(tokenizer, conversation, rules) for conversation in conversations]
    found: list[np.ndarray] = []
    for first in range(0, len(rows), ROWS):
        batch = tokenizer.pad(
            {"input_ids": rows[first : first + ROWS]}, padding_side="right", return_tensors="pt"
        )
        with torch.inference_mode():
            logits_NK: Tensor = model(**batch.to(device)).logits
        found.append(logits_NK.float().cpu().numpy())
    return np.concatenate(found)


def plain_logprobs(
    directory: Path, sequences_N: Sequence[Tensor], starts_N: Sequence[int], *, device: torch.device
) -> np.ndarray:
    """Log-probabilities of the tokens of sequences from their starts on, one after the other, by
    `AutoModelForCausalLM` in one padded batch.

    Raises:
        ScoringContractError: See `plain_scores`.
    """
    from transformers import AutoModelForCausalLM

    model, tokenizer = _load(AutoModelForCausalLM, directory, device)
    rows = {"input_ids": [ids.tolist() for ids in sequences_N]}
    batch = tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(device)
    with torch.inference_mode():
        logits_NLV = model(**batch).logits.float()
    found = []
    for row, (ids, start) in enumerate(zip(sequences_N, starts_N, strict=True)):
        logprobs_LV = logits_NLV[row, start - 1 : len(ids) - 1].log_softmax(dim=-1)
        found.append(logprobs_LV.gather(1, ids[start:, None].to(device))[:, 0].cpu().numpy())
    return np.concatenate(found)


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """In units of max(1, |expected|), as golden scores are compared; infinite where not a number.

    Raises:
        ScoringContractError: Another number of them.
    """
    if found.shape != expected.shape:
        raise ScoringContractError(
            f"plain transformers gives {list(found.shape)} numbers where {list(expected.shape)} "
            "were expected"
        )
    difference = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    return float(difference.max()) if np.isfinite(difference).all() else float("inf")


def _load(factory: Any, directory: Path, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    try:
        model, info = factory.from_pretrained(directory, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # transformers raises what it likes
        raise ScoringContractError(
            f"plain transformers cannot load what was written: {first_line(error)}"
        ) from error
    odd = sorted({*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]})
    if odd:
        raise ScoringContractError(
            f"plain transformers does not find the weights that it expects in what was written: "
            f"{', '.join(map(str, odd[:5]))}"
        )
    return model.eval().to(device), tokenizer


def _ids(tokenizer: Any, conversation: Conversation, rules: ScoringRules) -> list[int]:
    """What the program in the model card makes of a conversation."""
    messages = [{"role": m.role, "content": m.content} for m in conversation]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=rules.pooled == "model")["input_ids"]
    longest = rules.max_length
    if len(ids) <= longest:
        return ids
    if rules.truncation_side == "right" or rules.pooled == "model":
        return [*ids[: longest - 1], ids[-1]]
    if ids[0] == rules.bos_id:
        return [ids[0], *ids[1 - longest :]]
    return ids[-longest:]
