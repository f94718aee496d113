"""The code environment: rewards by hand, code as a tool, what is malformed, what fails."""

import os
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from environment_batches import batch_of, log_of
from laurel.config.data import TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.data.sources import read_rows
from laurel.data.task_formats import task_set
from laurel.environments.interface import cut_middle
from laurel.environments.registry import create_environment
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.extensions.code.answers import Session, fenced, program_of, tagged
from laurel.extensions.code.environment import CodeEnvironment
from laurel.extensions.code.sandbox.detection import Detection
from laurel.extensions.code.sandbox.jobs import Limits
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.settings import CodeEnvironmentConfig
from laurel.types import Message, Task

QUICK = {"cpu_seconds": 1.0, "wall_seconds": 20.0, "min_tier": "D"}
DATA = Path(os.environ.get("LAUREL_DATA", ""))

CALLS = {
    "entry": "double",
    "call_tests": [
        {"args": [1], "expected": 2},
        {"args": [0], "expected": 0},
        {"kwargs": {"x": -3}, "expected": -6},
        {"args": ["ab"], "expected": "abab"},
    ],
}
STDIO = {"stdio_tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9"}]}
ASSERTS = {
    "entry": "inc",
    "test_setup": "import math",
    "test_list": ["assert inc(1) == 2", "assert inc(math.inf) == math.inf", "assert inc(-1) == 0"],
}
CHECK = {
    "entry": "inc",
    "code_prefix": 'def inc(x):\n    """One more."""\n',
    "test_code": "def check(f):\n    assert f(1) == 2\n    assert f(5) == 6\ncheck(inc)",
}

RIGHT = "def double(x):\n    return x + x"
SUM = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture(scope="module")
def make(found):
    """Makes environments that end with the tests."""
    made = []

    def made_with(most=4096, **config):
        settings = {"num_workers": 2, "sandbox": QUICK} | config
        made.append(CodeEnvironment(settings, detection=found, max_observation_chars=most))
        return made[-1]

    yield made_with
    for environment in made:
        environment.shutdown()


@pytest.fixture(scope="module")
def environment(make):
    return make()


def block(code):
    return f"Here:\n```python\n{code}\n```\nDone."


def judge(environment, text, metadata):
    returned = environment.step([log_of(text)], [metadata])
    return returned.rewards[0].item(), returned.metadata[0].get("verdict"), returned.failures[0]


@pytest.mark.parametrize(
    ("code", "metadata", "expected"),
    [
        (RIGHT, CALLS, (1.0, "ok")),
        ("def double(x):\n    return 2", CALLS, (0.0, "wrong_answer")),
        ("def double(x):\n    return x +", CALLS, (0.0, "syntax_error")),
        ("def double(x):\n    while True: pass", CALLS, (0.0, "timeout_cpu")),
        ("def double(x):\n    raise ValueError(x)", CALLS, (0.0, "runtime_error")),
        ("def half(x):\n    return x / 2  # double", CALLS, (0.0, "runtime_error")),
        ("def double_it(x):\n    return x + x", CALLS, (0.0, "no_function")),
        ("def inc_one(x):\n    return x + 1", ASSERTS, (0.0, "no_function")),
        ("def double(x):\n    return [x] * 10**10", CALLS, (0.0, "memory_limit")),
        (SUM, STDIO, (1.0, "ok")),
        ("print(3)", STDIO, (0.0, "wrong_answer")),
        ("raise SystemExit(0)", STDIO, (0.0, "wrong_answer")),
        ("while True: print('x' * 9999)", STDIO, (0.0, "output_limit")),
        ("def inc(x): return x + 1", ASSERTS, (1.0, "ok")),
        ("def inc(x): return 2", ASSERTS, (0.0, "wrong_answer")),
        ("def inc(x): raise SystemExit(0)", ASSERTS, (0.0, "no_result")),
        ("def inc(x): return x + 1", CHECK, (1.0, "ok")),
        ("def inc(x): return x", CHECK, (0.0, "wrong_answer")),
    ],
)
def test_verdicts(environment, code, metadata, expected):
    assert judge(environment, block(code), metadata) == (*expected, None)


def test_asserts_may_be_about_objects_of_the_program(make):
    """As two tasks of MBPP are."""
    metadata = {
        "entry": "height",
        "test_setup": "root = Node(1)\nroot.left = Node(2)\nlone = Node(3)",
        "test_list": ["assert height(root) == 2", "assert height(lone) == 1"],
    }
    code = block(
        "class Node:\n    def __init__(self, data): self.data, self.left = data, None\n"
        "def height(node): return 0 if node is None else 1 + height(node.left)"
    )
    assert judge(make(), code, metadata) == (1.0, "ok", None)
    assert judge(make(reward="fraction"), code, metadata) == (1.0, "ok", None)
    wrong = code.replace("1 + height(node.left)", "2")
    assert judge(make(reward="fraction"), wrong, metadata) == (0.5, "wrong_answer", None)


def test_true_is_not_one_unless_the_task_says_that_types_do_not_count(environment):
    tests = {"entry": "f", "call_tests": [{"expected": 1}]}
    assert judge(environment, block("def f(): return True"), tests)[0] == 0.0
    assert judge(environment, block("def f(): return 1.0"), tests)[0] == 0.0
    loose = tests | {"strict_types": False}
    assert judge(environment, block("def f(): return 1.0"), loose)[0] == 1.0
    assert judge(environment, block("def f(): return True"), loose)[0] == 0.0


def test_numbers_that_are_nearly_right(make):
    tests = {"entry": "f", "call_tests": [{"expected": 0.3}]}
    text = block("def f(): return 0.1 + 0.2")
    assert judge(make(), text, tests)[0] == 0.0
    assert judge(make(float_tolerance=1e-9), text, tests)[0] == 1.0
    assert judge(make(), text, tests | {"float_tolerance": 1e-9})[0] == 1.0


def test_what_a_step_returns(environment):
    given = [CALLS | {"level": 3}, CALLS]
    returned = environment.step([log_of(block(RIGHT)), log_of(block("def double(x): 1"))], given)
    assert torch.equal(returned.rewards, torch.tensor([1.0, 0.0]))
    assert [o["content"] for o in returned.observations] == [
        "Environment: ok",
        "Environment: wrong_answer",
    ]
    assert {o["role"] for o in returned.observations} == {"environment"}
    assert returned.terminateds.tolist() == [True, True]
    assert returned.answers == ["ok", "wrong_answer"]
    assert returned.metadata[0]["level"] == 3
    assert returned.metadata[0]["passed_share"] == 1.0
    assert returned.metadata[0]["tier"] in "ABCD"
    assert given[1] == CALLS  # not written to


def test_the_share_of_tests(make):
    environment = make(reward="fraction")
    # Right for 1 and 0; wrong for -3; an exception for a text.
    code = block("def double(x):\n    return abs(x) * 2 if x else 0")
    returned = environment.step([log_of(code)], [CALLS])
    assert returned.rewards.tolist() == [0.5]
    assert returned.metadata[0]["passed_share"] == 0.5
    asserts = judge(environment, block("def inc(x): return x + 1 if x > 0 else 7"), ASSERTS)
    assert asserts == (pytest.approx(2 / 3), "wrong_answer", None)
    assert judge(environment, block("print(3)"), STDIO)[0] == 0.5
    assert judge(environment, block("def inc(x): return x + 1"), CHECK)[0] == 1.0


def test_weights_of_tests(make):
    environment = make(reward="weighted")
    code = block("def double(x):\n    return abs(x) * 2 if x else 0")
    assert judge(environment, code, CALLS | {"test_weights": [1, 2, 4, 1]})[0] == 3 / 8
    assert judge(environment, code, CALLS | {"test_weights": [0, 0, 0, 1]})[0] == 0.0
    assert judge(environment, block(RIGHT), CALLS | {"test_weights": [1, 2, 4, 1]})[0] == 1.0
    assert judge(environment, code, CALLS)[0] == 0.5


def test_a_program_may_be_mended(make):
    environment = make(max_attempts=3, reward="fraction")
    wrong = block("def double(x):\n    return x * 2 if x != 1 else 3")
    broken = block("def double(x):\n    retrun x")
    first = environment.step([log_of(wrong)], [CALLS])
    assert first.terminateds.tolist() == [False]
    assert first.rewards.tolist() == [0.75]
    said = first.observations[0]
    assert said["role"] == "user"  # a turn of its own
    assert said["content"] == "Environment: wrong_answer\ntest 1 of 4: wrong_answer"
    log = [*log_of(wrong), said]
    log.append({"role": "assistant", "content": broken})
    second = environment.step([log], first.metadata)
    assert second.terminateds.tolist() == [False]
    assert sum(r.rewards.item() for r in (first, second)) == 0.0
    assert "SyntaxError" in second.observations[0]["content"]
    log += [second.observations[0], {"role": "assistant", "content": block(RIGHT)}]
    third = environment.step([log], second.metadata)
    assert third.terminateds.tolist() == [True]
    assert sum(r.rewards.item() for r in (first, second, third)) == 1.0
    assert third.metadata[0]["attempts"] == 3
    assert third.observations[0] == {"role": "environment", "content": "Environment: ok"}
    _, figures = environment.global_post_process_and_metrics(batch_of([log], third, ["a"]))
    assert (figures["accuracy"], figures["attempts"], figures["verdict/ok"]) == (1.0, 3.0, 1.0)


def test_the_last_attempt_ends_it(make):
    environment = make(max_attempts=2)
    first = environment.step([log_of("I cannot.")], [CALLS])
    assert first.terminateds.tolist() == [False]
    assert first.observations[0]["content"].startswith("Environment: no_code")
    second = environment.step([log_of("I cannot.", "No.")], first.metadata)
    assert second.terminateds.tolist() == [True]
    assert second.observations[0]["content"] == "Environment: no_code"


def test_a_program_without_the_function_is_told_its_name(make):
    """Chat models name functions as they like; fences or none, that is what they are told."""
    environment = make(max_attempts=2)
    for answer in (block("def twice(x): return x + x"), "def twice(x): return x + x"):
        returned = environment.step([log_of(answer)], [CALLS])
        told = returned.observations[0]["content"]
        assert told == "Environment: no_function\nthe program does not define 'double'"


def test_what_is_told_of_a_failure_has_no_expected_value(make):
    environment = make(max_attempts=2)
    tests = {"entry": "f", "call_tests": [{"args": [7], "expected": "SECRET"}]}
    asserts = {"entry": "f", "test_list": ["assert f(7) == 'SECRET', 'SECRET'"]}
    for metadata in (tests, asserts, {"stdio_tests": [{"stdin": "7", "stdout": "SECRET"}]}):
        for code in ("def f(x): return 1", "def f(x): raise ValueError(x)", "x = 1 / 0"):
            returned = environment.step([log_of(block(code))], [metadata])
            assert returned.terminateds.tolist() == [False]
            assert "SECRET" not in returned.observations[0]["content"]
    assert "ZeroDivisionError" in returned.observations[0]["content"]


def turn(environment, said, metadata, log=()):
    """One more turn of a conversation: the log, the observation, and what was returned."""
    log = [*(log or log_of()), {"role": "assistant", "content": said}]
    returned = environment.step([log], [metadata])
    return [*log, returned.observations[0]], returned.observations[0]["content"], returned


def test_variables_last_from_turn_to_turn(make):
    environment = make(terminate_on_evaluation=False)
    assert environment.spec.stop_strings == ("</code>",)
    log, said, returned = turn(environment, "Let me see. <code>x = 20\nprint('hi')</code>", {})
    assert said == "\n\n<result>\nhi\n</result>"
    assert returned.next_stop_strings == [["</code>"]]
    log, said, returned = turn(environment, "<code>y = x + 1</code>", returned.metadata[0], log)
    assert said == ""
    log, said, returned = turn(environment, "<code>x + y", returned.metadata[0], log)
    assert said == "<result>41</result>"  # the tag was the stop string
    assert returned.terminateds.tolist() == [False]
    assert returned.rewards.tolist() == [0.0]
    assert returned.answers == ["41"]
    batch = batch_of([log], returned, ["a"])
    _, figures = environment.global_post_process_and_metrics(batch)
    assert figures["code_calls"] == 3.0
    assert figures["code_error_share"] == 0.0


def test_an_evaluated_expression_ends_the_conversation(make):
    environment = make(terminate_on_evaluation=True)
    for code, is_over in (("1 + 1", True), ("x = 1", False), ("1 / 0", False), ("None", True)):
        assert turn(environment, f"<code>{code}</code>", {})[2].terminateds.tolist() == [is_over]


def test_a_failing_block_is_told_and_happened_up_to_its_failure(environment):
    log, said, returned = turn(environment, "<code>a = 1\na += 1\nb = a / 0\na = 9</code>", {})
    assert said == "\n\n<result>\nZeroDivisionError: division by zero\n</result>"
    _, said, returned = turn(environment, "<code>a</code>", returned.metadata[0], log)
    assert said == "<result>2</result>"
    assert returned.metadata[0]["code_session"]["num_errors"] == 1


@pytest.mark.parametrize(
    ("code", "error", "left"),
    [
        ("import os\nos._exit(0)", "RuntimeError: the process ended before", "5"),
        ("while True: pass", "TimeoutError: it took more than 1 s", "5"),
        ("while True: print('x' * 9999)", "OSError: it printed more than 64 kB", "5"),
        ("import ctypes\nctypes.string_at(0)", "RuntimeError: the process ended before", "5"),
        # This one only raises.
        ("x = 'a' * 10**10", "MemoryError", "6"),
    ],
)
def test_a_block_that_its_process_does_not_survive_is_undone(environment, code, error, left):
    log, _, first = turn(environment, "<code>a = 5</code>", {})
    log, said, second = turn(environment, f"<code>a = 6\n{code}</code>", first.metadata[0], log)
    assert error in said
    assert second.terminateds.tolist() == [False]
    _, said, _ = turn(environment, "<code>a</code>", second.metadata[0], log)
    assert said == f"<result>{left}</result>"


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("class A:\n    def __repr__(self): raise SystemExit\nA()", "SystemExit"),
        ("a = []\na.append(a)\na", "Recursion"),
        ("\x00", "Error"),
        ("'\\ud800'", "ud800"),
    ],
)
def test_nothing_that_is_written_raises(environment, code, part):
    _, said, returned = turn(environment, f"<code>{code}</code>", {})
    assert part in said
    assert returned.failures == [None]


def test_no_code_is_answered_with_nothing(environment):
    _, said, returned = turn(environment, "I do not know.", {"a": 1})
    assert said == ""
    assert returned.terminateds.tolist() == [False]
    assert returned.failures == [None]


def test_earlier_blocks_run_again_silently_and_with_the_same_seed(make):
    environment = make(terminate_on_evaluation=False)
    said_first = (
        "<code>import random, os, sys\nx = random.random()\nout = sys.stdout\n"
        "print('p')\nos.write(1, b'raw')\nx</code>"
    )
    log, first, returned = turn(environment, said_first, {})
    _, second, _ = turn(environment, "<code>print(x, file=out)</code>", returned.metadata[0], log)
    value = second.removeprefix("<result>").removesuffix("</result>")
    assert first.endswith(f"{value}\n</result>")
    assert "raw" in first
    assert "raw" not in second


def test_long_results_are_shortened(make):
    environment = make(most=64, terminate_on_evaluation=False)
    _, said, _ = turn(environment, "<code>print('a' * 1000, 'z')</code>", {})
    assert len(said) < 200
    assert "characters left out" in said
    assert "z" in said
    assert cut_middle("abcd", 4) == "abcd"


def test_what_was_said_after_the_tag_is_not_said_again(environment):
    _, said, _ = turn(environment, "<code>x = 4\nx</code>\n\n<", {})
    assert said == "result>\n4\n</result>"


@pytest.mark.parametrize(
    ("metadata", "part"),
    [
        ({"call_tests": [{"expected": 1}]}, "entry"),
        ({"call_tests": {"expected": 1}, "entry": "f"}, "dict, not a list"),
        ({"call_tests": [], "entry": "f"}, "empty"),
        ({"call_tests": [{"args": 1, "expected": 1}], "entry": "f"}, "args must be a list"),
        ({"call_tests": [{"args": []}], "entry": "f"}, "no 'expected'"),
        ({"call_tests": [{"arg": [1], "expected": 1}], "entry": "f"}, "unknown key 'arg'"),
        ({"call_tests": [{"expected": object()}], "entry": "f"}, "no plain data"),
        ({"stdio_tests": [{"stdin": 3, "stdout": ""}]}, "must be text"),
        ({"stdio_tests": ["a"]}, "str, not an object"),
        ({"test_list": "assert True", "entry": "f"}, "str, not a list"),
        ({"test_list": ["assert True"], "entry": 3}, "entry is int"),
        ({"test_code": 3, "entry": "f"}, "test_code is int"),
        (STDIO | CALLS, "may have one of them"),
        (CALLS | {"test_weights": [1]}, "4 tests, but 1"),
        (CALLS | {"test_weights": [0, 0, 0, 0]}, "not all 0"),
        (CALLS | {"strict_types": "no"}, "strict_types"),
        (CALLS | {"attempts": "1"}, "attempts"),
        ({"code_session": 3}, "code_session"),
    ],
)
def test_malformed_metadata_is_a_failure_not_a_zero(environment, metadata, part):
    logs = [log_of(block(RIGHT))] * 2
    returned = environment.step(logs, [metadata, CALLS])
    assert part in returned.failures[0]
    assert returned.failures[1] is None
    assert returned.rewards[1] == 1.0


def test_a_sandbox_that_fails_is_a_failure_not_a_zero(found):
    environment = CodeEnvironment({"num_workers": 1, "sandbox": QUICK}, detection=found)
    environment.shutdown()
    returned = environment.step([log_of(block(RIGHT)), log_of("<code>1</code>")], [CALLS, {}])
    assert all("the sandbox failed" in failure for failure in returned.failures)
    assert returned.rewards.tolist() == [0.0, 0.0]
    assert returned.terminateds.all()
    task = Task(
        id="a",
        prompt=(Message("user", "?"),),
        environment="code",
        metadata=CALLS | {"reference_solution": RIGHT},
    )
    assert environment.validate([task]) == []  # that says nothing of the task


def test_conversations_and_metadata_are_as_many(environment):
    with pytest.raises(EnvironmentFailedError, match="metadata for 2"):
        environment.step([log_of("a")], [{}, {}])


def test_tasks_that_cannot_be_passed_are_rejected(environment, monkeypatch):
    metadata = [
        CALLS,
        CALLS | {"reference_solution": RIGHT},
        CALLS | {"reference_solution": "def double(x): return x"},
        CALLS | {"entry": None},
        CHECK | {"reference_solution": "    return x + 1\n"},
        {},
    ]
    tasks = [
        Task(id=str(i), prompt=(Message("user", "?"),), environment="code", metadata=one)
        for i, one in enumerate(metadata * 2)
    ]
    run = MagicMock(side_effect=environment._pool.submit)
    monkeypatch.setattr(environment._pool, "submit", run)
    rejected = environment.validate(tasks)
    assert [one.task.id for one in rejected] == ["2", "3", "8", "9"]
    assert run.call_count == 3  # what is asked twice is run once
    assert "reference_solution fails" in rejected[0].reason
    assert "entry" in rejected[1].reason


def test_a_machine_that_does_not_lock_programs_in_is_refused_at_once():
    bare = Detection(tier=Tier.LIMITS_ONLY, reasons={})
    with pytest.raises(ConfigError, match="min_tier=none"):
        CodeEnvironment({}, detection=bare)
    with CodeEnvironment({"sandbox": {"min_tier": "none"}}, detection=bare) as environment:
        _, figures = environment.global_post_process_and_metrics(
            batch_of([], environment.step([], []))
        )
        assert figures["tier_is_full"] == 0.0


def test_settings():
    config = EnvironmentsConfig()
    assert "code" in config.names()
    settings = config.found("code").section
    assert settings == CodeEnvironmentConfig()
    assert settings.stop_strings == ["</code>"]
    with pytest.raises(ConfigError, match="did you mean 'terminate_on_evaluation'"):
        CodeEnvironment({"terminate_on_evaluations": True})
    with pytest.raises(ConfigError, match=r"env\.code\.num_workers says it"):
        CodeEnvironment({"sandbox": {"num_workers": 3}})


def test_by_its_name_programs_begin_in_nine_tenths_of_the_time_of_a_call(found, monkeypatch):
    config = EnvironmentsConfig(timeout_seconds=50, code={"num_workers": 1, "sandbox": QUICK})
    environment = create_environment("code", config)
    assert isinstance(environment, CodeEnvironment)
    assert environment._pool.num_workers == 1
    submitted = MagicMock(wraps=environment._pool.submit)
    monkeypatch.setattr(environment._pool, "submit", submitted)
    began = time.monotonic()
    environment.step([log_of(block(RIGHT))], [CALLS])
    assert began + 45 <= submitted.call_args.kwargs["deadline"] <= time.monotonic() + 45
    environment.shutdown()


def test_figures(environment):
    answers = [block(RIGHT), block("def double(x): return 2"), "Sorry.", block("def double(")]
    logs = [log_of(answer) for answer in answers]
    returned = environment.step(logs, [CALLS] * 4)
    _, figures = environment.global_post_process_and_metrics(
        batch_of(logs, returned, ["a", "a", "b", "b"], num_failures=1)
    )
    assert figures["accuracy"] == 0.25
    assert figures["pass@1"] == 0.25
    assert figures["pass@2"] == 0.5
    assert {k: v for k, v in figures.items() if k.startswith("verdict/")} == {
        "verdict/ok": 0.25,
        "verdict/wrong_answer": 0.25,
        "verdict/no_code": 0.25,
        "verdict/syntax_error": 0.25,
    }
    assert figures["tests_passed_share"] == pytest.approx((1 + 1 / 4 + 0 + 0) / 4)
    assert figures["sandbox_failures"] == 1.0
    cut_off = batch_of(
        logs, returned, ["a", "a", "b", "b"], is_end=torch.tensor([False, True, True, True])
    )
    assert environment.global_post_process_and_metrics(cut_off)[1]["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```\n```python\nb\n```", "b"),
        ("```python\na\n```\n```\nb\n```", "a"),
        ("```\na\n```\n```text\nb\n```", "b"),
        ("<code>\na\n</code> or ```\nb\n```", "b"),
        ("So: <code>a</code>", "a"),
        ("So: <code>\n```py\na\n```\n</code>", "a"),
        ("```python\ndef f(): 1\n```\nThen:\n```python\nprint(f())\n```", "def f(): 1"),
        ("```Python3\r\na\n```", "a"),
        ("Here it is: ```python\na", "a"),
        ("```python\na```", "a"),
        ("def f(): 2", "def f(): 2"),
        ("I would call f", "I would call f"),
        (
            "def g(): 3",
            "def g(): 3",
        ),  # without the function: what it lacks is said, not that it is none
        ("I do not know", None),
        ("```python\n```", None),
        ("", None),
    ],
)
def test_the_program_in_a_completion(text, expected):
    found = program_of(text, entry="f")
    assert (found.strip() if found else found) == expected


def test_a_program_that_goes_on_from_a_prefix():
    prefix = "import math\n\ndef f(x):\n    '''Root.'''\n"
    body = "    return math.sqrt(x)\n"
    assert program_of(body, entry="f", prefix=prefix) == prefix + body
    assert program_of(body + "\ndef", entry="f", prefix=prefix) == prefix + body + "\n"
    whole = "def f(x):\n    return math.sqrt(x)"
    assert program_of(block(whole), entry="f", prefix=prefix) == f"{prefix}\n\n{whole}"
    # A prefix that is no program by itself cannot stand before one.
    assert program_of(block(whole), entry="f", prefix="def f(x):\n") == whole
    assert program_of(" ", entry="f", prefix=prefix) is None


@pytest.mark.parametrize(
    "text",
    [
        "```" + "a" * 300_000 + "`",
        "x```" + "a" * 300_000 + "!",
        "`" * 300_000,
        "a```" * 100_000,
        "```python\n" * 50_000,
        "<code>" * 50_000,
        " " * 300_000 + "f",
        "\ndef" + "(" * 300_000 + "x",
    ],
)
def test_texts_on_which_a_search_could_take_for_ever(text):
    """The test is that this ends."""
    program_of(text, entry="f", prefix="def f():\n")
    tagged(text)


def test_fences_and_tags():
    assert [b.language for b in fenced("```a\n1\n```b\n2\n```")] == ["a", "b"]
    assert fenced("no ``` fence") == []
    assert tagged("<code>a</code> and <code>b</code> c") == ("b", " c")
    assert tagged("none") is None


def test_earlier_blocks_get_the_time_that_they_took_and_some_to_spare():
    session = Session(blocks=("a = 1",), cpu_s=0.5, wall_s=1.5)
    job = session.job("a", limits=Limits(cpu_s=5, wall_s=10), most=100)
    assert (job.limits.cpu_s, job.limits.wall_s) == (6.0, 13.0)


def test_a_session_is_plain_data():
    session = Session(blocks=("a = 1",), cpu_s=0.5, num_calls=2)
    assert Session.of(session.as_metadata()) == session
    assert Session.of(None) == Session()


@pytest.mark.parametrize(
    ("name", "file", "every", "count"),
    [("HumanEval", "humaneval/HumanEval.jsonl.gz", 8, 21), ("MBPP", "mbpp/test.jsonl.gz", 20, 25)],
)
def test_known_solutions_of_real_tasks_earn_the_reward(make, name, file, every, count):
    path = DATA / file
    if not path.is_file():
        pytest.skip(f"LAUREL_DATA holds no {file}")
    rows = [row for _, row in read_rows(str(path))][::every]
    known = task_set(name)
    parts = [known.read(row, TaskSetConfig()) for row in rows]
    metadata = [dict(one.metadata) for one in parts]
    assert len(metadata) == count
    environment = make(sandbox=QUICK | {"cpu_seconds": 8.0, "wall_seconds": 60.0})
    logs = [log_of(one["reference_solution"]) for one in metadata]
    returned = environment.step(logs, metadata)
    assert returned.rewards.tolist() == [1.0] * count
    none = environment.step(
        [log_of(block(f"def {one['entry']}(*a): pass")) for one in metadata], metadata
    )
    assert none.rewards.tolist() == [0.0] * count
