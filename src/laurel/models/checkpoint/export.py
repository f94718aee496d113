"""Writes models as directories from which Hugging Face's classes compute the same scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laurel.models.checkpoint.card import CARD
from laurel.models.checkpoint.store import Background
from laurel.models.forest.decoder import Decoder, RewardModel
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.adapters import save_adapters, trained_weights
from laurel.models.parallel.mesh import fail_together
from laurel.models.parallel.weights import FILE_BYTES, in_files, saved_weights, write_weights
from laurel.models.scoring import ScoringContract


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
