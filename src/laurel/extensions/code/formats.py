"""Reads rows that ask for a program, and the tests that they bring.

::

    HumanEval    the head of a function to go on from, and a function `check` that asserts
    MBPP         a sentence, and asserts
    CodeTasks    anything else: the environment's own keys, or the tests of APPS, TACO,
                 LiveCodeBench and verl's copies of them, with the imports and comparison of each
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from laurel.data.sources import (
    Row,
    UnusableRow,
    is_list,
    json_kind,
    messages,
    required,
    text,
    unlike,
)
from laurel.data.task_formats import TaskParts
from laurel.extensions.code.settings import FORMS_OF_TESTS
from laurel.types import Message

_OWN_KEYS = (
    "entry",
    "test_setup",
    "code_prefix",
    "reference_solution",
    "test_weights",
    "strict_types",
    "float_tolerance",
    "comparison",
    "prelude",
)
# Keys that say how to compare where a benchmark's grader does not.
_COMPARED_AS_LAUREL = ("strict_types", "float_tolerance")
_QUESTIONS = ("prompt", "question", "question_content", "problem", "text", "input", "messages")
_MOST_UNPACKED = 1 << 28

_NAMES_OF_APPS = {
    "collections": "Counter, OrderedDict, deque, defaultdict, ChainMap",
    "functools": "lru_cache",
    "heapq": "*",
    "itertools": "accumulate, product, permutations, combinations",
    "math": "sqrt, sin, cos, tan, ceil, fabs, floor, gcd, exp, log, log2",
    "sys": "stdin, stdout",
    "typing": "List, Tuple",
}
_MODULES_OF_APPS = "collections, fractions, heapq, itertools, math, random, sys, time"
_MODULES_OF_LIVECODEBENCH = (
    "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, "
    "functools, operator, io, sys, json"
)
_OF_APPS = "\n".join(
    [f"import {_MODULES_OF_APPS}", *(f"from {m} import {n}" for m, n in _NAMES_OF_APPS.items())]
)
# All names first, Python's own over those (`pow`), and the modules last (`datetime`).
_OF_LIVECODEBENCH = "\n".join(
    [
        *(f"from {module} import *" for module in _MODULES_OF_LIVECODEBENCH.split(", ")),
        "from builtins import *",
        "from typing import *",
        f"import {_MODULES_OF_LIVECODEBENCH}",
    ]
)
PRELUDES: Mapping[str, str] = {
    "apps": _OF_APPS,
    "taco": _OF_APPS,
    "livecodebench": f"{_OF_LIVECODEBENCH}\nsys.setrecursionlimit(50_000)\n"
    "sys.set_int_max_str_digits(50_000)",
    "verl": f"{_OF_LIVECODEBENCH}\nsys.setrecursionlimit(600_000)",
}
"""The code that benchmark graders put before a program, by the name of the comparison."""


def humaneval(row: Row) -> TaskParts:
    """Read a row of HumanEval (Chen et al., 2021); its prompt is a Python function to complete."""
    prompt = text(required(row, "prompt"), what="'prompt'")
    entry = text(required(row, "entry_point"), what="'entry_point'")
    test = text(required(row, "test"), what="'test'")
    metadata = {
        "entry": entry,
        "code_prefix": prompt,
        "test_setup": prompt,  # some tests call what it defines
        "test_code": f"{test}\ncheck({entry})\n",
    }
    if row.get("canonical_solution") is not None:
        solution = text(row["canonical_solution"], what="'canonical_solution'")
        metadata["reference_solution"] = solution
    return TaskParts(prompt=(Message("user", prompt),), metadata=metadata | _id_of(row))


def mbpp(row: Row) -> TaskParts:
    """Read a row of MBPP (Austin et al., 2021), or of its sanitized version.

    As in the paper, the prompt shows the first assert, because that names the function. The
    `challenge_test_list` is not used.
    """
    key = "text" if row.get("text") is not None else "prompt"
    asked = text(required(row, key), what=f"'{key}'")
    tests = _texts(_parsed(required(row, "test_list"), "'test_list'"), "'test_list'")
    if not tests:
        raise UnusableRow("no tests", "'test_list' is empty")
    setup = [text(row.get("test_setup_code") or "", what="'test_setup_code'")]
    imports = row.get("test_imports")
    setup += [] if imports is None else _texts(_parsed(imports, "'test_imports'"), "'test_imports'")
    code = text(row.get("code") or "", what="'code'")
    # The one that the asserts call and the solution defines; without a solution, the first called
    # one that is not a builtin.
    called = [name for test in tests for name in _called_in(_tree(test, "'test_list'"))]
    defined = _defined_in(_tree(code, "'code'")) if code else set()
    unknown = [name for name in called if not hasattr(builtins, name)]
    found = next((name for name in called if name in defined), None) or next(iter(unknown), None)
    if found is None:
        raise UnusableRow("no function", "the asserts of 'test_list' call no function")
    metadata: dict[str, Any] = {
        "entry": found,
        "test_setup": "\n".join(part for part in setup if part),
        "test_list": tests,
    }
    if code:
        metadata["reference_solution"] = code.replace("\r\n", "\n")
    prompt = f"{asked.strip()}\nYour code should pass this test:\n{tests[0]}"
    return TaskParts(prompt=(Message("user", prompt),), metadata=metadata | _id_of(row))


def code_task(row: Row) -> TaskParts:
    """Read a row with tests, whose form is recognized by its columns.

    `test_code`, `test_list`, `stdio_tests` and `call_tests` are Laurel's own, as values or as JSON.
    `input_output` is the form of APPS and TACO, `public_test_cases` and `private_test_cases` are
    LiveCodeBench's, and `reward_model.ground_truth` that of verl's code sets. Outputs are compared
    as the graders of those sets do, unless the row names another `comparison` or its own
    strictness. A row without tests is a task with code as a tool. If no `entry` names the function
    that a `test_list` tests, it is the one that all asserts call.
    """
    key = next((key for key in _QUESTIONS if row.get(key) is not None), _QUESTIONS[0])
    prompt = messages(required(row, key), role="user", what=f"'{key}'")
    if prompt and prompt[-1].role == "assistant":
        prompt = prompt[:-1]  # a demonstration; here it is only asked
    starter = row.get("starter_code")
    if isinstance(starter, str) and starter.strip() and prompt:
        begin = f"{prompt[-1].content}\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"
        prompt = (*prompt[:-1], Message(prompt[-1].role, begin))
    metadata = {key: row[key] for key in _OWN_KEYS if row.get(key) is not None}
    for form in FORMS_OF_TESTS:
        if row.get(form) is not None:
            is_code = form == "test_code"
            metadata[form] = row[form] if is_code else _parsed(row[form], f"'{form}'")
    if not any(form in metadata for form in FORMS_OF_TESTS):
        foreign = _foreign_tests(row)
        if any(key in metadata for key in _COMPARED_AS_LAUREL) and "comparison" in foreign:
            foreign["comparison"] = "laurel"
        metadata = foreign | metadata
    if "entry" not in metadata and (entry := _function_of_all(metadata)):
        metadata["entry"] = entry
    return TaskParts(prompt=prompt, metadata=metadata | _id_of(row))


def _foreign_tests(row: Row) -> dict[str, Any]:
    judge = row.get("reward_model")
    if isinstance(judge, Mapping) and judge.get("ground_truth") is not None:
        truth = judge["ground_truth"]
        return _as_in("verl", _inputs_outputs(truth, "'reward_model.ground_truth'", is_verl=True))
    if row.get("input_output") is not None and row["input_output"] != "":
        tests = _inputs_outputs(row["input_output"], "'input_output'")
        # APPS and TACO have a list of programs.
        solutions = _parsed(row["solutions"], "'solutions'") if row.get("solutions") else None
        first = next(iter(solutions), None) if isinstance(solutions, Sequence) else None
        if isinstance(first, str) and first.strip():
            tests["reference_solution"] = first
        return _as_in("taco" if any(key in row for key in _ONLY_IN_TACO) else "apps", tests)
    if row.get("public_test_cases") is not None:
        return _as_in("livecodebench", _test_cases(row))
    return {}


_ONLY_IN_TACO = ("raw_tags", "skill_types", "Expected Time Complexity")


def _as_in(benchmark: str, tests: dict[str, Any]) -> dict[str, Any]:
    # The benchmark's own grader puts the prelude before a program, and compares in this way.
    return tests | {"comparison": benchmark, "prelude": PRELUDES[benchmark]}


def _inputs_outputs(value: Any, what: str, *, is_verl: bool = False) -> dict[str, Any]:
    """Read the tests of APPS: inputs and outputs, or arguments and values if there is an `fn_name`.

    verl's rows hold these as text: one JSON argument per line, and the value as JSON.
    """
    tests = _parsed(value, what)
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= tests.keys():
        raise UnusableRow(
            f"{what} holds no tests", f"{what} is {json_kind(tests)} without 'inputs' and 'outputs'"
        )
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise UnusableRow(
            f"{what} holds no tests", f"{what} has {len(inputs)} inputs and {len(outputs)} outputs"
        )
    name = tests.get("fn_name")
    if not name:
        pairs = zip(inputs, outputs, strict=True)
        return {"stdio_tests": [{"stdin": _lines(a), "stdout": _lines(b)} for a, b in pairs]}
    if is_verl:
        inputs = [_json_lines(one) if isinstance(one, str) else one for one in inputs]
        outputs = [_parsed(one, "an output") for one in outputs]
    calls = []
    for one, value in zip(inputs, outputs, strict=True):
        args = one if isinstance(one, list) else [one]
        calls.append({"args": _with_whole_keys(args), "expected": _with_whole_keys(value)})
    return _called(name, calls)


def _json_lines(text: str) -> list[Any]:
    return [_parsed(line, "an input") for line in text.split("\n") if line.strip()]


def _with_whole_keys(value: Any) -> Any:
    """Return a dictionary, or a list that begins with one, with its whole-number keys as numbers.

    JSON turns such keys into text. These data sets wrap a value that was a dictionary in a list.
    """
    if isinstance(value, dict):
        changed = _whole_keys(value)
        return value if changed is None else [changed]
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return value
    items = [_whole_keys(one) if isinstance(one, dict) else None for one in value]
    if items[0] is None:
        return value
    return [one if new is None else new for one, new in zip(value, items, strict=True)]


def _whole_keys(value: dict[str, Any]) -> dict[int, Any] | None:
    try:
        return {int(key): one for key, one in value.items()}
    except ValueError:
        return None


def _test_cases(row: Row) -> dict[str, Any]:
    """Read the public and private test cases of LiveCodeBench, for stdin or for a function."""
    cases = list(_parsed(row["public_test_cases"], "'public_test_cases'"))
    if row.get("private_test_cases"):
        cases += _parsed(row["private_test_cases"], "'private_test_cases'", may_be_packed=True)
    if not cases or not all(
        isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in cases
    ):
        raise UnusableRow("no test cases", "the test cases are not objects of 'input' and 'output'")
    said = _parsed(row.get("metadata") or "{}", "'metadata'")
    name = said.get("func_name") if isinstance(said, Mapping) else None
    if not name:
        return {
            "stdio_tests": [
                {"stdin": _lines(one["input"]), "stdout": _lines(one["output"])} for one in cases
            ]
        }
    calls = [
        {
            "args": _json_lines(str(one["input"])),
            "expected": _parsed(one["output"], "'output'"),
        }
        for one in cases
    ]
    return _called(name, calls)


def _called(name: Any, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return tests of a function, or of a method of `Solution`, whichever the program defines.

    Types are not compared strictly, because JSON has no tuples and sometimes writes 1 as 1.0.
    """
    name = text(name, what="the name of the function")
    return {"call_tests": calls, "entry": name, "strict_types": False, "float_tolerance": 1e-6}


def _lines(value: Any) -> str:
    # Input and output are a text, or a list of its lines.
    if isinstance(value, list):
        return "\n".join(str(line) for line in value) + "\n"
    return text(value, what="an input or output")


_TEXTS = frozenset({"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_AROUND_TEXT = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


def _text_in_pickle(data: bytes) -> str:
    """Return the text that a pickle holds without unpickling; refuse a pickle of anything else."""
    # To unpickle would run what the pickle says.
    steps = [(step.name, argument) for step, argument, _ in pickletools.genops(data)]
    texts = [argument for name, argument in steps if name in _TEXTS]
    if len(texts) != 1 or not {name for name, _ in steps} <= _TEXTS | _AROUND_TEXT:
        raise ValueError("not the pickle of a text")
    return str(texts[0])


def _unpacked(packed: str, what: str) -> Any:
    """Unpack a long case of LiveCodeBench: base64 of a zlib stream of a pickled JSON text."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(packed, validate=True), _MOST_UNPACKED)
        return json.loads(_text_in_pickle(data))
    except Exception as problem:  # a pickle that is none may raise anything
        raise UnusableRow(
            f"{what} cannot be read",
            f"{what} is neither JSON nor packed JSON: {type(problem).__name__}",
        ) from problem


def _parsed(value: Any, what: str, *, may_be_packed: bool = False) -> Any:
    """Return the value of a JSON text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        if may_be_packed:
            return _unpacked(value, what)
        raise UnusableRow(f"{what} is no JSON", f"{what} is no JSON: {problem}") from problem


def _texts(value: Any, what: str) -> list[str]:
    if not is_list(value):
        raise unlike(value, "a list", what=what)
    return [text(one, what=f"an item of {what}") for one in value]


def _function_of_all(metadata: Mapping[str, Any]) -> str | None:
    """Find the one function that every assert of a `test_list` calls; None if that is ambiguous.

    Builtins and functions that the task defines are skipped. Nothing is rejected here: the
    environment reports a missing function and every other fault of the list.
    """
    tests = metadata.get("test_list")
    setup, solution = (metadata.get(key) or "" for key in ("test_setup", "reference_solution"))
    if not isinstance(tests, list) or not all(isinstance(one, str) for one in (*tests, setup)):
        return None
    try:
        own = _defined_in(_tree(setup, "'test_setup'"))
        called = [_called_in(_tree(one, "'test_list'")) for one in tests]
        solved = _defined_in(_tree(str(solution), "'reference_solution'"))
    except UnusableRow:
        return None
    in_all = {
        name
        for name in (called[0] if called else ())
        if all(name in names for names in called)
        and not hasattr(builtins, name)
        and name not in own
    }
    in_all = (in_all & solved) or in_all
    return next(iter(in_all)) if len(in_all) == 1 else None


def _called_in(tree: ast.Module) -> list[str]:
    return [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


def _defined_in(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        (name.asname or name.name)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }


def _tree(code: str, what: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes, which is no business of ours
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise UnusableRow(f"{what} is no Python", f"{what} is no Python: {problem}") from problem


def _id_of(row: Row) -> dict[str, Any]:
    for key in ("task_id", "question_id", "problem_id"):
        if isinstance(row.get(key), str | int):
            return {"task_id": row[key]}
    return {}
