"""Maps each training command to the schema of its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from laurel.config.grpo_run import GRPORun
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section, read_file

Run = RewardTrainingRun | SFTRun | GRPORun
"""The configuration of any kind of run: reward model, supervised fine-tuning or GRPO."""
Kind = Literal["rm", "sft", "grpo"]
"""The name of a training command, which is also the kind of its runs."""

SCHEMAS: dict[Kind, type[Section]] = {"rm": RewardTrainingRun, "sft": SFTRun, "grpo": GRPORun}


def command_of_file(path: Path | None) -> Kind:
    """Recognize from its sections which command a configuration file is for."""
    sections = read_file(path).value if path is not None else {}
    kinds: tuple[Kind, ...] = ("grpo", "sft")
    for kind in kinds:
        if isinstance(sections, dict) and kind in sections:
            return kind
    return "rm"
