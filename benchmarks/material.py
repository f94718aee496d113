"""What is measured on: a model with random weights, and rows of real data."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laurel.types import Preference

DATA_DIR = Path(os.environ.get("LAUREL_DATA", "../shared/data"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Real preference pairs, and how much of them one repeat trains on."""

    name: str
    dataset_class: str
    batch_pairs: int
    steps: int
    target: float
    """Pairs per second, as a multiple of the peer's, that the project set itself."""

    @property
    def path(self) -> Path:
        return DATA_DIR / self.name / "train.jsonl.gz"


DATA_SETS = {
    "qa_feedback": DataSet(
        name="qa_feedback",
        dataset_class="BinaryPreferenceDataset",
        batch_pairs=8,
        steps=1,
        target=3.5,
    ),
    "hh_rlhf_harmless": DataSet(
        name="hh_rlhf_harmless",
        dataset_class="PreferenceDataset",
        batch_pairs=16,
        steps=1,
        target=2.5,
    ),
    "ukp_convarg1": DataSet(
        name="ukp_convarg1",
        dataset_class="BinaryPreferenceDataset",
        batch_pairs=32,
        steps=1,
        target=1.5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int = 8192

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' matrices: all parameters but embeddings and norms."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    def products(self, tokens: float, read: float) -> float:
        """Operations of the layers' matrices for tokens of which `read` leave the last layer.

        Two for each weight and token; of tokens that nobody reads the last layer needs keys and
        values alone.
        """
        keys_and_values = 2 * self.hidden * self.head_size * self.kv_heads
        skipped = (self.linear_parameters / self.layers - keys_and_values) * (tokens - read)
        return 2 * (self.linear_parameters * tokens - skipped)


TRAINING_SHAPE = Shape(
    hidden=512, layers=8, heads=8, kv_heads=4, head_size=64, feed_forward=1536
)  # 25.2M
SCORING_SHAPE = Shape(
    hidden=1024, layers=7, heads=16, kv_heads=8, head_size=128, feed_forward=3072
)  # seven layers of Qwen3-0.6B: 110.1M
CHAT_SHAPE = Shape(
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_size=64,
    feed_forward=1536,
    vocabulary=49_152,
)  # SmolLM2-135M
TINY_SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, feed_forward=192)


def qwen3_config(shape: Shape, **special: Any) -> Any:
    """A Hugging Face configuration with one label."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **{
            "num_labels": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            **special,
        },
    )


def classifier(config: Any, *, seed: int = 0) -> Any:
    """A classifier with transformers' own initialisation."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    make: Any = AutoModelForSequenceClassification
    return make.from_config(config, dtype=torch.float32)


def language_model(config: Any, *, seed: int = 0) -> Any:
    """A causal language model with transformers' own initialisation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM
    return make.from_config(config, dtype=torch.float32)


def save_model(directory: Path, shape: Shape, texts: Iterable[str]) -> None:
    """A classifier with random weights and a byte-level BPE tokenizer of these texts."""
    from laurel.models.loading.pretrained import train_tokenizer

    save_classifier(directory, shape, train_tokenizer(texts, vocab_size=shape.vocabulary))


def save_classifier(directory: Path, shape: Shape, tokenizer: Any) -> None:
    """A classifier with random weights, and its tokenizer."""
    config = qwen3_config(
        shape, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    classifier(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_pretrained_classifier(name: str, directory: Path) -> None:
    """A model of a hub name or a directory, with a head of one label from a fixed seed."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    make: Any = AutoModelForSequenceClassification
    model = make.from_pretrained(name, num_labels=1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def save_endless_policy(name: str, directory: Path, texts: Sequence[str]) -> None:
    """A chat model of a hub name or a directory that writes as much as it may.

    The embeddings of its special tokens, which the head multiplies with, are turned against what
    its last hidden states have in common over some texts, so that it never draws one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    with torch.no_grad():
        ids = tokenizer("\n".join(texts), return_tensors="pt")["input_ids"][:, :512]
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        common = hidden.mean(0)
        common *= 100 / common.square().sum()
        if not (hidden @ common).min() > 0:
            raise SystemExit(f"{name}: its hidden states have no direction in common")
        head = model.get_output_embeddings().weight
        for token in tokenizer.all_special_ids:
            head[token] = -common
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def shape_of(directory: Path) -> Shape:
    """The sizes of a saved decoder."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=size,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
    )


def save_policy(directory: Path, shape: Shape, tokenizer: Any) -> None:
    """A causal language model with random weights that never ends its turn.

    One number of every hidden state is kept for it: each embedding says 0.2 there, no layer writes
    to it, and in the embedding of the end token, which the head multiplies with, it is so negative
    that the token is never drawn. Completions are then as long as they may be, under any program
    and without its help.
    """
    import torch

    config = qwen3_config(
        shape, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model = language_model(config)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 0.2
        embeddings[tokenizer.eos_token_id, 0] = -100.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def missing_data(names: Iterable[str]) -> list[str]:
    """Data sets that are not there."""
    return [name for name in names if not DATA_SETS[name].path.is_file()]


def data_set(name: str) -> DataSet:
    """A data set whose file is there; without it the program ends."""
    if missing_data([name]):
        path = DATA_SETS[name].path
        raise SystemExit(f"skipped: {path} not found in {DATA_DIR} (set LAUREL_DATA)")
    return DATA_SETS[name]


def load_rows(dataset: DataSet) -> list[Preference]:
    """The usable training rows of a data set."""
    from laurel.config.data import DatasetConfig
    from laurel.data.preferences import load_preferences

    preferences, _ = load_preferences(
        DatasetConfig(dataset_name=dataset.dataset_class, data_path=str(dataset.path)),
        name=dataset.name,
        ties="drop",
        duplicates="keep",
        on_bad_row="skip",
    )
    return preferences


def choose(rows: Sequence[Preference], count: int, *, seed: int = 0) -> list[Preference]:
    """A random sample, so that neighbours in the file do not decide the lengths."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[index] for index in order[:count]]


def choose_dialogues(rows: Sequence[Preference], count: int, *, seed: int = 0) -> list[Preference]:
    """A sample of dialogues, each with all rows that begin with its first question."""
    units: dict[Any, list[Preference]] = {}
    for row in rows:
        units.setdefault(row.group.prompt[:1], []).append(row)
    drawn = choose([some[0] for some in units.values()], len(units), seed=seed)
    return [row for first in drawn for row in units[first.group.prompt[:1]]][:count]


def texts_of(path: Path) -> Iterable[str]:
    """Every text of a file, each prompt once, for the tokenizer."""
    seen: set[str] = set()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            turns = row.get("context") or [{"content": row["prompt"]}]
            answers = (
                [turn for completion in row["completions"] for turn in completion["completion"]]
                if "completions" in row
                else [{"content": row["chosen"]}, {"content": row["rejected"]}]
            )
            for text in (turn["content"] for turn in [*turns, *answers]):
                if text not in seen:
                    seen.add(text)
                    yield text


def write_conversational(rows: Sequence[Preference], path: Path) -> None:
    """Rows in the conversational form with an explicit prompt, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            better, worse = sorted(range(2), key=lambda index: row.ranks_G[index])
            turns = {
                "prompt": row.group.prompt,
                "chosen": row.group.completions_G[better].messages,
                "rejected": row.group.completions_G[worse].messages,
            }
            plain = {
                key: [{"role": m.role, "content": m.content} for m in messages]
                for key, messages in turns.items()
            }
            file.write(json.dumps(plain, ensure_ascii=False) + "\n")
