"""Tiny random models of every architecture Laurel promises, made in the test."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.decoder import RewardModel
from laurel.models.forest.policy import PolicyModel
from laurel.types import PaddedRows, TokenGroup

VOCABULARY = 300
PAD = 0

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": _SLIDING},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-sliding": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "layer_types": _SLIDING},
    ),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 17}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 12, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 12}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": 12,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

JAMBA: dict[str, Any] = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "num_hidden_layers": 2,
}
"""Of an architecture with state-space layers, which no forest can serve."""
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 128},
    "modernbert": {
        "global_attn_every_n_layers": 2,
        "local_attention": 12,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "max_position_embeddings": 128,
    },
}
"""Architectures that look at later tokens."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "jamba": JAMBA,
    "qwen3_next": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "head_dim": 8,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "minimax": {"num_local_experts": 2, "num_hidden_layers": 2},
}
"""Architectures with layers of other kinds than attention."""

LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **ARCHITECTURES,
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2-capped": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
}
"""The same and those whose heads do more than multiply."""


def tiny_classifier(
    name: str,
    *,
    num_labels: int = 1,
    seed: int = 0,
    std: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A random classifier with weights large enough that a wrong mask shows."""
    model_type, extra = ARCHITECTURES[name]
    classifier = randomised(model_type, {**extra, **changes}, num_labels, seed, std).to(dtype)
    if dtype == torch.float64 and hasattr(classifier.config, "num_local_experts"):
        classifier.set_experts_implementation("eager")  # the grouped product has no float64
    return classifier


def randomised(
    model_type: str, settings: dict[str, Any], num_labels: int = 1, seed: int = 0, std: float = 0.2
) -> Any:
    """A classifier of any architecture with every weight drawn, norms and biases included."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    config.num_labels = num_labels
    torch.manual_seed(seed)
    factory: Any = AutoModelForSequenceClassification
    return draw_weights(factory.from_config(config, dtype=torch.float32), std)


def tiny_language_model(name: str, *, seed: int = 0) -> Any:
    """A random causal language model, without any reward head."""
    model_type, extra = LANGUAGE_MODELS[name]
    config = AutoConfig.for_model(model_type, **{**COMMON, **extra})
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    return factory.from_config(config, dtype=torch.float32).eval()


def mixtral(num_hidden_layers: int = 2) -> Any:
    """A language model whose three experts are joined in memory, and saved one by one."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 1}
    config = AutoConfig.for_model(
        "mixtral", **{**COMMON, **sizes, "num_hidden_layers": num_hidden_layers}
    )
    factory: Any = AutoModelForCausalLM
    return factory.from_config(config)


def draw_adapters(model: Any, std: float, part: str = "lora_") -> None:
    """Give adapters weights; new ones add nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.normal_(std=std)


def tiny_policy(
    name: str,
    *,
    seed: int = 0,
    std: float = 0.2,
    dtype: torch.dtype = torch.float32,
    path: Literal["forest", "padded"] = "forest",
    precision: torch.dtype = torch.float32,
    temperature: float = 1.0,
    **changes: Any,
) -> PolicyModel:
    """A policy with every weight drawn, large enough that a wrong mask shows."""
    register()
    model_type, extra = LANGUAGE_MODELS[name]
    config = AutoConfig.for_model(model_type, **{**COMMON, **extra, **changes})
    factory: Any = AutoModelForCausalLM
    torch.manual_seed(seed)
    causal_lm = draw_weights(factory.from_config(config, dtype=torch.float32), std).to(dtype)
    if dtype == torch.float64 and hasattr(config, "num_local_experts"):
        causal_lm.set_experts_implementation("eager")  # the grouped product has no float64
    causal_lm.set_attn_implementation(FOREST if path == "forest" else own_attention(causal_lm))
    return PolicyModel(causal_lm, path=path, precision=precision, temperature=temperature)


def draw_weights(model: Any, std: float) -> Any:
    """The model with every weight drawn, norms and biases included."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
            else:
                parameter.add_(torch.randn_like(parameter) * std)
    return model.eval()


def tiny_reward_model(
    name: str, *, precision: torch.dtype = torch.float32, **options: Any
) -> RewardModel:
    register()
    classifier = tiny_classifier(name, **options)
    classifier.set_attn_implementation(FOREST)
    return RewardModel(classifier, head_name="score", path="forest", precision=precision)


def own_attention(classifier: Any) -> str:
    """The implementation that transformers would choose for a model by itself."""
    return "sdpa" if classifier._supports_sdpa else "eager"


def one_by_one(model: RewardModel, groups: list[TokenGroup], implementation: str) -> torch.Tensor:
    """Scores of whole sequences, each alone in the Hugging Face class's own forward, `[N, K]`."""
    classifier = model.classifier
    before = classifier.config._attn_implementation
    classifier.set_attn_implementation(implementation)
    try:
        return torch.cat(
            [
                classifier(input_ids=torch.from_numpy(ids).long()[None].to(model.device)).logits
                for ids in sequences(groups)
            ]
        )
    finally:
        classifier.set_attn_implementation(before)


def padded(groups: list[TokenGroup], *, pad_id: int = PAD) -> PaddedRows:
    """The whole sequences of groups as rows, padded on the right."""
    rows = [torch.from_numpy(ids).long() for ids in sequences(groups)]
    return PaddedRows(
        ids_NL=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id),
        lengths_N=torch.tensor([len(row) for row in rows]),
        starts_N=torch.tensor([len(g.trunk_ids) for g in groups for _ in g.branches_ids_G]),
    )


def sequences(groups: list[TokenGroup]) -> list[Any]:
    """The whole sequences of groups, in order."""
    return [np.concatenate((g.trunk_ids, ids)) for g in groups for ids in g.branches_ids_G]


def random_groups(seed: int, shapes: list[tuple[int, list[int]]]) -> list[TokenGroup]:
    """Groups of random tokens; a shape is (trunk length, branch lengths)."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> Any:
        return rng.integers(3, VOCABULARY, length).astype(np.int32)

    return [
        TokenGroup(id=str(i), trunk_ids=ids(trunk), branches_ids_G=tuple(ids(b) for b in branches))
        for i, (trunk, branches) in enumerate(shapes)
    ]
