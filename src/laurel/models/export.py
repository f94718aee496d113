"""Writing a reward model as a directory that Hugging Face loads with the same scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from laurel.models.adapters import merged_state, save_adapters
from laurel.models.reward_model import RewardModel
from laurel.models.scoring import ScoringContract, ScoringRules

CARD = "README.md"


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
        save_adapters(directory, adapters)
    (directory / CARD).write_text(card, encoding="utf-8")


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

{_snippet(rules)}"""


def _snippet(rules: ScoringRules) -> str:
    """How a program without Laurel gets the scores."""
    values = "logits[:, 0]"
    if rules.attributes:
        values = f"logits  # one row each of: {', '.join(rules.attributes)}"
    return f"""```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained(DIRECTORY).eval()
tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in conversations]
batch = tokenizer(
    texts, add_special_tokens={rules.pooled == "model"}, padding=True, padding_side="right",
    return_tensors="pt",
)
scores = model(**batch).{values}
```

A longer conversation than the longest above has to be cut by you; Laurel does it by itself.
"""
