"""Reads the names of a model's weights from its safetensors files, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD_FILES = ("value_head.safetensors", "value_head.bin")
"""The files of LLaMA-Factory's reward heads, beside the weights; the first that exists counts."""


def weight_names(directory: Path) -> dict[str, Path]:
    """Return the file of each weight by the weight's name; empty if the files cannot be read."""
    try:
        if (directory / SINGLE).is_file():
            with safe_open(directory / SINGLE, framework="numpy") as file:
                return dict.fromkeys(file.keys(), directory / SINGLE)
        if (directory / INDEX).is_file():
            weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
            return {name: directory / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}  # torn files are reported when the weights are read
    return {}
