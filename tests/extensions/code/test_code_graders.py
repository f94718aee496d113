"""Rows of other benchmarks get the verdicts of their own graders.

`benchmarks/code_grader_rows.yaml` holds rows, answers, and what those graders said of them;
`benchmarks/code_graders.py --peer-checkouts` asks them again.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import code_graders

from laurel.errors import ConfigError
from laurel.extensions.code.answers import program_of
from laurel.extensions.code.environment import CodeEnvironment
from laurel.extensions.code.formats import PRELUDES, code_task
from laurel.extensions.code.sandbox.comparison import same_output_as, same_value_as
from laurel.extensions.code.settings import CodeEnvironmentConfig
from laurel.extensions.code.tests import COMPARISONS, read_tests
from laurel.types import Task

SANDBOX = {"min_tier": "D", "wall_seconds": 60.0}
BENCHMARKS = [name for name in COMPARISONS if name != "laurel"]


@pytest.fixture(scope="module")
def environment(found):
    environment = CodeEnvironment({"num_workers": 2, "sandbox": SANDBOX}, detection=found)
    yield environment
    environment.shutdown()


def reward_of(environment, program, row, **metadata):
    log = [{"role": "assistant", "content": f"```python\n{program}\n```"}]
    returned = environment.step([log], [dict(code_task(row).metadata) | metadata])
    assert returned.failures == [None]
    return returned.rewards[0].item(), returned.metadata[0]["verdict"]


@pytest.mark.parametrize("kind", ["stdio", "function", "class"])
@pytest.mark.slow_parameters("stdio", "class")
def test_verdicts_are_those_of_the_benchmarks_graders(environment, kind):
    asked = code_graders.answers(kind)
    assert len({(one.benchmark, one.name) for one in asked}) == 20
    assert code_graders.differences(asked, code_graders.judged_here(asked, environment)) == []


def test_the_rows_have_right_and_wrong_answers_of_every_benchmark():
    asked = code_graders.answers()
    counts = Counter((one.benchmark, one.kind, one.accepted_there) for one in asked)
    assert len(counts) == len(BENCHMARKS) * 3 * 2
    assert min(counts.values()) >= 8
    otherwise = [one for one in asked if one.accepted_here is not one.accepted_there]
    assert all(one.why for one in otherwise)
    assert len(otherwise) == 19


#
# These, too, were put to the graders themselves.


@pytest.mark.parametrize(
    ("expected", "given", "accepted_by"),
    [
        # Whitespace, lines and words.
        ("1 2\n", "1 2", BENCHMARKS),
        ("1\n2\n", "1\n\n2\n", ["apps", "taco", "verl"]),
        ("1 \n2\n", "1\n2 \n", BENCHMARKS),
        ("a\nb\n", "a\r\nb\r\n", BENCHMARKS),
        ("1\n1\n2\n", "1\n2\n", ["apps", "taco"]),
        ("a b\nc\n", "c\nb a\n", ["apps"]),
        ("ab\n", "ba\n", []),
        ("1 2\n", "21\n", ["taco"]),
        ("x\ny\n", "y x\n", ["taco"]),
        ("", "\n", BENCHMARKS),
        # Numbers.
        ("1\n", "1.0\n", ["apps", "livecodebench", "verl"]),
        ("1 2\n", "1.0 2\n", ["apps", "livecodebench"]),
        ("0.5\n", "0.500001\n", ["apps", "verl"]),
        ("0.5 1\n", "0.5001 1\n", ["apps"]),
        ("1000000\n", "1000001\n", ["apps"]),
        ("1000000.0\n", "1000001\n", ["apps", "verl"]),
        ("nan\n", "NaN\n", []),
        ("1\n", "sNaN\n", []),
        ("inf\n", "Infinity\n", ["apps", "livecodebench", "verl"]),
    ],
)
def test_printed_text(expected, given, accepted_by):
    accepted = [name for name in BENCHMARKS if same_output_as(name, expected, given)]
    assert accepted == accepted_by


LISTED = ["apps", "taco", "verl"]
"""Those whose rows have each value in a list of its own."""


@pytest.mark.parametrize(
    ("expected", "given", "accepted_by"),
    [
        ([3], 3, LISTED),
        ([3], [3], BENCHMARKS),
        (3, 3.0, BENCHMARKS),
        ([1], True, LISTED),
        ([[1, 2]], (1, 2), LISTED),
        ([1, 2], (1, 2), BENCHMARKS),
        ([[[1, 2]]], [(1, 2)], LISTED),
        ([[[1, 2], 3]], [(1, 2), 3], []),
        ([1, 2], 1, LISTED),
        ([0.3], 0.1 + 0.2, []),
        ([[1, 2]], {1, 2}, []),
        (["a"], None, []),
        ({"a": 1}, Counter("a"), BENCHMARKS),
        ([[1]], [1, 2], []),
        ([], [], BENCHMARKS),
    ],
)
def test_values(expected, given, accepted_by):
    accepted = [name for name in BENCHMARKS if same_value_as(name, expected, given)]
    assert accepted == accepted_by


def test_without_a_setting_the_row_says_how_it_is_compared():
    row = code_graders.apps(
        {
            "question": "?",
            "function": "f",
            "answers": [{"program": "x"}],
            "tests": [{"args": [1], "value": 2}],
        },
        0,
    )
    metadata = code_task(row).metadata
    assert metadata["comparison"] == "apps"
    assert metadata["prelude"] == PRELUDES["apps"]
    assert read_tests(metadata, CodeEnvironmentConfig()).comparison == "apps"
    assert read_tests(metadata, CodeEnvironmentConfig(comparison="verl")).comparison == "verl"
    strict = read_tests(metadata, CodeEnvironmentConfig(comparison="laurel"))
    assert strict.comparison == "laurel"
    assert [one.expected for one in strict.tests] == [2]  # out of the list around it
    # A row that says itself how strict to be is not overruled by the form of its tests.
    assert code_task(row | {"float_tolerance": 0.5}).metadata["comparison"] == "laurel"
    said = code_task(row | {"float_tolerance": 0.5, "comparison": "taco"}).metadata
    assert said["comparison"] == "taco"


def test_a_row_of_taco_is_told_from_one_of_apps():
    tests = {"input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]}), "question": "?"}
    assert code_task(tests).metadata["comparison"] == "apps"
    assert code_task(tests | {"raw_tags": "[]"}).metadata["comparison"] == "taco"


def test_a_comparison_that_leaves_a_setting_without_effect_is_refused():
    with pytest.raises(ValueError, match="float_tolerance has no effect with comparison=apps"):
        CodeEnvironmentConfig(comparison="apps", float_tolerance=0.1)
    with pytest.raises(ValueError, match="strict_types has no effect with comparison=verl"):
        CodeEnvironmentConfig(comparison="verl", strict_types=False)
    assert CodeEnvironmentConfig(comparison="laurel", float_tolerance=0.1).float_tolerance == 0.1
    with pytest.raises(ConfigError, match="comparison"):
        CodeEnvironment({"comparison": "codeforces"})


def test_an_unknown_comparison_of_a_task_is_said(environment):
    metadata = {"stdio_tests": [{"stdout": "1"}], "comparison": "codeforces"}
    task = Task(id="t", prompt=(), environment="code", metadata=metadata)
    [rejected] = environment.validate([task])
    assert "comparison is 'codeforces', not one of laurel, apps" in rejected.reason


def test_whoever_defines_solution_is_asked_for_its_method(environment):
    """Also in tests of one's own, whose function has no class in its name."""
    row = {"prompt": "?", "entry": "f", "call_tests": [{"args": [2], "expected": 3}]}
    method = "class Solution:\n    def f(self, x):\n        return x + 1"
    assert reward_of(environment, method, row) == (1.0, "ok")
    assert reward_of(environment, "def f(x): return x + 1", row) == (1.0, "ok")
    both = f"{method}\ndef f(x): return 0"
    assert reward_of(environment, both, row) == (1.0, "ok")
    assert reward_of(environment, f"def f(x): return x + 1\n{method[:15]}\n    pass", row)[0] == 1


def test_the_block_with_the_solution_is_the_program():
    text = (
        "```python\nclass Solution:\n    def f(self): return 1\n```\nUse it so:\n"
        "```python\nprint(Solution().f())\n```"
    )
    assert program_of(text, entry="f").startswith("class Solution")


def test_a_function_is_called_without_what_its_program_does_when_started(environment):
    row = {"prompt": "?", "entry": "f", "call_tests": [{"args": [2], "expected": 3}]}
    program = "def f(x):\n    return x + 1\nif __name__ == '__main__':\n    print(f(int(input())))"
    assert reward_of(environment, program, row) == (1.0, "ok")


def test_a_prelude_is_before_the_program_and_moves_none_of_its_lines(environment):
    row = {"prompt": "?", "stdio_tests": [{"stdout": "3"}], "prelude": "from math import sqrt"}
    program = "from __future__ import annotations\nprint(int(sqrt(9)))"
    assert reward_of(environment, program, row) == (1.0, "ok")
    assert reward_of(environment, "print(3)", row)[0] == 1
    assert reward_of(environment, "print(floor(3.5))", row)[1] == "runtime_error"


def test_as_much_may_be_printed_and_returned_as_is_expected(environment):
    """More than the limits, where that is what is asked for."""
    printed = "".join(f"{i}\n" for i in range(20_000))
    row = {"prompt": "?", "stdio_tests": [{"stdin": "20000", "stdout": printed}]}
    program = "for i in range(int(input())): print(i)"
    assert len(printed) > 64 << 10
    assert reward_of(environment, program, row) == (1.0, "ok")
    returned = list(range(100_000))
    row = {"prompt": "?", "entry": "f", "call_tests": [{"args": [100_000], "expected": returned}]}
    assert reward_of(environment, "def f(n): return list(range(n))", row) == (1.0, "ok")
    chatty = "def f(n):\n    print('x' * 100_000)\n    return list(range(n))"
    assert reward_of(environment, chatty, row) == (1.0, "ok")
    flood = "def f(n):\n    while True: print('x' * 10_000)"
    assert reward_of(environment, flood, row) == (0.0, "output_limit")
    assert reward_of(environment, "def f(n): return list(range(n)) * 20", row)[0] == 0
