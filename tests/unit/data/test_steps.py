"""Rows with labels of steps: TRL's form, Math-Shepherd's and PRM800K's, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laurel.config.data import DatasetConfig
from laurel.data.preferences import load_preferences
from laurel.errors import DataError
from laurel.types import Preference

Load = Callable[..., list[Preference]]
NAN = math.nan


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def read(*rows: dict[str, Any], **options: Any) -> list[Preference]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked: dict[str, Any] = {"ties": "drop", "duplicates": "drop", "on_bad_row": "error"}
        found, _ = load_preferences(
            DatasetConfig(data_path=str(path)), name="train", **(asked | options)
        )
        return found

    return read


def same(found: Preference, *labels: tuple[float, ...]) -> bool:
    assert found.steps_GS is not None
    return repr(found.steps_GS) == repr(labels)


def said(found: Preference) -> list[str]:
    return [one.messages[0].content for one in found.group.completions_G]


def test_the_stepwise_form_has_hard_and_soft_labels_and_none(load: Load) -> None:
    row = {
        "prompt": "1 + 1 + 1?",
        "completions": ["1 + 1 = 2 ", "2 + 1 = 4", "So 4", "Really"],
        "labels": [True, 0.25, 0, None],
    }
    (found,) = load(row)
    assert found.group.prompt[0].content == "1 + 1 + 1?"
    assert said(found) == ["1 + 1 = 2\n\n2 + 1 = 4\n\nSo 4\n\nReally"]
    assert same(found, (1.0, 0.25, 0.0, NAN))
    assert found.num_outputs_G == (4,)
    assert said(load(row, separator="; ")[0]) == ["1 + 1 = 2; 2 + 1 = 4; So 4; Really"]


def test_math_shepherd_marks_the_ends_of_steps(load: Load) -> None:
    text = "Ann has 2. How many? Step 1: She has 2.@\nStep 2: 2 + 2 = 5.@"
    (found,) = load(
        {
            "input": text.replace("@", "ки"),
            "label": text.replace("@", "+", 1).replace("@", "-", 1),
            "task": "GSM8K",
        }
    )
    assert found.group.prompt[0].content == "Ann has 2. How many?"
    assert said(found) == ["Step 1: She has 2.\n\nStep 2: 2 + 2 = 5."]
    assert same(found, (1.0, 0.0))


def test_prm800k_gives_the_solution_and_each_alternative(load: Load) -> None:
    def option(text: str, rating: int | None) -> dict[str, Any]:
        return {"text": text, "rating": rating, "flagged": None}

    steps = [
        {"completions": [option("a", 1)], "human_completion": None, "chosen_completion": 0},
        {
            "completions": [option("bad", -1), option("b", 0), option("odd", None)],
            "human_completion": None,
            "chosen_completion": 1,
        },
        {
            "completions": [option("worse", -1)],
            "human_completion": {"text": "c", "rating": None},
            "chosen_completion": None,
        },
        {"completions": [option("d", -1)], "human_completion": None, "chosen_completion": None},
    ]
    (found,) = load({"question": {"problem": "p?"}, "label": {"steps": steps}})
    assert said(found) == [
        "a\n\nb\n\nc",
        "a\n\nbad",
        "a\n\nodd",
        "a\n\nb\n\nworse",
        "a\n\nb\n\nc\n\nd",
    ]
    # A neutral step counts as right, and so does a person's; steps before an alternative do not
    # count a second time.
    assert same(
        found,
        (1.0, 1.0, 1.0),
        (NAN, 0.0),
        (NAN, NAN),
        (NAN, NAN, 0.0),
        (NAN, NAN, NAN, 0.0),
    )


GOOD: dict[str, Any] = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}
SHEPHERD = {"input": "q Step 1: a ки", "label": "q Step 1: a +"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (GOOD | {"labels": [True]}, "2 steps in 'completions' and 1 entries in 'labels'"),
        (GOOD | {"labels": [True, 1.5]}, "the label of step 2 is 1.5"),
        (GOOD | {"labels": [True, "+"]}, "the label of step 2 is"),
        (GOOD | {"completions": ["a", " "]}, "step 2 is empty"),
        (GOOD | {"completions": ["a", "b\n\nc"]}, "step_separator"),
        (GOOD | {"completions": "a"}, "'completions' is"),
        (GOOD | {"completions": [], "labels": []}, "no steps"),
        (SHEPHERD | {"label": "q Step 1: a"}, "they part at step 1"),
        (SHEPHERD | {"label": "q Step 1: b +"}, "they part at step 1"),
        (SHEPHERD | {"input": "q a ки"}, "followed by ки"),
        (SHEPHERD | {"input": "q Step 1: a ки and more"}, "followed by ки"),
        (
            {
                "question": {"problem": "p"},
                "label": {"steps": [{"completions": [{"text": "a", "rating": 3}]}]},
            },
            "a rating of step 1 is 3",
        ),
        (
            {
                "question": {"problem": "p"},
                "label": {
                    "steps": [{"completions": [{"text": "a", "rating": 1}], "chosen_completion": 2}]
                },
            },
            "'chosen_completion' of step 1 is 2",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_line(load: Load, row: dict[str, Any], problem: str) -> None:
    good = (
        {**GOOD, "prompt": "other"} if "prompt" in row else {**SHEPHERD, "label": "q Step 1: a -"}
    )
    if "question" in row:
        good = {
            "question": {"problem": "p"},
            "label": {"steps": [{"completions": [{"text": "a", "rating": 1}]}]},
        }
    with pytest.raises(DataError, match=r"rows\.jsonl:2") as caught:
        load(good, row)
    assert problem in str(caught.value)
    assert len(load(good, row, on_bad_row="skip")) == 1


def test_a_row_without_any_label_is_left_out(load: Load) -> None:
    assert len(load(GOOD, GOOD | {"labels": [None, None]})) == 1


def test_rows_that_do_not_fit_the_model_say_what_would(load: Load) -> None:
    with pytest.raises(DataError, match=r"reward_model_type=process and rm\.loss\.type=step_bce"):
        load(GOOD, needs_steps=False)
    with pytest.raises(DataError, match="StepwiseSupervision, MathShepherd or PRM800K"):
        load({"prompt": "q", "chosen": "a", "rejected": "b"}, needs_steps=True)
