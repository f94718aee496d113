"""What environments need of a task, and whether the rows of a set have it.

A task without what it is judged by would get 0 whatever the policy says, and nobody would know why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laurel.data.cells import UnusableRow
from laurel.data.code_tasks import OWN_TESTS
from laurel.data.task_formats import PREFERENCE_SETS, TaskParts
from laurel.data.text_report import TaskReport
from laurel.errors import ConfigError

PROSE_WORDS = 20
"""An answer with more words than this, and none of them marked as the final one, is a text."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_MARKED = ("\\boxed", "####")

NOT_WHAT_IS_RIGHT = (
    "the answers that people preferred are what is judged against, and they say what is liked, not "
    "what is right. To learn from preferences: laurel rm, and then a policy against that reward "
    "model (laurel init --task grpo-rm, data.env_name=reward_model)"
)
"""Of preferences with an environment that checks against a known answer."""
_CHOICES = (
    "Say who judges: data.env_name=reward_model with env.reward_model.enabled=true and "
    "env.reward_model.model_name=DIR; your own under env.custom; "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeeds:
    """What environments cannot judge without, by their names."""

    answers: frozenset[str] = frozenset({"math", "math_default"})
    """Judge against a known answer."""
    tests: frozenset[str] = frozenset()
    """Give nothing but 0 to a task that brings no tests."""
    guess: str | None = "math"
    """Who judges where nobody said who, and nothing else speaks for it."""


NO_NEEDS = TaskNeeds(answers=frozenset(), guess=None)
"""Of who only wants to know what there is."""


@dataclass(slots=True, kw_only=True)
class NeedsCheck:
    """Holds the rows of one set against what their environment needs."""

    needs: TaskNeeds
    environment: str
    is_named: bool
    """Whether the configuration says who judges."""
    num_answers: int = 0
    num_texts: int = 0

    @property
    def is_guessed(self) -> bool:
        """Whether the environment judges only because no other was named."""
        return not self.is_named and self.environment == self.needs.guess

    def check_set(self, dataset_name: str | None, report: TaskReport) -> None:
        """Raise ConfigError where rows say what people prefer, and nobody said who judges."""
        if dataset_name not in PREFERENCE_SETS:
            return
        if self.is_guessed:
            raise ConfigError(
                f"{report.origin}: rows of {dataset_name} say which answer people prefer, "
                f"not which one is right, and nobody is named to judge: {self.environment}, which "
                f"judges then, looks for one value in them. {_CHOICES}"
                f"or data.env_name={self.environment} if the preferred answers are ones to check "
                "by. To learn from the preferences themselves, use laurel rm"
            )
        if self.environment in self.needs.answers:
            report.notes.append(NOT_WHAT_IS_RIGHT)

    def check_row(self, parts: TaskParts, metadata: Mapping[str, Any]) -> None:
        """Raise UnusableRow where the task has nothing that it could be judged by."""
        has_tests = any(metadata.get(form) is not None for form in OWN_TESTS)
        if parts.answer is None and self.environment in self.needs.answers:
            by_tests = ", or data.env_name=code: the row brings tests" if has_tests else ""
            raise UnusableRow(
                f"no answer in '{parts.answer_key}'",
                f"the row has no answer in '{parts.answer_key}', and the environment "
                f"'{self.environment}' judges against one",
                remedy="Set data.output_key to the column that holds it, or data.env_name to an "
                f"environment that needs none{by_tests}",
            )
        if not has_tests and self.environment in self.needs.tests:
            raise UnusableRow(
                "no tests",
                f"the row brings no tests, and the environment '{self.environment}' gives nothing "
                f"but 0 without: it looks for {', '.join(OWN_TESTS)}",
                remedy="Set data.dataset_name to HumanEval, MBPP or CodeTasks, which read tests in "
                "other forms, or data.env_name to an environment that needs none",
            )
        self.num_answers += parts.answer is not None
        self.num_texts += parts.answer is not None and _is_text(parts.answer)

    def conclude(self, origin: str) -> None:
        """Raise ConfigError where most answers are texts, and nobody said who judges them."""
        if self.is_guessed and self.num_texts * 2 > self.num_answers:
            raise ConfigError(
                f"{origin}: {self.num_texts:,} of {self.num_answers:,} known answers are texts of "
                f"more than {PROSE_WORDS} words, and nobody is named to judge: {self.environment}, "
                f"which judges then, looks for one value in each. {_CHOICES}data.output_key if "
                f"another column holds the value; or data.env_name={self.environment} if these are "
                "answers to check by"
            )


def _is_text(answer: str) -> bool:
    return len(_WORD.findall(answer)) > PROSE_WORDS and not any(m in answer for m in _MARKED)
