"""Faults that the checks of a loaded model must find.

Importing this makes the attention implementations `heedless` and `windowless` known to
transformers.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from laurel.models.forest.attention import forest_attention


def _heedless(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    forest_plan: Any,
    **options: Any,
) -> Any:
    """Causal over the whole row: every tree sees those before it."""
    return AttentionInterface()["sdpa"](module, query, key, value, None, is_causal=True, **options)


def _windowless(*tensors: Any, sliding_window: int | None = None, **options: Any) -> Any:
    return forest_attention(*tensors, **options)


for _name, _function in (("heedless", _heedless), ("windowless", _windowless)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, lambda *_, **__: None)


def double_logits(network: nn.Module) -> None:
    """Make a class do something to its logits that its head does not."""

    def double(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    network.register_forward_hook(double)
