"""Finds the command lines of training programs in scripts, which bash runs in the sandbox."""

from __future__ import annotations

import ast
import os
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laurel.config.yaml_tree import plain_values, read_text
from laurel.errors import ConfigError
from laurel.sandbox.shell import run_script
from laurel.sandbox.zygote_process import SandboxStartError

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
_TRAINERS = {"RewardTrainer": "reward", "GRPOTrainer": "grpo", "SFTTrainer": "sft"}
_NUM_DEVICES = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")
_FROM_OUTSIDE = ("HOME", "USER", "PWD")
_YAML = re.compile(r"(\s*(#.*)?\n)*\s*(---|\{|[\w.-]+\s*:(\s|$))")
_CONTINUED = re.compile(r"\\\n")
# Words without expansions, redirections and lists of commands.
_PLAIN = re.compile(r"""([\w@%+=:,./\[\]-]|\\.|'[^']*'|"([^"$`\\!]|\\["\\])*"|[ \t])*""")
# What stands for a value that is not known. No sum can be made of it, and no number be read.
_UNSET, _ARGUMENT = "@laurel:unset:{}@", "@laurel:argument:{}@"
_LONE = re.compile(r"@laurel:(unset|argument):[^@]*@")
_NAMED = r"\$\{?([A-Za-z_]\w*)"
_SET_OR_OPTIONAL = (
    r"(?:^|[\s;(])([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=",
    r"\b(?:for|local|declare|readarray|mapfile|printf -v)\b(?:\s+-\w+)*\s+([A-Za-z_]\w*)",
    r"\$\{[#!]?([A-Za-z_]\w*)(?::?[-=+?]|\[)",
    r"\s-[znv]\s+\"?\$?\{?([A-Za-z_]\w*)",
)
_READ = r"\bread\b([^\n;<|]*)"
_SECRET = re.compile(r"(^|_)(token|key|secret|password|credentials?)$", re.IGNORECASE)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A training program found in a script or command line, with its parsed arguments."""

    system: str
    run: str
    program: str
    values: Mapping[str, Any]
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """What cannot be known of the program, such as keys whose values nobody gave, with reasons."""
    assumed: list[str] = field(default_factory=list)
    """What the run of the script took from outside, or took to be so."""
    devices: int | None = None
    """The number of processes that the launcher starts; None if it is not given."""


def find_command(text: str, name: str, path: Path | None) -> CommandLine | None:
    """Find and parse the first training program in a script or command line; None without one.

    A text that is more than one plain command is run by bash in the sandbox, where it starts
    nothing.

    Args:
        text: The text of the script.
        name: Its name in messages.
        path: Its file; None for standard input.

    Raises:
        ConfigError: The text cannot be run, a flag is given twice with different values, or a known
            system's program has no counterpart in Laurel.
    """
    if (problem := _python_problem(text, name)) is not None:
        raise problem
    is_script = text.startswith("#!") or (path is not None and path.suffix == ".sh")
    if _YAML.match(text) or not (is_script or any(part in text for part in _IN_PROGRAMS)):
        return None
    if (words := _plain_command(text)) is not None:
        return _first_program([words], name)
    return _run(text, name, path)


def _plain_command(text: str) -> list[str] | None:
    """Return the words of a text that is one command for any shell; None if it is not."""
    lines = [line for line in _CONTINUED.sub(" ", text).splitlines() if line.strip()]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    return shlex.split(lines[0]) if len(lines) == 1 and _PLAIN.fullmatch(lines[0]) else None


def _run(text: str, name: str, path: Path | None) -> CommandLine | None:
    environment = _environment(text)
    optional = [int(number) - 1 for number in _OPTIONAL_ARGUMENT.findall(text)]
    given = min([max(map(int, _PLAIN_ARGUMENT.findall(text)), default=0), *optional])
    try:
        run = run_script(
            text if path is None else path.expanduser(),
            [_ARGUMENT.format(number) for number in range(1, given + 1)],
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
    found = _first_program(calls, name)
    said = [_readable(line).removeprefix(f"{path}: ") for line in run.complaints]
    guessed = [line for line in said if _GUESSED.search(line)]
    if guessed or (found is None and any(part in text for part in _IN_PROGRAMS)):
        how = "takes too long" if run.exit_code is None else f"ends with {run.exit_code}"
        why = (
            f"decides by what is not known here: {guessed[0]}"
            if guessed
            else f"starts no training program that is known ({PROGRAMS}): run in a sandbox where "
            "files are read-only and no other program is started, it "
            + "; ".join([how, *said[-3:]])
        )
        raise ConfigError(
            f"{name} {why}. Set the variables that it needs before the command (NAME=value laurel "
            "config import ...), or give the line that starts the training"
        )
    if found is None:
        return None
    unresolved = dict(found.unresolved)
    for call in run.calls:
        if call.is_captured and _program_at(call.words) is None:
            line = shlex.join(call.words)
            if _IS_THERE.match(line):
                found.assumed.append(f"`{line}` was taken to fail")
            else:
                unresolved[_readable(line)] = (
                    "the script reads its output, and no program is started here: check what "
                    "depends on it"
                )
    found.assumed.extend(
        f"{key} is of the environment"
        for key, value in environment.items()
        if value is not None and key not in _FROM_OUTSIDE
    )
    return replace(found, unresolved=unresolved)


def _environment(text: str) -> dict[str, str | None]:
    """Return the variables for a script that it names and does not set.

    None stands for one that has no value, and for which the script has no other. Nothing else of
    the environment is given to it, nor what looks like a secret.
    """
    found: dict[str, str | None] = {
        key: os.environ[key] for key in _FROM_OUTSIDE if key in os.environ
    }
    optional = {key for one in _SET_OR_OPTIONAL for key in re.findall(one, text, re.MULTILINE)}
    optional |= {word for words in re.findall(_READ, text) for word in words.split()}
    for key in dict.fromkeys(re.findall(_NAMED, text)):
        if key in found or _OF_THE_SHELL.match(key):
            continue
        if key in os.environ and not _SECRET.search(key):
            found[key] = os.environ[key]
        elif key not in optional:
            found[key] = None
    return found


def _checkout_of(script: Path) -> Path:
    """Return what a script may read: its checkout, its directory, or only itself in a home."""
    for directory in script.parents:
        if directory in (Path.home(), Path("/")):
            break
        if (directory / ".git").exists():
            return directory
    return script if script.parent in (Path.home(), Path("/")) else script.parent


def _readable(text: str) -> str:
    """Return a text with words in place of the placeholders for what is unknown."""
    text = re.sub(r"@laurel:unset:([^@]*)@", r"(no value of \1)", text)
    text = re.sub(r"@laurel:argument:([^@]*)@", r"(no value of argument \1)", text)
    return re.sub(r"@laurel:output:([^@]*)@", r"(the output of \1)", text)


def _first_program(calls: Sequence[Sequence[str]], name: str) -> CommandLine | None:
    """Return the first training program that is imported, of those that a script starts."""
    places = [(words, place) for words in calls if (place := _program_at(words)) is not None]
    ours = [one for one in places if (one[1][1], one[1][2]) in _RUNS]
    if places and not ours:
        words, (at, system, _, _) = places[0]
        raise ConfigError(f"{words[at]} is another program of {system}; those imported: {PROGRAMS}")
    if not ours:
        for words in calls:
            if (found := _TRL_EXAMPLE.search(" ".join(words))) is not None:
                run = "reward" if found[1] == "reward_modeling" else found[1]
                raise ConfigError(
                    f"{name}: {found[0]} is an example of TRL's, which may do more than its flags "
                    f"say; write `trl {run}` instead of it and what starts it"
                )
        return None
    words, place = ours[0]
    command = _command(words, *place)
    others = {
        f"{shlex.join(more[: at + 1])} ...": "a second training program of the script: import it "
        "by the line that starts it"
        for more, (at, _, _, _) in places
        if list(more) != list(words)
    }
    return replace(command, unresolved={**command.unresolved, **others})


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


def _program_at(words: Sequence[str]) -> tuple[int, str, str, str] | None:
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "trl" and at + 1 < len(words):
            return at + 1, "trl", words[at + 1], "flags"
        for system, pattern, style in _PROGRAMS:
            found = re.match(pattern, word)
            if found:
                return at, system, found["run"], style
    return None


def _command(words: Sequence[str], at: int, system: str, run: str, style: str) -> CommandLine:
    launcher, arguments = words[:at], words[at + 1 :]
    values = _flags(arguments) if style == "flags" else _overrides(arguments)
    of_launcher: dict[str, str] = {}
    for word, following in zip(launcher, [*launcher, ""][1:], strict=True):
        name, has_value, inline = word.partition("=")
        of_launcher.setdefault(name, inline if has_value else following)
    if "--config_file" in of_launcher:  # what accelerate reads, under a key that no program has
        values[LAUNCHER_FILE] = of_launcher["--config_file"]
    flag, number = next((one for one in of_launcher.items() if one[0] in _NUM_DEVICES), ("", ""))
    unresolved = {
        key: f"{text} is not known here: write its value"
        for key, value in {**values, flag: number}.items()
        if (text := _readable(str(value))) != str(value)
    }
    return CommandLine(
        system=system,
        run=_RUNS[system, run],
        program=words[at],
        devices=int(number) if number.isdigit() else None,
        values={key: value for key, value in values.items() if key not in unresolved},
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
    """Parse Hydra's `a.b=c`, `+a.b=c` and `++a.b=c`, of which the last counts.

    Hydra's own options keep their dashes.
    """
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
            values[key.lstrip("+")] = scalar(value, lists=True)
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

    With `lists`, as Hydra has them, a word in brackets becomes a list, one in quotes a text.
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if _NUMBER.match(text):
        digits = text.replace("_", "")
        return float(digits) if re.search(r"[.eE]", digits) else int(digits)
    if lists and len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    if lists and text[:1] in ("[", "{"):
        try:
            return plain_values(read_text(text, "an override"))
        except ConfigError:
            return text
    return text
