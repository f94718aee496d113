"""Compiles the decoder layers of a model, whose elementwise operations become few kernels.

Norms, rotary positions, gated activations and casts move more bytes than they compute. The compiler
fuses each chain of them. Attention of forests stays as it is: its kernels depend on a plan that
differs in every micro-batch. Layers share their graphs, so that their number does not matter.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface

from laurel.models.forest.attention import FOREST, allow_variants, forest_attention
from laurel.models.forest.decoder import Decoder


def compile_layers(model: Decoder, *, backend: str = "inductor") -> str | None:
    """Compile each decoder layer of a model that reads token forests.

    The layers are compiled in the first passes through them: once for fixed numbers of tokens and
    once for any, with and without gradients. No further forest compiles them again.

    Args:
        model: The model, with its adapters and sharding.

    Returns:
        Why the layers cannot be compiled; None if they will be.
    """
    layers = getattr(model.network.base_model, "layers", None)
    if model.path != "forest":
        return "the model reads padded rows"
    if not isinstance(layers, nn.ModuleList):
        return f"{type(model.network).__name__} has no list of layers"
    # The graphs end before attention and go on behind it.
    disable: Any = torch._dynamo.disable  # it has no types
    outside = disable(forest_attention)
    AttentionInterface.register(FOREST, cast(Any, outside))
    allow_variants()
    for layer in layers:
        layer.compile(backend=backend)
    return None
