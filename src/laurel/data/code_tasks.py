"""Rows that ask for a program, and the tests that they bring, as the code environment reads them.

HumanEval    the head of a function to go on from, and a function `check` that asserts
MBPP         a sentence, and asserts
CodeTasks    anything else: the environment's own keys, or the tests of APPS, TACO, LiveCodeBench
             and verl's copies of them, with the imports and the comparison of each
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laurel.data.cells import Row, UnusableRow, kind_of, messages, required, text
from laurel.types import Conversation, Message

OWN_TESTS = ("test_code", "test_list", "stdio_tests", "call_tests")
"""Keys of metadata that hold tests."""
_OWN_KEYS = (
    "entry", "test_setup", "code_prefix", "reference_solution", "test_weights", "strict_types",
    "float_tolerance", "comparison", "prelude",
)  # fmt: skip
_COMPARED_AS_LAUREL = ("strict_types", "float_tolerance")
"""Keys that say how to compare where a benchmark's grader does not."""
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
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
_OF_APPS = "\n".join(
    [f"import {_MODULES_OF_APPS}", *(f"from {m} import {n}" for m, n in _NAMES_OF_APPS.items())]
)
# All names first, Python's own over those (`pow`), and the modules last (`datetime`).
_OF_LIVECODEBENCH = "\n".join(
    [
        *(f"from {module} import *" for module in (*_MODULES_OF_LIVECODEBENCH, "builtins")),
        "from typing import *",
        f"import {', '.join(_MODULES_OF_LIVECODEBENCH)}",
    ]
)
PRELUDES: Mapping[str, str] = {
    "apps": _OF_APPS,
    "taco": _OF_APPS,
    "livecodebench": f"{_OF_LIVECODEBENCH}\nsys.setrecursionlimit(50_000)\n"
    "sys.set_int_max_str_digits(50_000)",
    "verl": f"{_OF_LIVECODEBENCH}\nsys.setrecursionlimit(600_000)",
}
"""What the graders of benchmarks give a program to begin with, by the name of the comparison."""


@dataclass(frozen=True, slots=True)
class CodeTask:
    """What a row asks, and what its environment is given."""

    prompt: Conversation
    metadata: Mapping[str, Any]


def humaneval(row: Row) -> CodeTask:
    """A row of HumanEval (Chen et al., 2021): the prompt is Python that breaks off."""
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
    return CodeTask((Message("user", prompt),), metadata | _id_of(row))


def mbpp(row: Row) -> CodeTask:
    """A row of MBPP (Austin et al., 2021), or of its sanitized half.

    The first assert is shown, as that paper does: else nobody could know what the function is to be
    called. The `challenge_test_list` is left out, as others do.
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
    metadata: dict[str, Any] = {
        "entry": _function_in(tests, code),
        "test_setup": "\n".join(part for part in setup if part),
        "test_list": tests,
    }
    if code:
        metadata["reference_solution"] = code.replace("\r\n", "\n")
    prompt = f"{asked.strip()}\nYour code should pass this test:\n{tests[0]}"
    return CodeTask((Message("user", prompt),), metadata | _id_of(row))


def code_task(row: Row) -> CodeTask:
    """A row with tests in a form that is told from its keys.

    `test_code`, `test_list`, `stdio_tests` or `call_tests` are taken as they are, or as JSON;
    `input_output` is that of APPS and TACO, `public_test_cases` and `private_test_cases` those of
    LiveCodeBench, and `reward_model.ground_truth` that of verl's code sets: these are compared as
    the graders of those sets do, unless the row names another `comparison`, or says itself how
    strict to be. A row without tests is a task whose tool is code. Where no `entry` names the
    function that a `test_list` is about, it is the one that all asserts call.
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
    for form in OWN_TESTS:
        if row.get(form) is not None:
            is_code = form == "test_code"
            metadata[form] = row[form] if is_code else _parsed(row[form], f"'{form}'")
    if not any(form in metadata for form in OWN_TESTS):
        foreign = _foreign_tests(row)
        if any(key in metadata for key in _COMPARED_AS_LAUREL) and "comparison" in foreign:
            foreign["comparison"] = "laurel"
        metadata = foreign | metadata
    if "entry" not in metadata and (entry := _function_of_all(metadata)):
        metadata["entry"] = entry
    return CodeTask(prompt, metadata | _id_of(row))


FORMS: Mapping[str, tuple[Callable[[Row], CodeTask], str]] = {
    "HumanEval": (humaneval, "openai/openai_humaneval"),
    "MBPP": (mbpp, "google-research-datasets/mbpp"),
    "CodeTasks": (code_task, ""),
}
"""Name -> how its rows are read, and where the hub has it."""


# ---------------------------------------------------------------------------------- other systems


def _foreign_tests(row: Row) -> dict[str, Any]:
    judge = row.get("reward_model")
    if isinstance(judge, Mapping) and judge.get("ground_truth") is not None:
        truth = judge["ground_truth"]
        return _as_in("verl", _inputs_outputs(truth, "'reward_model.ground_truth'", is_verl=True))
    if row.get("input_output") is not None and row["input_output"] != "":
        tests = _inputs_outputs(row["input_output"], "'input_output'") | _first_solution(row)
        return _as_in("taco" if any(key in row for key in _ONLY_IN_TACO) else "apps", tests)
    if row.get("public_test_cases") is not None:
        return _as_in("livecodebench", _test_cases(row))
    return {}


_ONLY_IN_TACO = ("raw_tags", "skill_types", "Expected Time Complexity")


def _as_in(benchmark: str, tests: dict[str, Any]) -> dict[str, Any]:
    """Tests that are given and judged as a benchmark's own grader does it."""
    return tests | {"comparison": benchmark, "prelude": PRELUDES[benchmark]}


def _first_solution(row: Row) -> dict[str, Any]:
    """The first of the `solutions` of APPS and TACO, a list of programs, as the reference."""
    if not row.get("solutions"):
        return {}
    solutions = _parsed(row["solutions"], "'solutions'")
    first = next(iter(solutions), None) if isinstance(solutions, Sequence) else None
    return {"reference_solution": first} if isinstance(first, str) and first.strip() else {}


def _inputs_outputs(value: Any, what: str, *, is_verl: bool = False) -> dict[str, Any]:
    """APPS: lists of inputs and outputs; with `fn_name` they are arguments and values.

    In verl's rows those are text: an argument in JSON on each line, and the value in JSON.
    """
    tests = _parsed(value, what)
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= tests.keys():
        raise UnusableRow(
            f"{what} holds no tests", f"{what} is {kind_of(tests)} without 'inputs' and 'outputs'"
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
    """A dictionary, or a list that begins with one, with numbers for keys where all keys are such.

    JSON has made texts of them. A value that was a dictionary comes in a list of its own then, as
    others do in these sets.
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
    """LiveCodeBench: public and private cases, of stdin or of a function."""
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
    """Tests of a function, or of a method of `Solution`: the program shows which of them it has.

    Where they are compared as `laurel`: JSON has no tuples, and writes 1.0 for a 1 now and then.
    """
    name = text(name, what="the name of the function")
    return {"call_tests": calls, "entry": name, "strict_types": False, "float_tolerance": 1e-6}


def _lines(value: Any) -> str:
    """What a program reads or prints: a text, or its lines."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in value) + "\n"
    return text(value, what="an input or output")


_TEXTS = frozenset({"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_AROUND_TEXT = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


def _text_in_pickle(data: bytes) -> str:
    """The text that a pickle is; nothing is unpickled, and a pickle of anything else is refused."""
    steps = [(step.name, argument) for step, argument, _ in pickletools.genops(data)]
    texts = [argument for name, argument in steps if name in _TEXTS]
    if len(texts) != 1 or not {name for name, _ in steps} <= _TEXTS | _AROUND_TEXT:
        raise ValueError("not the pickle of a text")
    return str(texts[0])


def _unpacked(packed: str, what: str) -> Any:
    """LiveCodeBench packs long cases: base64 of a zlib stream of a pickled text, which is JSON."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(packed, validate=True), _MOST_UNPACKED)
        return json.loads(_text_in_pickle(data))
    except Exception as problem:  # a pickle that is none may raise anything
        raise UnusableRow(
            f"{what} cannot be read",
            f"{what} is neither JSON nor packed JSON: {type(problem).__name__}",
        ) from problem


# ----------------------------------------------------------------------------------------- values


def _parsed(value: Any, what: str, *, may_be_packed: bool = False) -> Any:
    """The value of a JSON text; what is no text is taken as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        if may_be_packed:
            return _unpacked(value, what)
        raise UnusableRow(f"{what} is no JSON", f"{what} is no JSON: {problem}") from problem


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UnusableRow(f"{what} is no list", f"{what} is {kind_of(value)}, not a list")
    return [text(one, what=f"an item of {what}") for one in value]


def _function_in(tests: Sequence[str], code: str) -> str:
    """The function that asserts are about: one that they call and the solution defines.

    Without a solution, the first that is not Python's own.
    """
    called = [name for test in tests for name in _called_in(_tree(test, "'test_list'"))]
    defined = _defined_in(_tree(code, "'code'")) if code else set()
    unknown = [name for name in called if not hasattr(builtins, name)]
    found = next((name for name in called if name in defined), None) or next(iter(unknown), None)
    if found is None:
        raise UnusableRow("no function", "the asserts of 'test_list' call no function")
    return found


def _function_of_all(metadata: Mapping[str, Any]) -> str | None:
    """The one function that every assert of a `test_list` calls; None where that is not clear.

    Python's own and those that the task itself defines are not meant. Nothing is refused here: the
    environment says what it needs, and lists with other faults are its to tell as well.
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
        and not hasattr(builtins, name) and name not in own
    }  # fmt: skip
    in_all = (in_all & solved) or in_all
    return next(iter(in_all)) if len(in_all) == 1 else None


def _called_in(tree: ast.Module) -> list[str]:
    """The plain names that are called."""
    return [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


def _defined_in(tree: ast.Module) -> set[str]:
    """Functions and classes, at the top."""
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
