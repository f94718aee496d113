"""The made task: its tests tell every function from every other."""

import pytest

from laurel.config.data import TaskSetConfig
from laurel.data.tasks import load_tasks
from laurel.demo.data import ARGUMENTS, NUM_HELD_OUT, NUMBERS, FunctionTasks


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
