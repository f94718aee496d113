"""Turns the tests in a task's metadata into jobs of the sandbox, and results into verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from laurel.extensions.code.answers import has_name
from laurel.extensions.code.sandbox.comparison import Comparison
from laurel.extensions.code.sandbox.inside.plain_data import NotPlainDataError, dumps
from laurel.extensions.code.sandbox.jobs import (
    CallTest,
    Limits,
    SandboxJob,
    SandboxResult,
    Status,
    StdioTest,
)
from laurel.extensions.code.settings import FORMS_OF_TESTS, CodeEnvironmentConfig

COMPARISONS: tuple[Comparison, ...] = get_args(Comparison)
NO_CODE = "no_code"
"""The verdict on a completion without a program."""
NO_FUNCTION = "no_function"
"""The verdict on a program that failed and nowhere names the function that the task asks for."""

# A program may print or return so many times the expected size.
_ROOM = 4
_CHATTER_KB = 1024


class MalformedTaskError(ValueError):
    """Raised for metadata whose tests cannot be run; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTests:
    """The tests of a task, and the way in which results are compared."""

    form: str
    """The form of the tests, one of `FORMS_OF_TESTS`."""
    tests: tuple[str, ...] | tuple[StdioTest, ...] | tuple[CallTest, ...]
    """The tests; if they are code, each item is a separate test."""
    entry: str = ""
    setup: str = ""
    prefix: str = ""
    reference: str | None = None
    weights: tuple[float, ...]
    strict_types: bool
    float_tolerance: float
    comparison: Comparison = "laurel"
    prelude: str = ""

    def job(
        self, code: str, limits: Limits, *, one_by_one: bool, total_s: float | None = None
    ) -> SandboxJob:
        """Return the job that tests a program.

        Args:
            one_by_one: Whether the number of passed tests matters, so that code with several
                asserts must be run in parts, and tests after a failure are run too.
            total_s: The time limit of all tests together, in seconds.
        """
        # Room for the expected output, and to spare: 1 may be written as 1.000000.
        printed = [len(one.stdout) for one in self.tests if isinstance(one, StdioTest)]
        returned = [len(repr(one.expected)) for one in self.tests if isinstance(one, CallTest)]
        # Output of a function besides its value is ignored.
        stdout_kb = _ROOM * max(printed) // 1024 + 1 if printed else _CHATTER_KB
        result_kb = _ROOM * sum(returned) // 1024 + 1
        job = SandboxJob(
            code=code,
            limits=replace(
                limits,
                stdout_kb=max(limits.stdout_kb, stdout_kb),
                result_kb=max(limits.result_kb, result_kb),
            ),
            strict_types=self.strict_types,
            float_tolerance=self.float_tolerance,
            comparison=self.comparison,
            prelude=self.prelude,
            stop_at_failure=not one_by_one,
            total_s=total_s,
        )
        if self.form in ("stdio_tests", "call_tests"):
            mode: Any = self.form.removesuffix("_tests")
            tests: Any = self.tests
            return replace(job, mode=mode, entry=self.entry, tests=tests)
        parts = [str(test) for test in self.tests]
        parts = parts if one_by_one else ["\n".join(parts)]
        setup = self.setup
        if self.form == "test_list":
            # Part of each test: asserts may need objects of the program's classes.
            parts, setup = [f"{setup}\n{one}" for one in parts], ""
        return replace(job, mode="tests", entry=self.entry, test_setup=setup, tests=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVerdict:
    """The verdict on a program."""

    status: str
    """The value of a `Status`, `NO_CODE` or `NO_FUNCTION`."""
    reward: float = 0.0
    passed_share: float = 0.0
    """The share of passed tests among those that are counted separately; tests after a failure are
    failures.
    """
    failure: str | None = None
    """The reason why there is no verdict, in which case the other fields are meaningless."""
    hint: str = ""
    """A message for the policy about which test failed and how, without expected values."""

    @property
    def is_right(self) -> bool:
        """Whether every test passed."""
        return self.failure is None and self.status == Status.OK.value


def program_verdict(
    tests: TaskTests, code: str, result: SandboxResult, reward: str, *, most: int
) -> CodeVerdict:
    """Convert the result of a job into the verdict on a program.

    A hint repeats at most `most` characters of the program's errors.
    """
    status = result.status
    if not status.is_verdict:
        return CodeVerdict(status=status.value, failure=f"the sandbox failed: {result.reason}")
    is_missing = tests.entry and not has_name(code, tests.entry)
    if status is Status.RUNTIME_ERROR and is_missing:
        # A chat model that is no coder likes names of its own, and any other error would hide it.
        return CodeVerdict(
            status=NO_FUNCTION, hint=f"the program does not define {tests.entry!r:.100}"
        )
    passed = [test.status is Status.OK for test in result.tests]
    share = sum(passed) / len(passed)
    if reward == "weighted" and len(passed) == len(tests.weights):
        weights = zip(tests.weights, passed, strict=True)
        worth = math.fsum(w for w, ok in weights if ok) / math.fsum(tests.weights)
    else:
        worth = share
    if reward == "all_or_nothing" or status is Status.OK:
        worth = float(status is Status.OK)
    return CodeVerdict(
        status=status.value, reward=worth, passed_share=share, hint=_hint(result, most)
    )


def _hint(result: SandboxResult, most: int) -> str:
    each = result.tests
    first = next((i for i, one in enumerate(each) if one.status is not Status.OK), None)
    if first is None:
        return ""
    where = f"test {first + 1} of {len(each)}" if len(each) > 1 else "the tests"
    lines = [f"{where}: {each[first].status.value}"]
    if each[first].status is not Status.WRONG_ANSWER and each[first].detail:
        lines[0] += f" ({each[first].detail})"  # for a wrong answer it may reveal the assert
    if errors := result.stderr.strip():
        lines.append(errors[-most:])
    return "\n".join(lines)


def has_tests(metadata: Mapping[str, Any]) -> bool:
    """Report whether a task has tests."""
    return any(metadata.get(form) is not None for form in FORMS_OF_TESTS)


def problem_of(metadata: Mapping[str, Any], config: CodeEnvironmentConfig) -> str | None:
    """Return why the tests of a task cannot be run; None if they can, or if it has none."""
    if not has_tests(metadata):
        return None
    try:
        read_tests(metadata, config)
    except MalformedTaskError as error:
        return str(error)
    return None


def read_tests(metadata: Mapping[str, Any], config: CodeEnvironmentConfig) -> TaskTests:
    """Read the tests of a task that has tests.

    Raises:
        MalformedTaskError: The tests are malformed and cannot be run.
    """
    forms = [form for form in FORMS_OF_TESTS if metadata.get(form) is not None]
    if len(forms) != 1:
        raise MalformedTaskError(f"the task has {' and '.join(forms)}, and may have one of them")
    form = forms[0]
    tests: Any = _READERS[form](metadata[form], form)
    if not tests:
        raise MalformedTaskError(f"{form} is empty")
    entry = _text(metadata, "entry")
    if not entry and form != "stdio_tests":
        unclear = (
            ": the asserts do not all call one and the same function" if form == "test_list" else ""
        )
        raise MalformedTaskError(
            f"{form} needs the name of a function: entry. Add a column 'entry' that holds "
            f"it{unclear}"
        )
    strict = metadata.get("strict_types")
    if strict is not None and not isinstance(strict, bool):
        raise MalformedTaskError(f"strict_types is {_kind(strict)}, not true or false")
    tolerance = metadata.get("float_tolerance")
    if tolerance is not None and not (_is_number(tolerance) and tolerance >= 0):
        raise MalformedTaskError(f"float_tolerance is {tolerance!r}, not a number from 0 up")
    comparison = metadata.get("comparison")
    if comparison is not None and comparison not in COMPARISONS:
        raise MalformedTaskError(
            f"comparison is {comparison!r}, not one of {', '.join(COMPARISONS)}"
        )
    chosen: Comparison = config.comparison or comparison or "laurel"
    if chosen == "laurel" and comparison not in (None, "laurel") and form == "call_tests":
        tests = _unwrapped(tests)
    return TaskTests(
        form=form,
        tests=tests,
        entry=entry,
        setup=_text(metadata, "test_setup"),
        prefix=_text(metadata, "code_prefix"),
        reference=_text(metadata, "reference_solution") or None,
        weights=_weights(metadata, len(tests)),
        strict_types=config.strict_types if strict is None else strict,
        float_tolerance=config.float_tolerance if tolerance is None else float(tolerance),
        comparison=chosen,
        prelude=_text(metadata, "prelude"),
    )


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MalformedTaskError(f"{key} is {_kind(value)}, not text")
    return value


def _weights(metadata: Mapping[str, Any], count: int) -> tuple[float, ...]:
    given = metadata.get("test_weights")
    if given is None:
        return (1.0,) * count
    items = _items(given, "test_weights")
    if not all(_is_number(one) and one >= 0 for one in items) or not any(items):
        raise MalformedTaskError("test_weights must be numbers from 0 up, and not all 0")
    if len(items) != count:
        raise MalformedTaskError(f"there are {count} tests, but {len(items)} test_weights")
    return tuple(map(float, items))


def _code(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise MalformedTaskError(f"{key} is {_kind(value)}, not text")
    return (value,) if value.strip() else ()


def _asserts(value: Any, key: str) -> tuple[str, ...]:
    items = _items(value, key)
    if not all(isinstance(one, str) and one.strip() for one in items):
        raise MalformedTaskError(f"{key} must be texts, each an assert")
    return tuple(items)


def _stdio(value: Any, key: str) -> tuple[StdioTest, ...]:
    found = []
    for number, one in enumerate(_items(value, key), 1):
        test = _fields(one, f"test {number} of {key}", {"stdin", "stdout"}, {"stdout"})
        if not all(isinstance(text, str) for text in test.values()):
            raise MalformedTaskError(f"test {number} of {key}: stdin and stdout must be text")
        found.append(StdioTest(**test))
    return tuple(found)


def _calls(value: Any, key: str) -> tuple[CallTest, ...]:
    found = []
    for number, one in enumerate(_items(value, key), 1):
        where = f"test {number} of {key}"
        test = _fields(one, where, {"args", "kwargs", "expected"}, {"expected"})
        args, kwargs = test.get("args"), test.get("kwargs")
        args, kwargs = [] if args is None else args, {} if kwargs is None else kwargs
        if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
            raise MalformedTaskError(f"{where}: args must be a list, and kwargs an object")
        try:
            dumps([list(args), dict(kwargs), test["expected"]])
        except NotPlainDataError as error:
            raise MalformedTaskError(f"{where}: {error}") from error
        found.append(CallTest(args=args, kwargs=kwargs, expected=test["expected"]))
    return tuple(found)


def _unwrapped(tests: Sequence[CallTest]) -> tuple[CallTest, ...]:
    # Most benchmarks put a list around each expected value; it is removed if all have one.
    values = [test.expected for test in tests]
    if not all(isinstance(one, list) and len(one) == 1 for one in values):
        return tuple(tests)
    return tuple(replace(test, expected=test.expected[0]) for test in tests)


_READERS: Mapping[str, Callable[[Any, str], Sequence[Any]]] = {
    "test_code": _code,
    "test_list": _asserts,
    "stdio_tests": _stdio,
    "call_tests": _calls,
}


def _items(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise MalformedTaskError(f"{key} is {_kind(value)}, not a list")
    return list(value)


def _fields(value: Any, where: str, known: set[str], needed: set[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise MalformedTaskError(f"{where} is {_kind(value)}, not an object")
    if unknown := sorted(map(str, value.keys() - known)):
        raise MalformedTaskError(f"{where} has an unknown key '{unknown[0]}'")
    if missing := sorted(needed - value.keys()):
        raise MalformedTaskError(f"{where} has no '{missing[0]}'")
    return dict(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(value: Any) -> str:
    return type(value).__name__
