"""Writes models as directories from which Hugging Face's classes compute the same scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laurel.errors import ScoringContractError
from laurel.models.checkpoint.card import CARD
from laurel.models.checkpoint.store import Background
from laurel.models.forest.decoder import Decoder, RewardModel
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.adapters import save_adapters, trained_weights
from laurel.models.parallel.mesh import fail_together
from laurel.models.parallel.weights import FILE_BYTES, in_files, saved_weights, write_weights
from laurel.models.scoring import ScoringContract, ScoringRules
from laurel.models.tokenizer import first_line
from laurel.types import Conversation


def save_reward_model(
    directory: Path,
    model: RewardModel,
    contract: ScoringContract,
    *,
    card: str,
    background: Background | None = None,
) -> None:
    """Write the weights, configuration, tokenizer, scoring contract and card of a reward model.

    Adapters are merged into the weights, so the directory is complete. The adapters themselves are
    also written to `adapter/`, for resuming and for small downloads.

    Args:
        directory: An existing directory.
        model: The model. If it is sharded, all ranks call this, and one of them writes.
        contract: The scoring contract, with scores by these weights that every load checks (golden
            scores).
        card: The text of `reward_model_card`.
        background: The worker that writes the files, as for `write_model`.
    """

    def write_rest() -> None:
        contract.tokenizer.save_pretrained(directory)
        contract.save(directory)
        (directory / CARD).write_text(card, encoding="utf-8")

    write_model(directory, model, write_rest, background=background)


def write_model(
    directory: Path,
    model: Decoder,
    write_rest: Callable[[], object],
    *,
    max_file_bytes: int = FILE_BYTES,
    background: Background | None = None,
) -> None:
    """Write the weights and configuration of a model, its adapters if any, and the other files.

    Args:
        directory: An empty directory.
        model: A reward model or policy.
        write_rest: Writes the other files; called in the process that writes.
        max_file_bytes: The size limit of a file of weights. The process that writes holds copies of
            the weights of one file at a time.
        background: The worker that writes the files after this call returns. The weights are copied
            to the host before, and the worker reports errors. None: this call writes the files.

    Raises:
        CheckpointError: Another rank could not write.
    """
    weights = saved_weights(model.network)
    adapters = trained_weights(model.network)
    files = in_files(weights, max_file_bytes=max_file_bytes)

    def write_weights_of(files: Iterator[dict[str, Tensor]]) -> None:
        write_weights(directory, files)
        if adapters:
            save_adapters(directory, adapters)

    def write() -> None:
        model.network.save_pretrained(directory, state_dict={})  # its configuration
        write_rest()
        if background is None:
            write_weights_of(files)
        else:
            background.start(partial(write_weights_of, _handed_out(list(files))))

    if model.mesh is None:
        write()
        return
    error: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            write()
        except Exception as found:
            error = found
    elif background is not None:
        background.start(lambda: None)  # of this batch, too, there is something to tell
    for _ in weights:  # what the other ranks must give, also when nobody can write it
        pass
    fail_together(error, model.mesh, f"saving the model in {directory}")


def _handed_out(files: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    while files:  # popped, so that the weights of a file are freed once it is written
        yield files.pop(0)


# Writing a policy as a directory that Hugging Face loads with the same logits.


def save_policy(
    directory: Path,
    model: PolicyModel,
    tokenizer: Any,
    *,
    card: str,
    background: Background | None = None,
) -> None:
    """Write the weights, configuration, tokenizer and model card of a policy.

    Adapters are merged into the weights, so the directory is complete. The adapters themselves are
    also written to `adapter/`, for resuming and for small downloads.

    Args:
        directory: An existing directory.
        model: The model. If it is sharded, all ranks call this, and one of them writes.
        tokenizer: The policy's tokenizer.
        card: The text of `policy_card`.
        background: The worker that writes the files, as for `write_model`.
    """

    def write_rest() -> None:
        tokenizer.save_pretrained(directory)
        (directory / CARD).write_text(card, encoding="utf-8")

    write_model(directory, model, write_rest, background=background)


# What plain transformers makes of a directory that was written here: the test of an export.
#
# Nothing here asks Laurel's own models, attention or contract: text is rendered, tokenised, padded
# and pooled by the classes that a user of the directory has.

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
    found: list[np.ndarray] = []
    for first in range(0, len(rows), ROWS):
        batch = tokenizer.pad(
            {"input_ids": rows[first : first + ROWS]}, padding_side="right", return_tensors="pt"
        )
        with torch.inference_mode():
            logits: Tensor = model(**batch.to(device)).logits
        if rules.steps is None:
            found.append(logits.float().cpu().numpy())
            continue
        for row, conversation in enumerate(conversations[first : first + ROWS]):
            reads = _step_reads(tokenizer, conversation, rules.steps.separator)
            found.append(logits[row, reads].float().sigmoid().cpu().numpy())
    return np.concatenate(found)


def _step_reads(tokenizer: Any, conversation: Conversation, separator: str) -> list[int]:
    # As the program in the model card does.
    messages = [{"role": m.role, "content": m.content} for m in conversation]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answer = conversation[-1].content.strip()
    end = text.rindex(answer)
    reads = []
    for step in answer.split(separator):
        end += len(step) + len(separator)
        if step.strip():
            reads.append(
                max(i for i, (first, _) in enumerate(found["offset_mapping"]) if first < end)
            )
    reads[-1:] = [len(found["input_ids"]) - 1]
    return reads


def plain_logprobs(
    directory: Path, sequences_N: Sequence[Tensor], starts_N: Sequence[int], *, device: torch.device
) -> np.ndarray:
    """Compute log-probabilities with `AutoModelForCausalLM` alone, to check an export.

    Args:
        directory: The directory of the exported policy.
        sequences_N: The tokens of each sequence.
        starts_N: The index in each sequence of the first token whose log-probability is returned.
        device: The device that computes.

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
    found = []
    for row, (ids, start) in enumerate(zip(sequences_N, starts_N, strict=True)):
        logprobs_LV = logits_NLV[row, start - 1 : len(ids) - 1].log_softmax(dim=-1)
        found.append(logprobs_LV.gather(1, ids[start:, None].to(device))[:, 0].cpu().numpy())
    return np.concatenate(found)


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two arrays in units of max(1, |expected|).

    Golden scores are compared in the same way. The result is infinite if any difference is not
    finite.

    Raises:
        ScoringContractError: The two arrays have different shapes.
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
