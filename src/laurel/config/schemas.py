"""The schema of the configuration of each command that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from laurel.config.grpo import GRPORun
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section, read_file

Run = RewardTrainingRun | SFTRun | GRPORun
"""A run's configuration of any kind."""
Kind = Literal["rm", "sft", "grpo"]
"""A command that trains."""

SCHEMAS: dict[Kind, type[Section]] = {"rm": RewardTrainingRun, "sft": SFTRun, "grpo": GRPORun}


def command_of_file(path: Path | None) -> Kind:
    """Recognize the command that a file is for by its sections."""
    sections = read_file(path).value if path is not None else {}
    kinds: tuple[Kind, ...] = ("grpo", "sft")
    for kind in kinds:
        if isinstance(sections, dict) and kind in sections:
            return kind
    return "rm"
