"""Computes scores and log-probabilities as other programs do, from an exported directory."""

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
"""The number of conversations in one padded batch."""


def plain_scores(
    directory: Path, conversations: Sequence[Conversation], *, device: torch.device
) -> np.ndarray:
    """Score conversations with classes of transformers alone, to check an export.

    The class is `AutoModelForSequenceClassification`, or `AutoModelForTokenClassification` for a
    process reward model.

    Returns:
        `[N, K]`: the K outputs of the head for each of the N conversations. Of a process reward
        model `[S, 1]`: the values of the steps of all conversations.

    Raises:
        ScoringContractError: The model cannot be loaded, or the files lack weights or have
            unexpected ones.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    rules = ScoringRules.read(directory)
    factory: Any = AutoModelForSequenceClassification
    if rules.steps is not None:
        factory = AutoModelForTokenClassification
    model, tokenizer = _load(factory, directory, device)
    rows = [_ids(tokenizer, conversation, rules) for conversation in conversations]
    outputs: list[np.ndarray] = []
    for first in range(0, len(rows), ROWS):
        batch = tokenizer.pad(
            {"input_ids": rows[first : first + ROWS]}, padding_side="right", return_tensors="pt"
        )
        with torch.inference_mode():
            logits: Tensor = model(**batch.to(device)).logits
        if rules.steps is None:
            outputs.append(logits.float().cpu().numpy())
            continue
        for row, conversation in enumerate(conversations[first : first + ROWS]):
            reads = _step_reads(tokenizer, conversation, rules.steps.separator)
            outputs.append(logits[row, reads].float().sigmoid().cpu().numpy())
    return np.concatenate(outputs)


def _step_reads(tokenizer: Any, conversation: Conversation, separator: str) -> list[int]:
    # As the program in the model card does.
    messages = [{"role": m.role, "content": m.content} for m in conversation]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answer = conversation[-1].content.strip()
    end = text.rindex(answer)
    reads = []
    for step in answer.split(separator):
        end += len(step) + len(separator)
        if step.strip():
            reads.append(
                max(i for i, (first, _) in enumerate(tokens["offset_mapping"]) if first < end)
            )
    reads[-1:] = [len(tokens["input_ids"]) - 1]
    return reads


def plain_logprobs(
    directory: Path, sequences_N: Sequence[Tensor], starts_N: Sequence[int], *, device: torch.device
) -> np.ndarray:
    """Compute log-probabilities with `AutoModelForCausalLM` alone, to check an export.

    Args:
        starts_N: The index in each sequence of the first token whose log-probability is returned.

    Returns:
        The log-probabilities of all sequences, concatenated.

    Raises:
        ScoringContractError: The model cannot be loaded, or the files lack weights or have
            unexpected ones.
    """
    from transformers import AutoModelForCausalLM

    model, tokenizer = _load(AutoModelForCausalLM, directory, device)
    rows = {"input_ids": [ids.tolist() for ids in sequences_N]}
    batch = tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(device)
    with torch.inference_mode():
        logits_NLV = model(**batch).logits.float()
    logprobs = []
    for row, (ids, start) in enumerate(zip(sequences_N, starts_N, strict=True)):
        logprobs_LV = logits_NLV[row, start - 1 : len(ids) - 1].log_softmax(dim=-1)
        logprobs.append(logprobs_LV.gather(1, ids[start:, None].to(device))[:, 0].cpu().numpy())
    return np.concatenate(logprobs)


def largest_difference(computed: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two arrays in units of max(1, |expected|).

    Golden scores are compared in the same way. The result is infinite if any difference is not
    finite.

    Raises:
        ScoringContractError: The two arrays have different shapes.
    """
    if computed.shape != expected.shape:
        raise ScoringContractError(
            f"plain transformers gives {list(computed.shape)} numbers where {list(expected.shape)} "
            "were expected"
        )
    difference = np.abs(computed - expected) / np.maximum(1.0, np.abs(expected))
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
    # As the program in the model card does.
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
