"""Finds the training program that a script starts, by running it in the sandbox."""

from __future__ import annotations

import ast
import os
import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path

from laurel.errors import ConfigError
from laurel.extensions.importing.commands import (
    IN_PROGRAMS,
    PROGRAMS,
    CommandLine,
    first_program,
    program_at,
    readable,
)
from laurel.extensions.importing.shell import run_script
from laurel.sandbox.inside_process import SandboxStartError

_TRAINERS = {"RewardTrainer": "reward", "GRPOTrainer": "grpo", "SFTTrainer": "sft"}
_FROM_OUTSIDE = ("HOME", "USER", "PWD")
_YAML = re.compile(r"([ \t]*(#.*)?\n)*[ \t]*(---|\{|[\w.-]+\s*:(\s|$))")
_CONTINUED = re.compile(r"\\\n")
# Words without expansions, redirections and lists of commands.
_PLAIN = re.compile(r"""([\w@%+=:,./\[\]-]|\\.|'[^']*'|"([^"$`\\!]|\\["\\])*"|[ \t])*""")
# What stands for a value that is not known. No sum can be made of it, and no number be read.
_UNSET, _ARGUMENT = "@laurel:unset:{}@", "@laurel:argument:{}@"
_LONE = re.compile(r"@laurel:(unset|argument):[^@]*@")
_NAMED = r"\$\{?([A-Za-z_]\w*)"
_SET_OR_OPTIONAL = (
    r"(?:^|[\s;(])([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=",
    r"\$\{[#!]?([A-Za-z_]\w*)(?::?[-=+?]|\[)",
    r"\s-[znv]\s+\"?\$?\{?([A-Za-z_]\w*)",
)
_SECRET = re.compile(r"(token|key|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_OF_THE_SHELL = re.compile(
    "(BASH.*|EPOCH.*|S?RANDOM|SECONDS|LINENO|HOST(NAME|TYPE)|OSTYPE|MACHTYPE|E?UID|PPID|OLDPWD|"
    "SHLVL|IFS|OPT(ARG|IND|ERR)|PS[0-9]|PATH|LD_.*|PYTHON.*|FUNCNAME|PIPESTATUS|REPLY|DIRSTACK|"
    "GROUPS|TMPDIR|_)$"
)
_PLAIN_ARGUMENT = re.compile(r"\$\{?([1-9])\b(?!:?[-=+?])")
_OPTIONAL_ARGUMENT = re.compile(r"\$\{([1-9]):?[-=+?]")
_GUESSED = re.compile(
    r"(syntax error|expression expected).*\((no value|the output) of |"
    r"\((no value|the output) of .*(syntax error|expression expected)"
)
_IS_THERE = re.compile(r"python\S* -c 'import ")


def find_command(text: str, name: str, path: Path | None) -> CommandLine | None:
    """Find and parse the first training program in a script or command line; None without one.

    A text that is more than one plain command is run by bash in the sandbox, where it starts
    nothing.

    Raises:
        ConfigError: The text cannot be run, a flag is given twice with different values, or a known
            system's program has no counterpart in Laurel.
    """
    if (problem := _python_problem(text, name)) is not None:
        raise problem
    is_script = text.startswith("#!") or (path is not None and path.suffix == ".sh")
    if _YAML.match(text) or not (is_script or any(part in text for part in IN_PROGRAMS)):
        return None
    if (words := _plain_command(text)) is not None:
        return first_program([words], name)
    return _run(text, name, path)


def _plain_command(text: str) -> list[str] | None:
    """Return the words of a text that is one command for any shell; None if it is not."""
    lines = [line for line in _CONTINUED.sub(" ", text).splitlines() if line.strip()]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    return shlex.split(lines[0]) if len(lines) == 1 and _PLAIN.fullmatch(lines[0]) else None


def _run(text: str, name: str, path: Path | None) -> CommandLine | None:
    environment = _environment(text)
    optional = [int(number) - 1 for number in _OPTIONAL_ARGUMENT.findall(text)]
    num_arguments = min([max(map(int, _PLAIN_ARGUMENT.findall(text)), default=0), *optional])
    try:
        run = run_script(
            text if path is None else path.expanduser(),
            [_ARGUMENT.format(number) for number in range(1, num_arguments + 1)],
            environment={key: value for key, value in environment.items() if value is not None}
            | {key: _UNSET.format(key) for key, value in environment.items() if value is None},
            readable=[] if path is None else [_checkout_of(path.expanduser().resolve())],
        )
    except SandboxStartError as error:
        raise ConfigError(
            f"{name}: a script is run in a sandbox to see what it starts, and none holds here "
            f"({error}): write `printf '%q '` before the training program, run the script "
            "yourself, and give a file with the line that it prints"
        ) from None
    # A word that is nothing but an argument or a variable which nobody gave is nothing.
    calls = [[word for word in call.words if not _LONE.fullmatch(word)] for call in run.calls]
    command = first_program(calls, name)
    complaints = [readable(line).removeprefix(f"{path}: ") for line in run.complaints]
    guessed = [line for line in complaints if _GUESSED.search(line)]
    if guessed or (command is None and any(part in text for part in IN_PROGRAMS)):
        how = "takes too long" if run.exit_code is None else f"ends with {run.exit_code}"
        why = (
            f"decides by what is not known here: {guessed[0]}"
            if guessed
            else f"starts no training program that is known ({PROGRAMS}): run in a sandbox where "
            "files are read-only and no other program is started, it "
            + "; ".join([how, *complaints[-3:]])
        )
        raise ConfigError(
            f"{name} {why}. Set the variables that it needs before the command (NAME=value laurel "
            "config import ...), or give the line that starts the training"
        )
    if command is None:
        return None
    unresolved = dict(command.unresolved)
    for call in run.calls:
        if call.is_captured and program_at(call.words) is None:
            line = shlex.join(call.words)
            if _IS_THERE.match(line):
                command.assumed.append(f"`{line}` was taken to fail")
            else:
                unresolved[readable(line)] = (
                    "the script reads its output, and no program is started here: check what "
                    "depends on it"
                )
    command.assumed.extend(
        f"{key} is of the environment"
        for key, value in environment.items()
        if value is not None and key not in _FROM_OUTSIDE
    )
    return replace(command, unresolved=unresolved)


def _environment(text: str) -> dict[str, str | None]:
    """Return the variables for a script that it names and does not set.

    None stands for one that has no value, and for which the script has no other. Nothing else of
    the environment is given to it, nor what looks like a secret.
    """
    variables: dict[str, str | None] = {
        key: os.environ[key] for key in _FROM_OUTSIDE if key in os.environ
    }
    optional = {
        key for pattern in _SET_OR_OPTIONAL for key in re.findall(pattern, text, re.MULTILINE)
    }
    for key in dict.fromkeys(re.findall(_NAMED, text)):
        if key in variables or _OF_THE_SHELL.match(key):
            continue
        if key in os.environ and not _SECRET.search(key):
            variables[key] = os.environ[key]
        elif key not in optional:
            variables[key] = None
    return variables


def _checkout_of(script: Path) -> Path:
    """Return what a script may read: its checkout, its directory, or only itself in a home."""
    home = Path.home().resolve()
    too_much = (home, *home.parents)
    for directory in script.parents:
        if directory in too_much:
            break
        if (directory / ".git").exists():
            return directory
    return script if script.parent in too_much else script.parent


def _python_problem(text: str, name: str) -> ConfigError | None:
    """Explain why a Python program that uses TRL cannot be read; None if the text is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    names = [
        alias.name
        for node in ast.walk(tree)
        for alias in (node.names if isinstance(node, ast.Import) else ())
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
