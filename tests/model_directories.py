"""Directories of models as Hugging Face writes them, and what can be wrong in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import tiny_tokenizers


def save_model(directory: Path, model: Any, tokenizer: Any = None) -> Path:
    """Save a model and a tokenizer (ChatML's where none is given)."""
    model.save_pretrained(directory)
    (tokenizer or tiny_tokenizers.chatml()).save_pretrained(directory)
    return directory


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a JSON file says."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_weights(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the weights of a saved model."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
