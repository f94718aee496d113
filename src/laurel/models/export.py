"""Writing a reward model as a directory that Hugging Face loads with the same scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laurel.errors import CheckpointError
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import ScoringContract

CARD = "README.md"
ADAPTER = "adapter"


def save_reward_model(
    directory: Path, model: RewardModel, contract: ScoringContract, *, card: str
) -> None:
    """Write weights, configuration, tokenizer, scoring contract and model card.

    With adapters, the weights are the merged ones, so the directory needs nothing besides itself;
    the adapters themselves lie in `adapter/`, for resuming and for small downloads.
    """
    classifier = model.classifier
    state, adapters = merged_state(classifier)
    classifier.save_pretrained(directory, state_dict=state)
    contract.tokenizer.save_pretrained(directory)
    contract.save(directory)
    if adapters:
        from safetensors.torch import save_file

        (directory / ADAPTER).mkdir()
        save_file(adapters, directory / ADAPTER / "adapters.safetensors")
    (directory / CARD).write_text(card, encoding="utf-8")


def merged_state(classifier: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a plain classifier, and the trainable weights where it has adapters.

    The adapted layers themselves stay untouched: merging and unmerging would round the base
    weights, and a resumed run would no longer be the same run.

    Returns:
        State of the merged model by plain names; state of adapters and head, by their own names
        (empty without adapters).
    """
    layers = {
        name: module
        for name, module in classifier.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }
    state: dict[str, Tensor] = classifier.state_dict()
    if not layers:
        return {name: tensor.detach().cpu() for name, tensor in state.items()}, {}
    merged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = tensor.detach().clone().cpu()
    with torch.no_grad():
        for name, layer in layers.items():
            for adapter in layer.active_adapters:
                delta = layer.get_delta_weight(adapter).detach().cpu()
                merged[f"{name}.weight"] += delta.to(merged[f"{name}.weight"].dtype)
    trained = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in classifier.named_parameters()
        if parameter.requires_grad
    }
    return merged, trained


def load_adapters(directory: Path, classifier: Any) -> None:
    """Put the adapters and the head of a checkpoint into a model that has adapters.

    Raises:
        CheckpointError: The checkpoint has none, or others.
    """
    from safetensors.torch import load_file

    path = directory / ADAPTER / "adapters.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no adapters: it was trained without lora_cfg")
    state = load_file(path)
    wanted = {name for name, p in classifier.named_parameters() if p.requires_grad}
    if set(state) != wanted:
        odd = sorted(set(state) ^ wanted)[:3]
        raise CheckpointError(f"{path} holds other parameters than this run trains: {odd}")
    classifier.load_state_dict(state, strict=False)


def model_card(
    *,
    base_model: str,
    data: Mapping[str, str],
    metrics: Mapping[str, float],
    contract: ScoringContract,
    settings: Mapping[str, object],
) -> str:
    """The README of a checkpoint: what it is, what it learned from, how good, how to use it."""
    rules = contract.rules
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()))
    sets = "\n".join(f"- **{name}**: {text}" for name, text in data.items())
    trained = "\n".join(f"- {name}: {value}" for name, value in settings.items())
    spread = "" if rules.mean is None else (
        f"- Scores on the reference set: mean {rules.mean:.4g}, standard deviation "
        f"{rules.std:.4g} over {rules.num_reference} completions\n"
    )  # fmt: skip
    return f"""---
library_name: transformers
pipeline_tag: text-classification
tags: [reward-model, laurel]
---

# Reward model

Made with Laurel from {base_model}. It gives a conversation one number; only differences between
answers to the same prompt mean anything.

## Data

{sets or "- not recorded"}

## Training

{trained}

## Metrics

| metric | value |
|---|---|
{rows or "| none measured | |"}

## How it scores

- The score is read from the {"last token" if rules.pooled == "last" else "model's own pooling"}, \
by a head in {rules.head_dtype}
- Longest conversation: {rules.max_length} tokens, cut on the {rules.truncation_side}
{spread}- `scoring.json` holds all of this and golden scores that are checked at every load

## Use

```
laurel score --model DIRECTORY conversations.jsonl
```

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained(DIRECTORY).eval()
tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
text = tokenizer.apply_chat_template(messages, tokenize=False)
batch = tokenizer(text, add_special_tokens={rules.pooled == "model"}, return_tensors="pt")
score = model(**batch).logits[0, 0]
```
"""
