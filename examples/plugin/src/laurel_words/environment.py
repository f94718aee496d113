"""`data.env_name=words`: the share of an answer's words that begin with a letter."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from laurel.config.yaml_tree import Section
from laurel.environments.interface import EnvironmentInterface, EnvironmentReturn
from laurel.plugins import EnvironmentKind, EnvironmentServices


class WordsConfig(Section):
    """Answers whose words begin with a letter."""

    letter: str = Field(default="a", min_length=1, max_length=1)
    """The letter."""


class Words(EnvironmentKind):
    """Answers whose words begin with a letter."""

    section = WordsConfig

    def make(self, section: WordsConfig, services: EnvironmentServices) -> WordsEnvironment:
        """Return the environment."""
        return WordsEnvironment(section.letter)


class WordsEnvironment(EnvironmentInterface):
    def __init__(self, letter: str) -> None:
        self._letter = letter

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        """Score the last message of each conversation."""
        answers = [messages[-1]["content"].split() for messages in message_log_batch]
        hits = [sum(word.startswith(self._letter) for word in words) for words in answers]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(answers),
            metadata=[None] * len(answers),
            next_stop_strings=[None] * len(answers),
            rewards=np.array([n / max(len(w), 1) for n, w in zip(hits, answers, strict=True)]),
            terminateds=np.ones(len(answers), bool),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        """Count the batch."""
        return batch, {"letters": float(batch["rewards"].sum())}
