"""Writing a reward model as a directory that Hugging Face loads with the same scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from laurel.models.across_ranks import fail_together
from laurel.models.adapters import save_adapters, trained_weights
from laurel.models.background import Background
from laurel.models.decoder import Decoder
from laurel.models.model_card import CARD
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import ScoringContract
from laurel.models.sharded_weights import FILE_BYTES, in_files, saved_weights, write_weights


def save_reward_model(
    directory: Path,
    model: RewardModel,
    contract: ScoringContract,
    *,
    card: str,
    background: Background | None = None,
) -> None:
    """Write weights, configuration, tokenizer, scoring contract and model card.

    With adapters, the weights are the merged ones, so the directory needs nothing besides itself;
    the adapters themselves lie in `adapter/`, for resuming and for small downloads.

    Args:
        directory: Exists, for the rank that writes.
        model: Whole, or spread over ranks, which then all call this; one of them writes.
        contract: With the golden scores of these weights.
        card: See `reward_model_card`.
        background: See `write_model`.
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
    """Write the weights and configuration of a model, its adapters if any, and what goes with it.

    Args:
        directory: See `save_reward_model`.
        model: See `save_reward_model`.
        write_rest: Writes the other files; called by the process that writes.
        max_file_bytes: Of one file of weights: so much of the model, and no more, is copied to the
            memory of the process that writes, one file after the other.
        background: Writes the weights, all of them from copies on the host that are taken before
            this returns; what goes wrong in that is told by it. None: they are written here.

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
    """Each in turn, and let go."""
    while files:
        yield files.pop(0)
