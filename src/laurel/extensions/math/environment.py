"""Defines an environment that checks answers against known ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    RejectedTask,
    accuracy_metrics,
    mean_of,
    numbers,
    response_of,
    settings_of,
)
from laurel.errors import EnvironmentFailedError
from laurel.extensions.math.answers import Checked, check_choice
from laurel.extensions.math.checker import AnswerChecker
from laurel.extensions.math.settings import MathEnvironmentConfig
from laurel.protocols import MessageLog
from laurel.types import Task


class MathEnvironment(EnvironmentInterface):
    """Gives the reward 1 for the right answer, and 0 for any other, in one turn.

    The answer is read from all assistant messages together, and the known answer is the task's
    `ground_truth`. If the known answer is missing or unreadable, the result is a failure, not 0.
    """

    def __init__(self, env_config: MathEnvironmentConfig | Mapping[str, Any]) -> None:
        """Set up a checker; its processes start with the first answer that needs one.

        Args:
            env_config: The settings, or a dictionary of them such as `{"num_workers": 2}`.

        Raises:
            ConfigError: Settings are unknown or invalid.
        """
        self.config = settings_of(MathEnvironmentConfig, env_config, where="env.math")
        self.spec = EnvironmentSpec(
            components=(), judges="completion", stop_strings=tuple(self.config.stop_strings or ())
        )
        self._checker = AnswerChecker(
            num_workers=self.config.num_workers,
            timeout_seconds=self.config.timeout_seconds,
            forbid_unevaluated=self.config.forbid_unevaluated,
        )

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[dict[str, Any] | None],
        return_extracted_answer: bool = True,
    ) -> EnvironmentReturn:
        """Check answers, and return metadata unchanged.

        With `return_extracted_answer=False`, an argument of NeMo RL's environment, the `answers`
        are None.
        """
        if len(message_log_batch) != len(metadata):
            raise EnvironmentFailedError(
                f"{len(message_log_batch)} conversations came with metadata for {len(metadata)}"
            )
        responses = [response_of(message_log) for message_log in message_log_batch]
        golds = [_known_answer(given) for given in metadata]
        verdicts = self._check(responses, golds)
        right = [checked.verdict == "correct" for checked in verdicts]
        words = ["correct" if one else "incorrect" for one in right]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: {one}"} for one in words
            ],
            metadata=list(metadata),
            next_stop_strings=[list(self.spec.stop_strings) or None for _ in verdicts],
            rewards=torch.tensor(right, dtype=torch.float32),
            terminateds=torch.ones(len(verdicts), dtype=torch.bool),
            answers=[one.answer for one in verdicts] if return_extracted_answer else None,
            failures=[one.reason for one in verdicts],
            # A finished batch does not say why a reward is zero.
            notes=[one.verdict for one in verdicts],
        )

    def _check(self, responses: list[str], golds: list[str | Checked]) -> list[Checked]:
        """Return the verdicts in order; for a missing known answer, `golds` holds the verdict."""
        known = [
            (r, gold) for r, gold in zip(responses, golds, strict=True) if isinstance(gold, str)
        ]
        if self.config.verifier_type == "math":
            checked = iter(
                self._checker.check([one for one, _ in known], [gold for _, gold in known])
            )
        else:
            multilingual = self.config.verifier_type == "multilingual_multichoice"
            checked = iter([check_choice(r, gold, multilingual=multilingual) for r, gold in known])
        return [next(checked) if isinstance(gold, str) else gold for gold in golds]

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute `accuracy`, `pass@...`, lengths and verdicts of a batch.

        A completion counts as correct if its reward is 1 and it was not truncated. `timeouts` and
        `unparseable` are the numbers of these verdicts, if the batch has `notes`.
        """
        figures, correct = accuracy_metrics(batch)
        lengths = numbers(batch["generation_lengths"])
        figures |= mean_of(
            "correct_solution_generation_lengths",
            [length for length, one in zip(lengths, correct, strict=True) if one],
        )
        if (notes := batch.get("notes")) is not None:
            counts = Counter(notes)
            figures["timeouts"] = float(counts["timeout"])
            figures["unparseable"] = float(counts["unparseable"])
        return batch, figures

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """Return the tasks whose known answer is unreadable, or is not accepted as an answer."""
        golds = [_known_answer(dict(task.metadata)) for task in tasks]
        readable = [gold for gold in golds if isinstance(gold, str)]
        if self.config.verifier_type == "math":
            checked = iter(self._checker.check_gold(readable))
        else:
            checked = iter(
                [check_choice("Answer: A", gold, multilingual=True) for gold in readable]
            )
        rejected = []
        for task, gold in zip(tasks, golds, strict=True):
            verdict = next(checked) if isinstance(gold, str) else gold
            reason = verdict.reason
            is_math = self.config.verifier_type == "math"
            if reason is None and is_math and verdict.verdict != "correct":
                why = {
                    "timeout": f"takes more than {self.config.timeout_seconds:g} s to be read",
                    "unparseable": "cannot be read",
                }.get(verdict.verdict, "is not accepted as its own answer")
                reason = f"the known answer {str(gold)!r} {why}"
            if reason is not None:
                rejected.append(RejectedTask(task=task, reason=reason))
        return rejected

    def shutdown(self) -> None:
        """End the checking processes; running checks fail."""
        self._checker.close()


def _known_answer(metadata: Mapping[str, Any] | None) -> str | Checked:
    gold = (metadata or {}).get("ground_truth")
    if isinstance(gold, str):
        return gold
    if isinstance(gold, int | float) and not isinstance(gold, bool):
        return str(gold)
    problem = "is missing" if gold is None else f"is {type(gold).__name__}, not text or a number"
    return Checked(verdict="error", reason=f"the task's ground_truth {problem}")
