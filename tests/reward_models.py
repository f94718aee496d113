"""Small reward models on disk, as runs of Laurel and other programs leave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from laurel.config.policy import RewardModelConfig, ScratchConfig
from laurel.models.checkpoint.export import save_reward_model
from laurel.models.checkpoint.store import CheckpointStore
from laurel.models.loading.pretrained import scratch_config, train_tokenizer
from laurel.models.loading.reward_model import LoadedRewardModel, load_reward_model
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import golden_scores
from laurel.types import Message, group_of
from saved_steps import save_step

TEXTS = ("the laurel grows by the western gate", "bread and wine", "an old man of the river")


def small_model(
    *,
    attributes: Sequence[str] = (),
    attribute_weights: Sequence[float] | None = None,
    max_length: int = 64,
    seed: int = 0,
) -> LoadedRewardModel:
    """A random reward model whose scores are of size 1."""
    head = RewardModelConfig(
        reward_model_type="regression" if attributes else "bradley_terry",
        attributes=list(attributes),
        attribute_weights=None if attribute_weights is None else list(attribute_weights),
    )
    return random_reward_model(head, TEXTS, max_length=max_length, seed=seed)


def random_reward_model(
    head: RewardModelConfig,
    texts: Sequence[str],
    *,
    max_length: int,
    seed: int,
    reads_forests: bool = True,
) -> LoadedRewardModel:
    """A reward model with this head, whose weights are random and outputs of size 1."""
    spec = ModelSpec(
        scratch=ScratchConfig(hidden_size=32, vocab_size=400),
        precision="float32",
        reads_forests=reads_forests,
        head=head,
    )
    torch.set_num_threads(1)
    loaded = load_reward_model(
        spec,
        seed=seed,
        max_length=max_length,
        truncation_side="left",
        device=torch.device("cpu"),
        texts=texts,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return loaded


def write_model(loaded: LoadedRewardModel, directory: Path) -> None:
    """What a checkpoint holds besides the state of its run: weights, tokenizer, contract."""
    asked = group_of((Message("user", "Where?"),), ("By the gate.", "No."), group_id="golden")
    golden = golden_scores(loaded.model, loaded.contract, [asked])
    save_reward_model(
        directory, loaded.model, loaded.contract.with_rules(golden=golden), card="A small model."
    )


def write_run(
    root: Path,
    metrics: dict[int, float | None],
    *,
    make: Callable[[int], LoadedRewardModel] | None = None,
) -> Path:
    """A directory of checkpoints, one per step, each of another model; returns it."""
    with CheckpointStore(
        root, metric_name="validation-default_accuracy", higher_is_better=True
    ) as s:
        for step, metric in metrics.items():
            loaded = make(step) if make is not None else small_model(seed=step)
            save_step(s, step, lambda directory, m=loaded: write_model(m, directory), metric=metric)
    return root


def write_foreign_model(directory: Path, *, pad_is_eos: bool = False, head: bool = True) -> Path:
    """A directory as other programs save it: no contract, no manifest; perhaps without a head."""
    loaded = small_model()
    tokenizer: Any = loaded.contract.tokenizer
    model: Any = loaded.model.classifier
    if not head:
        hf_config = scratch_config(
            ScratchConfig(hidden_size=32, vocab_size=400),
            train_tokenizer(TEXTS, vocab_size=400),
            max_length=64,
        )
        model = AutoModelForCausalLM.from_config(hf_config)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(directory)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(directory)
    return directory
