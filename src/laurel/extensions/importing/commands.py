"""Parses the command lines of training programs as a shell would, without running anything."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laurel.config.yaml_tree import plain_values, read_text
from laurel.errors import ConfigError

_TRL = r"(?:trl[./]scripts[./])(?P<run>\w+?)(?:\.py)?$"
_PROGRAMS: tuple[tuple[str, str, str], ...] = (
    ("trl", r"^(?:\S*/)?" + _TRL, "flags"),
    ("openrlhf", r"^(?:\S*/)?openrlhf[./]cli[./](?:train_)?(?P<run>\w+?)(?:\.py)?$", "flags"),
    ("verl", r"^(?:\S*[./])?main_(?P<run>ppo|dapo)\w*?(?:\.py)?$", "overrides"),
    ("verl", r"^\S*trainer[./](?P<run>(?:fsdp_)?sft_trainer(?:_ray)?)(?:\.py)?$", "overrides"),
)
_IN_PROGRAMS = ("trl", "openrlhf", "main_ppo", "main_dapo", "sft_trainer")
_RUNS: Mapping[tuple[str, str], str] = {
    ("trl", "reward"): "rm",
    ("trl", "grpo"): "grpo",
    ("trl", "sft"): "sft",
    ("openrlhf", "rm"): "rm",
    ("openrlhf", "ppo_ray"): "grpo",
    ("openrlhf", "sft"): "sft",
    ("verl", "ppo"): "grpo",
    ("verl", "dapo"): "grpo",
    ("verl", "sft_trainer"): "sft",
    ("verl", "sft_trainer_ray"): "sft",
}
"""Maps a (system, program) to the kind of run that it is."""

PROGRAMS = (
    "trl reward|grpo|sft, openrlhf.cli.train_rm|train_ppo_ray|train_sft, "
    "verl.trainer.main_ppo|sft_trainer"
)
"""The training programs that can be imported, as text for messages."""

LAUNCHER_FILE = "accelerate launch --config_file"
"""The key under which accelerate's configuration file is kept, apart from the program's keys."""
_TRL_EXAMPLE = re.compile(r"examples/scripts/(reward_modeling|sft|grpo)\.py\b")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_TRAINERS = {"RewardTrainer": "reward", "GRPOTrainer": "grpo", "SFTTrainer": "sft"}
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_LARGEST_POWER = 64
_NUM_DEVICES = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus")
_ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)\+?=\((.*?)\)[ \t]*(?:#.*)?$", re.DOTALL | re.MULTILINE)
_ENDS = {";", "&&", "||", "|", "&", ">", ">>", "2>&1", "<", "EOF"}
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")
_FROM_OUTSIDE = ("HOME", "USER", "PWD")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A training program found in a script or command line, with its parsed arguments."""

    system: str
    run: str
    program: str
    values: Mapping[str, Any]
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """The keys whose values contain shell variables that the script does not set."""
    devices: int | None = None
    """The number of processes that the launcher starts; None if it is not given."""


def find_command(text: str, name: str) -> CommandLine | None:
    """Find and parse the first training program in a script or command line; None without one.

    Raises:
        ConfigError: Quotes do not close, a flag is given twice with different values, or a known
            system's program has no counterpart in Laurel.
    """
    joined = re.sub(r"\\\n", " ", text)
    variables = {key: os.environ[key] for key in _FROM_OUTSIDE if key in os.environ}
    arrays: dict[str, str] = {}
    for found in _ARRAY.finditer(joined):
        arrays[found[1]] = found[2]
    if (problem := _python_problem(text, name)) is not None:
        raise problem
    scripts = [one for line in joined.splitlines() if (one := _TRL_EXAMPLE.search(line))]
    for line in _ARRAY.sub("", joined).splitlines():
        assigned = _ASSIGNMENT.match(line)
        is_start = any(part in line for part in _IN_PROGRAMS)
        words = _words(line, name) if is_start else []
        if assigned and len(_words(assigned[2], name, strict=False)) <= 1:
            value = _words(_filled(assigned[2], variables), name, strict=False)
            variables[assigned[1]] = value[0] if value else ""
            if re.search(rf"\$\{{?{assigned[1]}\b", variables[assigned[1]]):
                # PATH=/x:$PATH of a PATH that the text does not set: filling it would never end.
                del variables[assigned[1]]
            continue
        place = _program_at(words)
        if place is not None:
            at, system, run, style = place
            arguments = list(_expanded(words[at + 1 :], arrays, variables, name))
            return _command(words[:at], words[at], system, run, style, arguments)
    if scripts:
        run = "reward" if scripts[0][1] == "reward_modeling" else scripts[0][1]
        raise ConfigError(
            f"{name}: {scripts[0][0]} is an example of TRL's, which may do more than its flags "
            f"say; write `trl {run}` instead of it and what starts it"
        )
    return None


def _python_problem(text: str, name: str) -> ConfigError | None:
    """Explain why a Python program that uses TRL cannot be read; None if the text is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    names = [
        one.name
        for node in ast.walk(tree)
        for one in (node.names if isinstance(node, ast.Import) else ())
    ]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {name.partition(".")[0] for name in names}
    if not imported & {"trl", "openrlhf", "verl"}:
        return None
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    run = next((ours for its, ours in _TRAINERS.items() if its in used), "reward|grpo|sft")
    return ConfigError(
        f"{name}: a Python program, which is not executed to find out what it sets; give a file "
        f"with the command line that says the same, such as `trl {run} --model_name_or_path MODEL "
        "--dataset_name DATA --learning_rate 1e-6`, or a YAML file of those keys; a function that "
        "rewards is then given to the run as env.reward_model.function.path=FILE.py:NAME"
        if "trl" in imported
        else f"{name}: a Python program, which is not executed to find out what it sets; give the "
        f"command line that starts the training instead ({PROGRAMS})"
    )


def _words(line: str, name: str, *, strict: bool = True) -> list[str]:
    try:
        whole = _ARITHMETIC.sub(lambda found: re.sub(r"\s+", "", found[0]), line)
        return shlex.split(whole, comments=True)
    except ValueError as error:
        if not strict:
            return [line]
        raise ConfigError(f"{name}: not a command line: {error} in {line.strip()[:60]!r}") from None


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables:
            return variables[name]
        return found[0] if found[2] is None else found[2]

    before = None
    while before != text:
        before, text = text, _VARIABLE.sub(value, text)
        text = _ARITHMETIC.sub(lambda found: _calculated(found, variables), text)
    return text


def _calculated(found: re.Match[str], variables: Mapping[str, str]) -> str:
    """Compute the value of `$((...))`; return the text itself if that is impossible."""
    # Variables need no dollar there.
    inner = re.sub(
        r"\b[A-Za-z_]\w*",
        lambda one: f"({variables[one[0]]})" if one[0] in variables else one[0],
        found[1],
    )
    try:
        return str(_whole(ast.parse(inner.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return found[0]


def _whole(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(operand=ast.BinOp(op=ast.Pow())):
            raise ValueError("a shell takes the sign before the power, Python after it")
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_whole(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_whole(left), _whole(right))
    raise ValueError("neither a whole number nor a calculation with them")


def _power(a: int, b: int) -> int:
    if not 0 <= b <= _LARGEST_POWER:
        raise ValueError("no power that a setting has")
    return int(a**b)


_SIGNS: Mapping[type[ast.unaryop], Callable[[int], int]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A shell cuts a quotient towards zero, and a rest has the sign of what is divided.
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Pow: _power,
}


def _expanded(
    words: Sequence[str], arrays: Mapping[str, str], variables: Mapping[str, str], name: str
) -> Iterator[str]:
    for word in words:
        if word in _ENDS:
            return
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
        if array and array[1] in arrays:
            inner = " ".join(
                shlex.join(_words(line, name)) for line in arrays[array[1]].splitlines()
            )
            yield from (_filled(one, variables) for one in _words(inner, name))
        else:
            yield _filled(word, variables)


def _program_at(words: Sequence[str]) -> tuple[int, str, str, str] | None:
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "trl" and at + 1 < len(words):
            return at + 1, "trl", words[at + 1], "flags"
        for system, pattern, style in _PROGRAMS:
            found = re.match(pattern, word)
            if found:
                return at, system, found["run"], style
    return None


def _command(
    launcher: Sequence[str],
    program: str,
    system: str,
    run: str,
    style: str,
    arguments: Sequence[str],
) -> CommandLine:
    ours = _RUNS.get((system, run))
    if ours is None:
        raise ConfigError(f"{program} is another program of {system}; those imported: {PROGRAMS}")
    values = _flags(arguments) if style == "flags" else _overrides(arguments)
    of_launcher: dict[str, str] = {}
    for flag, following in zip(launcher, [*launcher, ""][1:], strict=True):
        name, has_value, inline = flag.partition("=")
        of_launcher.setdefault(name, inline if has_value else following)
    if "--config_file" in of_launcher:  # what accelerate reads, under a key that no program has
        values[LAUNCHER_FILE] = of_launcher["--config_file"]
    number = next((value for name, value in of_launcher.items() if name in _NUM_DEVICES), "")
    # verl's own references to other keys have braces.
    variable = re.compile(r"\$\w" if system == "verl" else r"\$\{?\w")
    unresolved = {
        key: value
        for key, value in values.items()
        if isinstance(value, str) and variable.search(value)
    }
    return CommandLine(
        system=system,
        run=ours,
        program=program,
        devices=int(number) if number.isdigit() else None,
        values={k: v for k, v in values.items() if k not in unresolved},
        unresolved=unresolved,
    )


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Parse `--key value`, `--key=value`, `--key a b` (a list) and `--key` (true)."""
    values: dict[str, Any] = {}
    key: str | None = None
    given: list[Any] = []

    def settle() -> None:
        if key is not None:
            value = True if not given else given[0] if len(given) == 1 else list(given)
            _set(values, key, value, f"--{key}")

    for word in words:
        if word.startswith("--") and len(word) > 2 and not _NUMBER.match(word):
            settle()
            key, has_value, value = word[2:].partition("=")
            given = [scalar(value)] if has_value else []
        elif key is None:
            _set(values, word if word == "$@" else f"'{word}'", word, word)
        elif word == "$@":
            _set(values, word, word, word)
        else:
            given.append(scalar(word))
    settle()
    return values


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Parse Hydra's `a.b=c`, `+a.b=c` and `++a.b=c`; Hydra's own options keep their dashes."""
    values: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        key, has_value, value = word.partition("=")
        if waiting is not None and not has_value:
            values[waiting], waiting = word, None
            continue
        if word.startswith("--"):
            waiting = None if has_value else key
            values[key] = value if has_value else True
        elif has_value:
            _set(values, key.lstrip("+"), scalar(value, lists=True), word)
        elif word.startswith("~"):
            values[word] = "deleted"
        else:
            values[word if word == "$@" else f"'{word}'"] = word
    return values


def _set(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    if key in values and values[key] != value:
        raise ConfigError(f"{where} is given twice, as {values[key]!r} and {value!r}; keep one")
    values[key] = value


def scalar(text: str, *, lists: bool = False) -> Any:
    """Convert a word of a command line to the number, boolean, null or text that it spells.

    With `lists`, a word in brackets becomes a list.
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if _NUMBER.match(text):
        digits = text.replace("_", "")
        return float(digits) if re.search(r"[.eE]", digits) else int(digits)
    if lists and text[:1] in ("[", "{"):
        try:
            return plain_values(read_text(text, "an override"))
        except ConfigError:
            return text
    return text
