"""Rows that ask for a program: HumanEval, MBPP, and the forms of other systems' tests."""

import base64
import json
import os
import pickle
import zlib

import pytest

from chat_rows import assistant, user
from laurel.config.data import TaskSetConfig
from laurel.data.tasks import load_tasks
from laurel.errors import DataError
from laurel.extensions.code.formats import _text_in_pickle

HUMANEVAL = {
    "task_id": "HumanEval/7",
    "prompt": "def inc(x):\n    '''One more.'''\n",
    "entry_point": "inc",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
MBPP = {
    "text": "Write a function to add one.",
    "code": "from math import inf\r\ndef helper(x): return x\r\ndef inc(x): return helper(x) + 1",
    "task_id": 3,
    "test_setup_code": "import math",
    "test_list": ["assert math.isclose(inc(1), 2)", "assert set(inc(2)) == {3}"],
    "challenge_test_list": [],
}


@pytest.fixture
def load(write_rows):
    def run(row, dataset_name="CodeTasks", **config):
        path = write_rows([row])
        tasks, _ = load_tasks(
            [TaskSetConfig(dataset_name=dataset_name, data_path=str(path), **config)],
            name="train",
            default_environment="code",
            environments=("math", "code"),
        )
        return tasks[0]

    return run


def test_humaneval(load):
    task = load(HUMANEVAL, "HumanEval")
    assert task.environment == "code"
    assert [(m.role, m.content) for m in task.prompt] == [("user", HUMANEVAL["prompt"])]
    assert task.metadata == {
        "entry": "inc",
        "code_prefix": HUMANEVAL["prompt"],
        "test_setup": HUMANEVAL["prompt"],
        "test_code": HUMANEVAL["test"] + "\ncheck(inc)\n",
        "reference_solution": "    return x + 1\n",
        "task_id": "HumanEval/7",
    }


def test_mbpp_shows_the_first_assert(load):
    task = load(MBPP, "MBPP")
    assert task.prompt[-1].content == (
        "Write a function to add one.\nYour code should pass this test:\n"
        "assert math.isclose(inc(1), 2)"
    )
    assert task.metadata["entry"] == "inc"
    assert task.metadata["test_setup"] == "import math"
    assert task.metadata["test_list"] == MBPP["test_list"]
    assert "\r" not in task.metadata["reference_solution"]


def test_mbpp_sanitized_has_other_names(load):
    row = {
        "prompt": "Add one.",
        "test_imports": ["import math", "import re"],
        "test_list": ["assert set(inc(1)) == {2}"],
        "code": "",
    }
    task = load(row, "MBPP")
    assert task.prompt[-1].content.startswith("Add one.\n")
    assert task.metadata["test_setup"] == "import math\nimport re"
    assert task.metadata["entry"] == "inc"  # the first name that is not Python's own


def test_the_environments_own_keys(load):
    calls = [{"args": [1], "expected": 2}]
    row = {
        "prompt": "Add one.",
        "entry": "inc",
        "call_tests": calls,
        "test_weights": [2],
        "reference_solution": "def inc(x): return x + 1",
        "other": 3,
    }
    task = load(row)
    assert task.prompt[-1].content == "Add one."
    assert task.metadata == {key: row[key] for key in row if key not in ("prompt", "other")}
    assert load(row | {"call_tests": json.dumps(calls)}).metadata == task.metadata
    assert load({"prompt": "Use the tool."}).metadata == {}


@pytest.mark.parametrize(
    ("tests", "more", "entry"),
    [
        (["assert add(1, 2) == 3", "assert sorted([add(0, 1)]) == [1]"], {}, "add"),
        (["assert add(1) == sub(1)", "assert sub(2) == 2"], {}, "sub"),
        (["assert add(1) == 1", "assert sub(2) == 2"], {}, None),
        (["assert add(sub(1)) == 1"], {}, None),
        (["assert add(sub(1)) == 1"], {"reference_solution": "def add(x): return x"}, "add"),
        (["assert add(Node(1)) == 1"], {"test_setup": "class Node: pass"}, "add"),
        (["assert add(1) == 1"], {"entry": "other"}, "other"),
        (["assert ("], {}, None),
        ([3], {}, None),
    ],
)
def test_the_function_of_a_list_is_the_one_that_all_asserts_call(load, tests, more, entry):
    task = load({"prompt": "Write it.", "test_list": tests} | more)
    assert task.metadata.get("entry") == entry


def test_the_processor_reads_the_same_from_any_set(load):
    row = {
        "messages": [user("Add."), assistant("a")],
        "entry": "f",
        "call_tests": [{"args": [], "expected": 1}],
    }
    task = load(row, None, processor="code_data_processor")
    assert [m.content for m in task.prompt] == ["Add."]
    assert task.metadata == {"entry": "f", "call_tests": row["call_tests"]}


def test_apps_with_stdin(load):
    tests = {"inputs": ["1\n", ["2", "3"]], "outputs": ["one", ["two", "three"]]}
    task = load({"question": "Say it.", "input_output": json.dumps(tests), "starter_code": ""})
    assert task.prompt[-1].content == "Say it."
    assert task.metadata["stdio_tests"] == [
        {"stdin": "1\n", "stdout": "one"},
        {"stdin": "2\n3\n", "stdout": "two\nthree\n"},
    ]


def test_apps_with_a_function(load):
    tests = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
    row = {"question": "Add.", "input_output": tests, "starter_code": "def add(a, b):\n"}
    task = load(row)
    assert (
        task.prompt[-1].content == "Add.\n\nBegin with this code:\n```python\ndef add(a, b):\n```"
    )
    assert task.metadata["entry"] == "add"
    assert task.metadata["strict_types"] is False
    assert task.metadata["call_tests"] == [  # the list around each is part of how APPS compares
        {"args": [1, 2], "expected": [3]},
        {"args": [3, 4], "expected": [7]},
    ]
    lists = {"fn_name": "f", "inputs": [[1]], "outputs": [[3, 4]]}
    kept = load({"question": "?", "input_output": lists}).metadata["call_tests"]
    assert kept == [{"args": [1], "expected": [3, 4]}]


def test_numbers_that_json_made_texts_as_keys_are_numbers_again(load):
    def calls(inputs, outputs):
        tests = {"fn_name": "f", "inputs": inputs, "outputs": outputs}
        [call] = load({"question": "?", "input_output": tests}).metadata["call_tests"]
        return call

    assert calls([[{"1": 2}, 3]], [[{"4": 5}]]) == {"args": [{1: 2}, 3], "expected": [{4: 5}]}
    assert calls([[{"a": 2}]], [[{"b": 5}]]) == {"args": [{"a": 2}], "expected": [{"b": 5}]}
    assert calls([[1]], [{"4": 5}]) == {"args": [1], "expected": [{4: 5}]}


def test_the_first_solution_is_the_reference(load):
    row = {"question": "?", "input_output": {"inputs": ["1"], "outputs": ["1"]}}
    for solutions in (json.dumps(["print(1)", "print(2)"]), ["print(1)"]):
        metadata = load(row | {"solutions": solutions}).metadata
        assert metadata["reference_solution"] == "print(1)"
    for solutions in (None, "", "[]", [3], {"a": "print(1)"}):
        assert "reference_solution" not in load(row | {"solutions": solutions}).metadata
    with pytest.raises(DataError, match="'solutions' is no JSON"):
        load(row | {"solutions": "print(1)"})


def test_verls_functions_have_json_as_text(load):
    truth = {"fn_name": "f", "inputs": ['[1, 2]\n"a"', ""], "outputs": ["[true]", '{"1": 2}']}
    judge = {"ground_truth": json.dumps(truth), "style": "rule"}
    metadata = load({"prompt": "?", "reward_model": judge}).metadata
    assert metadata["entry"] == "f"
    assert metadata["call_tests"] == [
        {"args": [[1, 2], "a"], "expected": [True]},
        {"args": [], "expected": [{1: 2}]},
    ]
    judge["ground_truth"] = json.dumps(truth | {"outputs": ["[true]", "not JSON"]})
    with pytest.raises(DataError, match="an output is no JSON"):
        load({"prompt": "?", "reward_model": judge})


def packed(value):
    text = json.dumps(value)
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def test_livecodebench(load):
    public = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    private = [{"input": "5\n", "output": "6\n", "testtype": "stdin"}]
    row = {
        "question_content": "Add one.",
        "question_id": "abc_a",
        "starter_code": "",
        "public_test_cases": json.dumps(public),
        "metadata": "{}",
    }
    expected = [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "5\n", "stdout": "6\n"}]
    for cases in (packed(private), json.dumps(private)):
        task = load(row | {"private_test_cases": cases})
        assert task.metadata["stdio_tests"] == expected
        assert task.metadata["task_id"] == "abc_a"
        assert task.metadata["comparison"] == "livecodebench"


def test_livecodebench_with_a_method(load):
    public = [{"input": '[1, 2]\n"a"', "output": "[true]", "testtype": "functional"}]
    row = {
        "question_content": "Do.",
        "starter_code": "class Solution:\n    def go(self, a, b):",
        "public_test_cases": json.dumps(public),
        "metadata": '{"func_name": "go"}',
    }
    metadata = load(row).metadata
    assert metadata["entry"] == "go"  # the program shows whether it has it in a class
    assert metadata["call_tests"] == [{"args": [[1, 2], "a"], "expected": [True]}]


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_text_is_read_without_unpickling(protocol):
    for text in ("", "[1]", "ä☃\n" * 300):
        assert _text_in_pickle(pickle.dumps(text, protocol)) == text
    for other in (["a"], 1, ("a", "b"), {"a": "b"}, None):
        with pytest.raises(ValueError, match="not the pickle of a text"):
            _text_in_pickle(pickle.dumps(other, protocol))


def test_a_pickle_of_anything_but_text_is_refused(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    row = {"question_content": "?", "public_test_cases": "[]", "private_test_cases": evil}
    with pytest.raises(DataError, match="neither JSON nor packed JSON: ValueError"):
        load(row)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("HumanEval", HUMANEVAL | {"entry_point": None}, "'entry_point' is null"),
        ("HumanEval", MBPP, "no 'prompt'"),
        ("MBPP", MBPP | {"test_list": []}, "'test_list' is empty"),
        ("MBPP", MBPP | {"test_list": ["assert ("]}, "no Python"),
        ("MBPP", MBPP | {"test_list": ["assert True"], "code": ""}, "call no function"),
        ("MBPP", MBPP | {"test_list": 3}, "where a list is expected"),
        ("CodeTasks", {"prompt": "?", "call_tests": "[1"}, "'call_tests' is no JSON"),
        ("CodeTasks", {"prompt": "?", "input_output": "[]"}, "without 'inputs'"),
        (
            "CodeTasks",
            {"prompt": "?", "input_output": {"inputs": ["1"], "outputs": []}},
            "1 inputs and 0 outputs",
        ),
        ("CodeTasks", {"prompt": "?", "public_test_cases": "[1]"}, "not objects of 'input'"),
    ],
)
def test_rows_that_cannot_be_used(load, name, row, part):
    with pytest.raises(DataError, match=part):
        load(row, name)
