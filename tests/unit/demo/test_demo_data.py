"""The demo's tasks: what is asked and what is right, and that nothing held out is trained on."""

import re

import pytest

from laurel.config.data import TaskSetConfig
from laurel.data.tasks import load_tasks
from laurel.demo.data import (
    ARGUMENTS,
    NUM_HELD_OUT,
    NUM_HELD_OUT_NUMBERS,
    NUMBERS,
    FunctionTasks,
    demonstrations,
    held_out_tasks,
    in_words,
    numbers,
    preferences,
    prompts,
)


def test_every_number_has_words_of_its_own():
    words = {0: "zero", 40: "forty", 305: "three hundred five", 342: "three hundred forty-two"}
    assert {number: in_words(number) for number in words} == words
    assert len({in_words(number) for number in range(1000)}) == 1000


def test_the_split_is_complete_and_does_not_overlap():
    kept, held_out = set(numbers(held_out=False)), set(numbers(held_out=True))
    assert len(held_out) == NUM_HELD_OUT_NUMBERS
    assert not kept & held_out
    assert kept | held_out == set(range(100, 1000))


@pytest.mark.slow
def test_no_training_row_is_about_a_held_out_number():
    held_out = {in_words(number) for number in numbers(held_out=True)}
    asked = [row["input"] for row in prompts(500, seed=3)]
    asked += [row["prompt"] for row in preferences(500, seed=3)]
    asked += [row["messages"][0]["content"] for row in demonstrations(500, seed=3, share_wrong=0.5)]
    words = [
        re.sub(r"^(Write|What is) | in digits[.?]$| as a number, please\.$", "", text)
        for text in asked
    ]
    assert all(word in {in_words(n) for n in numbers(held_out=False)} for word in words)
    assert not held_out & set(words)


def test_held_out_tasks_are_every_request_for_every_held_out_number():
    rows = list(held_out_tasks())
    assert len(rows) == 3 * NUM_HELD_OUT_NUMBERS
    assert len({row["input"] for row in rows}) == len(rows)
    assert {int(row["output"]) for row in rows} == set(numbers(held_out=True))


def wrong_digits(row):
    """How many digits of a demonstration's answer are not those of its prompt."""
    prompt, answer = (message["content"] for message in row["messages"])
    shown = answer.removeprefix("\\boxed{").removesuffix("}")
    by_words = {in_words(number): str(number) for number in numbers(held_out=False)}
    words = max((w for w in by_words if w in prompt), key=len)
    assert len(shown) == 3
    return sum(a != b for a, b in zip(shown, by_words[words], strict=True))


@pytest.mark.slow
def test_demonstrations_are_wrong_in_one_digit_as_often_as_said():
    wrong = [wrong_digits(row) for row in demonstrations(2000, seed=0, share_wrong=0.5)]
    assert set(wrong) == {0, 1}
    assert 0.45 < sum(wrong) / len(wrong) < 0.55
    assert not any(wrong_digits(row) for row in demonstrations(50, seed=0, share_wrong=0.0))


def test_the_rejected_answer_is_never_the_chosen_one():
    rows = list(preferences(2000, seed=0))
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert all(re.fullmatch(r"\\boxed\{\d{3}\}", row["chosen"]) for row in rows)
    assert len({len(row["rejected"]) for row in rows}) > 3
    assert rows[:20] == list(preferences(20, seed=0)) != list(preferences(20, seed=1))


def asked(row):
    return row["messages"][0]["content"]


def values(row):
    return tuple(test["expected"] for test in row["call_tests"])


@pytest.fixture(scope="module")
def made():
    return FunctionTasks(seed=3, count=3000, share_wrong=0.6).formatted_ds


def test_references_give_what_is_expected_and_the_seed_decides(made):
    same, other = (FunctionTasks(seed=s, count=50).formatted_ds["train"] for s in (3, 2))
    assert same == FunctionTasks(seed=3, count=50).formatted_ds["train"] != other
    for row in (*made["train"][:200], *made["validation"]):
        names = {}
        exec(row["reference_solution"], names)
        assert tuple(names[row["entry"]](x) for x in ARGUMENTS) == values(row)


def test_no_two_functions_agree(made):
    functions = {row["reference_solution"].partition(":")[2]: values(row) for row in made["train"]}
    assert len(functions) == 3 * len(NUMBERS)
    assert len(set(functions.values())) == len(functions)


def test_as_many_are_wrong_as_was_asked_for(made):
    wrong = [r for r in made["train"] if r["messages"][1]["content"] != r["reference_solution"]]
    assert 0.56 < len(wrong) / 3000 < 0.64
    assert all(
        row["messages"][1]["content"] == row["reference_solution"] for row in made["validation"]
    )


def test_held_out_requests_are_in_no_training_row(made):
    held_out = {asked(row) for row in made["validation"]}
    assert len(held_out) == NUM_HELD_OUT
    assert held_out.isdisjoint({asked(row) for row in made["train"]})
    assert len({asked(row) for row in made["train"]} | held_out) == 360


@pytest.mark.slow
def test_as_tasks():
    name = "laurel.demo.data.FunctionTasks"
    sets = [TaskSetConfig(dataset_name=name, processor="code_data_processor", split="validation")]
    tasks, _ = load_tasks(
        sets, name="validation", default_environment="code", environments=("code",)
    )
    assert len(tasks) == NUM_HELD_OUT
    assert all(len(task.prompt) == 1 for task in tasks)
    assert all(len(task.metadata["call_tests"]) == 4 for task in tasks)
