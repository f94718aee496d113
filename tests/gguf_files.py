"""A tiny chat model as a GGUF file, written in the test with the package `gguf`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from laurel.models.loading.pretrained import train_tokenizer
from model_directories import save_model

gguf: Any = pytest.importorskip("gguf", reason="the package gguf is not installed")

HEADS = {"q": 2, "k": 1}
TEXTS = ["What is 2 + 3? It is 5.", "Name a river. The Rhine is one.", "user assistant system"]

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True)
class Tiny:
    """The same model as a GGUF file and as a directory of Hugging Face."""

    file: Path
    directory: Path


def write_tiny(
    folder: Path,
    *,
    kind: str = "Q8_0",
    name: str = "tiny",
    architecture: str = "llama",
    template: bool = True,
    more: dict[str, Any] | None = None,
) -> Tiny:
    """Write a model of two layers, quantised so that both have the same weights bit for bit."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.pad_token = tokenizer.eos_token  # as of many chat models
    if not template:
        tokenizer.chat_template = None
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS["q"],
        num_key_value_heads=HEADS["k"],
        intermediate_size=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    file = folder / f"{name}.{kind}.gguf"
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_name(name)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS["q"])
    writer.add_head_count_kv(HEADS["k"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokenizer))
    _add_tokenizer(writer, tokenizer)
    for key, value in (more or {}).items():
        writer.add_uint32(key, value)
    weights = model.state_dict()
    for theirs, ours in _names(weights):
        weight = weights[ours].numpy()
        if weight.ndim == 1:
            writer.add_tensor(theirs, weight)
            continue
        blocks = gguf.quants.quantize(weight, type_)
        weights[ours].copy_(torch.from_numpy(gguf.quants.dequantize(blocks, type_).copy()))
        writer.add_tensor(theirs, _interleaved(theirs, blocks), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tiny(file, save_model(folder / f"{name}-{kind}-files", model, tokenizer))


def _names(weights: dict[str, Any]) -> list[tuple[str, str]]:
    outer = [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]
    return outer + [
        (f"blk.{layer}.{theirs}.weight", f"model.layers.{layer}.{ours}.weight")
        for layer in range(2)
        for theirs, ours in _LAYER.items()
    ]


def _interleaved(name: str, rows: Any) -> Any:
    # llama.cpp rotates neighbours, Hugging Face halves: the rows of a head change places.
    for part, heads in HEADS.items():
        if f"attn_{part}." in name:
            split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
            return split.swapaxes(1, 2).reshape(rows.shape)
    return rows


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import json

    said = json.loads(tokenizer.backend_tokenizer.to_str())
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    control = {one["content"] for one in said["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in control else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in said["model"]["merges"]] or ["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
