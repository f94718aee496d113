"""Defines the options of commands, with their help texts, and their shell completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from laurel.errors import LaurelError

if TYPE_CHECKING:
    from laurel.config.schemas import Kind
    from laurel.config.yaml_tree import Section
    from laurel.rewards.spec import ScorerSpec

CHECKS_OF_OPTIONS = "laurel.checks_of_options"
"""Key in the `meta` of a command's context: functions of the context that an option adds, called
when all options have been read."""


# Completion at a Tab: keys of the configuration, data sets, environments.
#
# A shell appends a blank to a single completion, and inserts the prefix that all completions share.
# A blank would end the word, so a section is offered together with its keys, and a key that may
# hold anything also with its default. Completion touches no model, data set or network.

Completion = tuple[str, str]
"""A completion and its description, which zsh and fish show."""

# The schema of each command's overrides.
_COMMANDS: dict[str, Kind] = {"rm": "rm", "sft": "sft", "grpo": "grpo", "policy": "grpo"}


def complete_overrides(context: typer.Context, incomplete: str) -> list[Completion]:
    """Return the shell completions of a `KEY=VALUE` argument, for the command's own schema."""
    from laurel.config.schemas import SCHEMAS

    schema = SCHEMAS[_kind(context)]
    before = [text for text in context.params.get("overrides") or () if isinstance(text, str)]
    # bash splits `key=value` into three words, and expects completions of the last one.
    if before and before[-1] == "=":
        before.pop()
    elif incomplete or not before or "=" in before[-1]:
        return list(overrides(schema, incomplete))
    written = f"{before[-1]}=" if before else ""
    return [
        (value.removeprefix(written), about)
        for value, about in overrides(schema, written + incomplete)
        if value != written
    ]


def overrides(schema: type[Section], incomplete: str) -> Iterator[Completion]:
    """Yield the shell completions of an override.

    `sec` is completed to `section.`, then to `section.key=`, then to `section.key=value`.

    Args:
        schema: The section of the whole configuration.
        incomplete: The typed part of an override, with its sign (`+`, `++` or `~`) if it has one.
    """
    key = incomplete.lstrip("+~")
    sign, (key, equals, _) = incomplete[: len(incomplete) - len(key)], key.partition("=")
    *above, last = key.split(".")
    kinds: tuple[Any, ...] = (schema,)
    for name in above:
        kinds = _inside(kinds, name)
    found = {name: about for name, about in _keys(kinds) if name.startswith(last)}
    if equals:
        found = {last: found[last]} if last in found else {}
    while len(found) == 1 and not equals:
        (name,) = found
        deeper = dict(_keys(_inside(kinds, name)))
        if not deeper:
            break
        above, kinds, found = [*above, name], _inside(kinds, name), deeper
    path = sign + "".join(f"{name}." for name in above)
    if len(found) == 1 and sign != "~":
        (name,) = found
        yield from ((f"{path}{name}={value}", found[name]) for value in _values(kinds, name))
        return
    for name, about in found.items():
        ending = "." if dict(_keys(_inside(kinds, name))) else "" if sign == "~" else "="
        yield f"{path}{name}{ending}", about


def _inside(kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    from laurel.config.schema_info import step_into

    return step_into(kinds, name).kinds if kinds else ()


def _keys(kinds: tuple[Any, ...]) -> Iterator[Completion]:
    from laurel.config.plugged import all_fields
    from laurel.config.schema_info import sections_of

    for section in sections_of(kinds):
        for name, field in all_fields(section).items():
            # A key that holds a section is described by the section.
            inside = [kind.__doc__ for kind in sections_of(_inside((section,), name))]
            about = next(filter(None, (field.description, *inside)), "")
            yield name, " ".join(about.split()).partition(". ")[0]


def _values(kinds: tuple[Any, ...], name: str) -> list[str]:
    """List the values that a key can hold; for an open range, only null and the default."""
    from laurel.config.schema_info import choices_of, step_into

    step = step_into(kinds, name)
    if choices := choices_of(step.kinds):
        return choices
    if bool in step.kinds:
        return ["true", "false"]
    if step.field is None or step.field.is_required():
        return [""]
    default = step.field.get_default(call_default_factory=True)
    if default is None:
        return ["", "null"]
    said = str(default) if isinstance(default, int | float | str) else ""
    return ["", said] if said and said.isascii() and not set(said) & set(" \t'\"\\$`") else [""]


def _kind(context: typer.Context) -> Kind:
    """Find which run's schema applies, from the command's name, options or configuration file."""
    from laurel.config.schemas import command_of_file

    command = context.info_name or ""
    if command in _COMMANDS:
        return _COMMANDS[command]
    said = context.params.get("kind") or context.params.get("trainer")
    file = context.params.get("config")
    if said in _COMMANDS:
        return _COMMANDS[said]
    try:
        return command_of_file(Path(file) if file else None)
    except LaurelError:  # the command itself reports it
        return "rm"


JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else on stdout; messages go to stderr."),
]
"""The option `as_json`, for which `cli.main` keeps stdout."""


def sets_column(word: str) -> bool:
    """Report whether a word sets a key of the section `data`; it may stand beside files."""
    return re.match(r"\+*data\.\w+=", word) is not None


def complete_preferences() -> list[str]:
    """List the classes of preference data sets, as shell completions."""
    from laurel.data.preferences import DATASET_CLASSES

    return list(DATASET_CLASSES)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The YAML configuration. Default: the default of every key.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=complete_overrides,
        help="Changes of the configuration: a.b=c sets a key, +a.b=c adds one, ++a.b=c sets or "
        "adds one, and ~a.b deletes one.",
    ),
]

ColumnKeys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=COLUMN",
        help="The names of columns, set as for laurel rm: data.prompt_key=, data.chosen_key=, "
        "data.rejected_key=.",
    ),
]

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="The model: a directory, a hub name or a GGUF file."
    ),
]
PreferenceSetOption = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME",
        autocompletion=complete_preferences,
        help="The data set class that reads the rows. Default: recognized by their columns.",
    ),
]
_NOT_OF_A_JUDGE = {
    "model": "model_name",
    "precision": "precision",
    "max_length": "max_model_len",
    "batch_tokens": "batch_tokens",
    "settings": "tokenizer",
    "api_key_env": "api_key_env",
    "aggregate": "",
    "compatibility": "",
    "member": "",
}
"""Options about a reward model, and the keys of a file of `--judge` that take their place."""


def _judge_alone(context: typer.Context, judge: Any) -> Any:
    if judge is not None and not context.resilient_parsing:
        context.meta.setdefault(CHECKS_OF_OPTIONS, []).append(_refuse_beside_judge)
    return judge


def _refuse_beside_judge(context: typer.Context) -> None:
    for name, key in _NOT_OF_A_JUDGE.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--set" if name == "settings" else f"--{name.replace('_', '-')}"
            hint = f"; the file sets {key}" if key else ""
            raise typer.BadParameter(
                f"{option} is about a reward model, and --judge names a judge{hint}"
            )


JudgeOption = Annotated[
    Path | None,
    typer.Option(
        "--judge",
        callback=_judge_alone,
        metavar="FILE",
        help="Score with a judge in place of a reward model: a YAML file with the keys of "
        "env.reward_model.",
    ),
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(
        min=2, help="The longest conversation in tokens, for a model without scoring.json."
    ),
]
BatchTokensOption = Annotated[int, typer.Option(min=1, help="The most tokens of one forward pass.")]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(help="The precision of the weights and the arithmetic."),
]
AggregateOption = Annotated[
    Literal["min", "product", "last", "mean"] | None,
    typer.Option(
        help="How the values of steps become the score of a process reward model. Default: as its "
        "scoring.json says."
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="The device; auto uses a GPU if there is one."),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="The number of CPU threads. Default: OMP_NUM_THREADS, or one per core."
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the policy section, such as tokenizer.pad_token=auto; repeatable.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScorerOptions:
    """The options of a reward model that this process loads."""

    aggregate: AggregateOption = None
    max_length: MaxLengthOption = None
    batch_tokens: BatchTokensOption = 8192
    precision: PrecisionOption = "float32"
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    settings: SettingsOption = None

    def spec(self) -> ScorerSpec:
        """Return what is asked of the scorer, in the words of `rewards`."""
        from laurel.rewards.spec import ScorerSpec

        return ScorerSpec(
            max_length=self.max_length,
            batch_tokens=self.batch_tokens,
            precision=self.precision,
            device=self.device,
            aggregate=self.aggregate,
        )
