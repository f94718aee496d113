"""Reads rows of process supervision: answers in steps, each labelled as right or wrong.

The three forms are those of published data sets:

- **TRL**'s stepwise supervision (trl-lib/math_shepherd, trl-lib/prm800k): `prompt`, `completions`
  (the steps) and `labels`, one for each step.
- **Math-Shepherd** (Wang et al. 2023, arXiv:2312.08935; peiyi9979/Math-Shepherd): `input` with the
  question and the steps, each followed by the mark `ки`, and `label`, the same text with `+` or `-`
  in place of each mark.
- **PRM800K** (Lightman et al. 2023, arXiv:2305.20050; openai/prm800k): `question.problem` and
  `label.steps`, which hold alternatives for each step with ratings -1, 0 or 1, and the alternative
  with which the solution goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laurel.data.sources import (
    Row,
    UnusableRow,
    integer,
    is_list,
    json_kind,
    messages,
    number,
    required,
    text,
    unlike,
)
from laurel.types import Conversation

SEPARATOR = "\n\n"
"""The text between two steps, where nothing else is said."""
SHEPHERD_MARK = "ки"
_FIRST_STEP = "Step 1:"

Step = tuple[str, float]
"""A step, and the probability that it is right; NaN where it has no label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A prompt and its answers, each in labelled steps."""

    prompt: Conversation
    answers_GS: tuple[tuple[Step, ...], ...]


def trl_row(row: Row, prompt_key: str) -> StepRow:
    """Read a row of TRL's stepwise form; labels are true, false, probabilities, or null."""
    steps, labels = (_listed(required(row, key), key) for key in ("completions", "labels"))
    if len(steps) != len(labels):
        raise UnusableRow(
            "'labels' does not fit 'completions'",
            f"there are {len(steps)} steps in 'completions' and {len(labels)} entries in 'labels'",
        )
    said = required(row, prompt_key, setting="prompt_key")
    answer = [
        (text(step, what=f"step {place}"), _label(label, place))
        for place, (step, label) in enumerate(zip(steps, labels, strict=True), start=1)
    ]
    return StepRow(
        prompt=messages(said, role="user", what=f"'{prompt_key}'"), answers_GS=(tuple(answer),)
    )


def shepherd_row(row: Row, prompt_key: str) -> StepRow:
    """Read a row of Math-Shepherd; `task` names its source and is not needed."""
    marked, label = (text(required(row, key), what=f"'{key}'") for key in ("input", "label"))
    *steps, rest = marked.split(SHEPHERD_MARK)
    question, found, first = (steps or [""])[0].rpartition(_FIRST_STEP)
    if rest.strip() or not found:
        raise UnusableRow(
            "no steps of Math-Shepherd",
            f"'input' must hold a question, {_FIRST_STEP!r} and the steps, each followed by "
            f"{SHEPHERD_MARK}",
        )
    answer: list[Step] = []
    at = 0
    for place, step in enumerate(steps, start=1):
        at += len(step)
        if label[at - len(step) : at] != step or label[at : at + 1] not in ("+", "-"):
            raise UnusableRow(
                "'label' is not 'input' with + and -",
                f"'label' must repeat 'input' with + or - in place of {SHEPHERD_MARK}; they part "
                f"at step {place}",
            )
        answer.append((step, 1.0 if label[at] == "+" else 0.0))
        at += 1
    answer[0] = (found + first, answer[0][1])
    asked = messages(question.strip(), role="user", what="the question in 'input'")
    return StepRow(prompt=asked, answers_GS=(tuple(answer),))


def prm800k_row(row: Row, prompt_key: str) -> StepRow:
    """Read a row of PRM800K: the solution, then each alternative that it does not go on with.

    A rating of 0 (neutral) counts as right, as for the models of Lightman et al. (section 2.6 and
    appendix F.2), and so does a step that a person wrote. An alternative repeats the steps before
    it, which are labelled in the solution alone.
    """
    question, label = (_mapping(required(row, key), f"'{key}'") for key in ("question", "label"))
    answers: list[tuple[Step, ...]] = []
    solution: list[Step] = []
    for place, entry in enumerate(_listed(required(label, "steps"), "label.steps"), start=1):
        step = _mapping(entry, f"step {place}")
        options = [
            _rated(one, place) for one in _listed(step.get("completions") or [], "completions")
        ]
        chosen, human = step.get("chosen_completion"), step.get("human_completion")
        index = None if chosen is None else integer(chosen, what="'chosen_completion'")
        if index is not None and not 0 <= index < len(options):
            raise UnusableRow(
                "'chosen_completion' does not fit",
                f"'chosen_completion' of step {place} is {index}, and the step has "
                f"{len(options)} completions",
            )
        before = tuple((said, math.nan) for said, _ in solution)
        answers += [(*before, one) for number, one in enumerate(options) if number != index]
        if index is not None:
            solution.append(options[index])
        elif human is not None:
            said = human.get("text") if isinstance(human, Mapping) else human
            solution.append((text(said, what=f"'human_completion' of step {place}"), 1.0))
        else:
            break
    if solution:
        answers.insert(0, tuple(solution))
    asked = messages(required(question, "problem"), role="user", what="'question.problem'")
    return StepRow(prompt=asked, answers_GS=tuple(answers))


ReadSteps = Callable[[Row, str], StepRow]
"""Reads a row; called with the name of the column of the prompt."""


def is_trl_row(row: Row, prompt_key: str) -> bool:
    """Report whether a row has the columns of TRL's stepwise form."""
    return {prompt_key, "completions", "labels"} <= row.keys()


def form_of_steps(row: Row, prompt_key: str) -> tuple[str, str] | None:
    """Return the class of a row with labelled steps, and the columns that show it; None of others.

    Such rows have the column `label` or `labels`.
    """
    if is_trl_row(row, prompt_key):
        return "StepwiseSupervision", f"columns {prompt_key}, completions and labels"
    label = row.get("label")
    if "label" in row and SHEPHERD_MARK in str(row.get("input")):
        return "MathShepherd", f"columns input and label, and the mark {SHEPHERD_MARK}"
    if "question" in row and isinstance(label, Mapping) and "steps" in label:
        return "PRM800K", "columns question and label.steps"
    return None


def joined_steps(answer_S: Sequence[Step], separator: str) -> tuple[str, tuple[float, ...]]:
    """Return an answer as one text, and the labels of its steps.

    Raises:
        UnusableRow: A step is empty, or holds the separator itself.
    """
    steps = [said.strip() for said, _ in answer_S]
    for place, step in enumerate(steps, start=1):
        if not step:
            raise UnusableRow("an empty step", f"step {place} is empty")
        if separator in step:
            raise UnusableRow(
                "a step that holds the separator",
                f"step {place} holds {separator!r}, which separates steps",
                remedy="Set policy.reward_model_cfg.step_separator to a text that no step holds, "
                "or fix the row",
            )
    if not steps:
        raise UnusableRow("an answer without a step", "an answer has no steps")
    return separator.join(steps), tuple(label for _, label in answer_S)


def _listed(value: Any, key: str) -> Sequence[Any]:
    if not is_list(value):
        raise unlike(value, "a list", what=f"'{key}'")
    return value


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise unlike(value, "an object", what=what)
    return value


def _label(value: Any, place: int) -> float:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, str):
        raise UnusableRow(
            "a label that is no probability",
            f"the label of step {place} is {json_kind(value)} where true, false, a probability or "
            "null is expected",
        )
    label = float(value) if isinstance(value, bool) else number(value, what="a label")
    if not 0.0 <= label <= 1.0:
        raise UnusableRow(
            "a label that is no probability",
            f"the label of step {place} is {label:g} where a probability, 0 to 1, is expected",
        )
    return label


def _rated(value: Any, place: int) -> Step:
    one = _mapping(value, f"a completion of step {place}")
    rating = one.get("rating")
    said = text(required(one, "text"), what=f"a completion of step {place}")
    if rating is None:
        return said, math.nan
    if rating not in (-1, 0, 1):
        raise UnusableRow(
            "an unknown rating", f"a rating of step {place} is {rating!r:.40}, and not -1, 0 or 1"
        )
    return said, 0.0 if rating == -1 else 1.0
