"""The part of docs/models.md that is generated: which architectures read token forests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import tiny
from laurel.models.forest.attention import register
from laurel.models.loading.pretrained import take_path
from laurel.models.spec import ModelSpec
from vllm_reward_models import FAMILIES

_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
UNTRIED: Mapping[str, dict[str, Any]] = {
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "glm4": {},
    "smollm3": {},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {},
    "gpt_neox": {},
    "falcon_mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16},
}
"""Architectures that are common, and of which no test computes a score."""


def models_text() -> str:
    """Write a table of the architectures of the tests, and what `take_path` says of others."""
    register()
    features: dict[str, list[str]] = {}
    for model_type, settings in tiny.LANGUAGE_MODELS.values():
        network = _made(AutoModelForCausalLM, model_type, settings)
        assert _path(network)[0] == "forest"
        features.setdefault(model_type, []).extend(_features(network))
    lines = [
        "| `model_type` | also with | on vLLM |",
        "|---|---|---|",
        *(
            f"| `{name}` | {', '.join(dict.fromkeys(found))} | {'yes' * (name in FAMILIES)} |"
            for name, found in features.items()
        ),
        "",
        f"Padded rows: {'; '.join(f'`{name}` {why}' for name, why in sorted(_padded()))}.",
        "",
    ]
    others: dict[str, list[str]] = {}
    for name, settings in UNTRIED.items():
        path, _ = _path(_made(AutoModelForCausalLM, name, settings))
        others.setdefault(path, []).append(f"`{name}`")
    lines.append(
        f"By the same rules, and tried by no test: token forests for {_listed(others['forest'])}; "
        f"padded rows for {_listed(others['padded'])}."
    )
    return "\n".join(lines).replace("  ", " ")


def _padded() -> Iterator[tuple[str, str]]:
    for name, settings in {**tiny.ENCODERS, **tiny.HYBRIDS}.items():
        network = _made(AutoModelForSequenceClassification, name, settings)
        path, note = _path(network, pools_itself=name in tiny.ENCODERS)
        assert path == "padded"
        yield name, note.partition(": ")[2].partition(" ")[2]


def _made(factory: Any, model_type: str, settings: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        return factory.from_config(AutoConfig.for_model(model_type, **{**tiny.COMMON, **settings}))


def _path(network: Any, *, pools_itself: bool = False) -> tuple[str, str]:
    notes: list[str] = []
    path = take_path(network, ModelSpec(name="x"), notes, pools_itself=pools_itself)
    return path, "".join(notes)


def _features(network: Any) -> Iterator[str]:
    config = network.config
    layer_types: Iterable[str] = getattr(config, "layer_types", None) or ()
    is_sliding = "sliding_attention" in layer_types or config.model_type == "mistral"
    if is_sliding and getattr(config, "sliding_window", None):
        yield "sliding windows"
    if getattr(config, "attn_logit_softcapping", None):
        yield "soft-capping"
    if any(hasattr(module, "sinks") for module in network.modules()):
        yield "attention sinks"
    if getattr(config, "num_local_experts", None):
        yield "experts"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
