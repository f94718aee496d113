"""Parses the arguments of training programs, and knows which are imported."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
IN_PROGRAMS = ("trl", "openrlhf", "main_ppo", "main_dapo", "sft_trainer")
"""Texts of which a script that starts a training program has one."""
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
_NUM_DEVICES = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")


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


def readable(text: str) -> str:
    """Return a text with words in place of the placeholders for what is unknown."""
    text = re.sub(r"@laurel:unset:([^@]*)@", r"(no value of \1)", text)
    text = re.sub(r"@laurel:argument:([^@]*)@", r"(no value of argument \1)", text)
    return re.sub(r"@laurel:output:([^@]*)@", r"(the output of \1)", text)


def first_program(calls: Sequence[Sequence[str]], name: str) -> CommandLine | None:
    """Return the first training program that is imported, of those that a script starts."""
    programs = [(words, program) for words in calls if (program := program_at(words)) is not None]
    ours = [pair for pair in programs if pair[1][1:3] in _RUNS]
    if programs and not ours:
        words, (index, system, _, _) = programs[0]
        raise ConfigError(
            f"{words[index]} is another program of {system}; those imported: {PROGRAMS}"
        )
    if not ours:
        for words in calls:
            if (match := _TRL_EXAMPLE.search(" ".join(words))) is not None:
                run = "reward" if match[1] == "reward_modeling" else match[1]
                raise ConfigError(
                    f"{name}: {match[0]} is an example of TRL's, which may do more than its flags "
                    f"say; write `trl {run}` instead of it and what starts it"
                )
        return None
    words, program = ours[0]
    command = _command(words, *program)
    others = {
        f"{shlex.join(more[: index + 1])} ...": "a second training program of the script: import "
        "it by the line that starts it"
        for more, (index, _, _, _) in programs
        if list(more) != list(words)
    }
    return replace(command, unresolved={**command.unresolved, **others})


def program_at(words: Sequence[str]) -> tuple[int, str, str, str] | None:
    """Return where a command line names a training program, its system, name and style."""
    for index, word in enumerate(words):
        if word.rpartition("/")[2] == "trl" and index + 1 < len(words):
            return index + 1, "trl", words[index + 1], "flags"
        for system, pattern, style in _PROGRAMS:
            match = re.match(pattern, word)
            if match:
                return index, system, match["run"], style
    return None


def _command(words: Sequence[str], index: int, system: str, run: str, style: str) -> CommandLine:
    launcher, arguments = words[:index], words[index + 1 :]
    values = _flags(arguments) if style == "flags" else _overrides(arguments)
    of_launcher: dict[str, str] = {}
    for word, following in zip(launcher, [*launcher, ""][1:], strict=True):
        name, has_value, inline = word.partition("=")
        of_launcher.setdefault(name, inline if has_value else following)
    if "--config_file" in of_launcher:  # what accelerate reads, under a key that no program has
        values[LAUNCHER_FILE] = of_launcher["--config_file"]
    flag = next((name for name in of_launcher if name in _NUM_DEVICES), "")
    number = of_launcher.get(flag, "")
    unresolved = {
        key: f"{text} is not known here: write its value"
        for key, value in {**values, flag: number}.items()
        if (text := readable(str(value))) != str(value)
    }
    return CommandLine(
        system=system,
        run=_RUNS[system, run],
        program=words[index],
        devices=int(number) if number.isdigit() else None,
        values={key: value for key, value in values.items() if key not in unresolved},
        unresolved=unresolved,
    )


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Parse `--key value`, `--key=value`, `--key a b` (a list) and `--key` (true)."""
    values: dict[str, Any] = {}
    key: str | None = None
    flag_values: list[Any] = []

    def settle() -> None:
        if key is not None:
            one_word = flag_values[0] if flag_values else True
            value = list(flag_values) if len(flag_values) > 1 else one_word
            _set(values, key, value, f"--{key}")

    for word in words:
        if word.startswith("--") and len(word) > 2 and not _NUMBER.match(word):
            settle()
            key, has_value, value = word[2:].partition("=")
            flag_values = [scalar(value)] if has_value else []
        elif key is None:
            _set(values, f"'{word}'", word, word)
        else:
            flag_values.append(scalar(word))
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
            values[f"'{word}'"] = word
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
