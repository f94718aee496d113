"""Tiny reward models that vLLM can hold, saved as Laurel saves them. Starting it takes seconds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import tiny
import tiny_tokenizers
from laurel.config.policy import RewardModelConfig
from laurel.models.loading.reward_model import LoadedRewardModel, load_reward_model
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import LocalScorer
from reward_models import write_model

SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 1024}
"""Heads of 32: vLLM's attention on CPUs knows none smaller."""
FAMILIES = ("qwen2", "qwen3", "llama")
MAX_LENGTH = 512
POISON = "~"
"""A token that no text of the tests has, unless it is meant to."""


def saved(
    directory: Path,
    family: str,
    *,
    attributes: tuple[str, ...] = (),
    max_length: int = MAX_LENGTH,
    template: str | None = None,
    weight: float = 1.0,
    poison: str = "",
    seed: int = 0,
) -> LoadedRewardModel:
    """A reward model and what it wrote into a directory; its scores are of size 1.

    Args:
        weight: Its head is multiplied by that.
        poison: Text of one token whose embedding becomes NaN.
    """
    raw = directory / "raw"
    write_raw(raw, family, num_labels=len(attributes) or 1, template=template, seed=seed)
    head = RewardModelConfig(
        reward_model_type="regression" if attributes else "bradley_terry",
        attributes=list(attributes),
    )
    torch.set_num_threads(1)
    loaded = load_reward_model(
        ModelSpec(name=str(raw), precision="float32", head=head),
        seed=0,
        max_length=max_length,
        truncation_side="left",
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        loaded.model.classifier.score.weight.mul_(weight)
        if poison:
            ids = loaded.contract.tokenizer(poison)["input_ids"]
            loaded.model.classifier.get_input_embeddings().weight[ids[-1]] = math.nan
    write_model(loaded, directory)
    return loaded


def write_raw(
    directory: Path, family: str, *, num_labels: int = 1, template: str | None = None, seed: int = 0
) -> Any:
    """A classifier as other programs save one: without a contract."""
    tokenizer = tiny_tokenizers.chatml()
    if template is not None:
        tokenizer.chat_template = template
    network = tiny.randomised(
        family,
        {
            **SHAPE,
            "vocab_size": len(tokenizer) + 13,  # transformers adds tokens to some by itself
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **({"sliding_window": None} if family == "mistral" else {}),
            **({"head_dim": 32} if family == "qwen3" else {}),
        },
        num_labels,
        seed,
        0.1,
    )
    directory.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return network


def local(loaded: LoadedRewardModel) -> LocalScorer:
    """The same model in this process."""
    return LocalScorer(loaded.model, loaded.contract)
