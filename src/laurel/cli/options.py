"""Options that several commands have."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from laurel.config.yaml_tree import nearest
from laurel.errors import LaurelError
from laurel.observe.console import Verbosity, set_verbosity
from laurel.observe.json_output import JsonOption

if TYPE_CHECKING:
    from laurel.config.schemas import Kind
    from laurel.config.yaml_tree import Section


# --------------------------------------------------------------------------------------------------
# What the shell offers at a Tab: keys of the configuration, data sets, environments.
#
# A shell puts a blank behind the only thing that is offered, and takes whatever all that is offered
# begins with. So a section is never offered alone, but with what is in it; and beside a key that
# may
# hold anything stands the same with its default. No model, data set or network is touched.

Offer = tuple[str, str]
"""What is offered, and a word about it, which zsh and fish show."""

_COMMANDS: dict[str, Kind] = {"rm": "rm", "sft": "sft", "grpo": "grpo", "policy": "grpo"}
"""The schema of the overrides of a command."""


def offer_overrides(context: typer.Context, incomplete: str) -> list[Offer]:
    """Keys of the configuration, and the values of those that can hold only a few."""
    from laurel.config.schemas import SCHEMAS

    schema = SCHEMAS[_kind(context)]
    before = [text for text in context.params.get("overrides") or () if isinstance(text, str)]
    # bash takes `key=value` for three words, and wants the last of them.
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


def overrides(schema: type[Section], incomplete: str) -> Iterator[Offer]:
    """What `incomplete` may become: `sec` becomes `section.key=`, and that `section.key=value`.

    Args:
        schema: Of the whole configuration.
        incomplete: The beginning of an override, with its sign.
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


def _keys(kinds: tuple[Any, ...]) -> Iterator[Offer]:
    """The keys of the sections among these kinds, each with its first sentence."""
    from laurel.config.schema_info import sections_of

    for section in sections_of(kinds):
        for name, field in section.model_fields.items():
            yield name, " ".join((field.description or "").split()).partition(". ")[0]


def _values(kinds: tuple[Any, ...], name: str) -> list[str]:
    """The values that a key can hold, where these are few; else none of them, and its default."""
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
    """Which schema the command has: others are told it, or have it in their file."""
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
    except LaurelError:  # told when the command is carried out
        return "rm"


# ----------------------------------------------------------------------------- values of options


def offer_tasks() -> list[str]:
    """Data sets of tasks that have a name."""
    from laurel.data.task_formats import TASK_SETS

    return list(TASK_SETS)


def offer_preferences() -> list[str]:
    """Classes that read preferences."""
    from laurel.data.preferences import DATASET_CLASSES

    return list(DATASET_CLASSES)


def offer_environments() -> list[str]:
    """Environments that are there without a configuration."""
    from laurel.environments.registry import BUILT_IN

    return list(BUILT_IN)


def offer_layers() -> list[str]:
    """Layers of the sandbox that can be left out."""
    from laurel.sandbox.tiers import LAYERS

    return [*LAYERS, "cgroup"]


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file; without it, the defaults.", metavar="FILE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=offer_overrides,
        help="Changes to the configuration: a.b=c sets, +a.b=c adds, ++a.b=c either, ~a.b deletes.",
    ),
]

ColumnKeys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=COLUMN",
        help="Columns of other names, as laurel rm is told them: data.prompt_key=, "
        "data.chosen_key=, data.rejected_key=.",
    ),
]

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A directory or a hub name.")
]
MaxLengthOption = Annotated[
    int | None, typer.Option(min=2, help="Longest conversation, for a model without scoring.json.")
]
BatchTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Of the weights and the arithmetic.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Threads on a CPU; default: one per core.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the policy section, e.g. tokenizer.pad_token=auto.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variable with the API key; default: LAUREL_API_KEY, or else a file that is made.",
    ),
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variable with the key for /admin; default: LAUREL_ADMIN_KEY, or else the API key.",
    ),
]


# --------------------------------------------------------------------------------------------------
# What every command has: `--quiet` and `--verbose`, which may stand anywhere; whole examples;
# errors of its options in our words.

_SAID = "laurel.verbosity"
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def begin(context: typer.Context) -> None:
    """Of a command line that is about to be carried out: as much is said as it asks for so far."""
    set_verbosity(context.meta.get(_SAID, "normal"))


def _says(wanted: Verbosity) -> Callable[[typer.Context, bool], bool]:
    def callback(context: typer.Context, is_said: bool) -> bool:
        if is_said and not context.resilient_parsing:
            if context.meta.setdefault(_SAID, wanted) != wanted:
                raise typer.BadParameter("--quiet and --verbose exclude each other")
            set_verbosity(wanted)
        return is_said

    return callback


def _options(*, is_hidden: bool) -> tuple[Any, Any]:
    quiet = typer.Option(
        "--quiet",
        "-q",
        callback=_says("quiet"),
        hidden=is_hidden,
        help="Only errors, warnings and results. May stand anywhere.",
    )
    verbose = typer.Option(
        "--verbose",
        "-v",
        callback=_says("verbose"),
        hidden=is_hidden,
        help="Also debug messages, and where in the code an error is from. May stand anywhere.",
    )
    return Annotated[bool, quiet], Annotated[bool, verbose]


QuietOption, VerboseOption = _options(is_hidden=False)


def complete_commands(app: typer.Typer) -> None:
    """Let every command of an app, and of the groups in it, take both options, too.

    Examples in their help stay in one line, which can be copied, and what is wrong with an option
    is told in our words, and so is a command that is none.
    """
    if not isinstance(app.info.cls, type):  # one that says its class takes any word
        app.info.cls = _PlainGroup
    for command in app.registered_commands:
        assert command.callback is not None
        command.cls = _PlainCommand
        text = inspect.getdoc(command.callback) or ""
        command.help = re.sub(r"^Example: ", "\b\nExample:\n  ", text, flags=re.MULTILINE)
        command.callback = _with_both(command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        complete_commands(group.typer_instance)


def _with_both(command: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(command, eval_str=True)
    quiet, verbose = _options(is_hidden=True)
    both = [
        inspect.Parameter("is_quiet", _BY_NAME, default=False, annotation=quiet),
        inspect.Parameter("is_verbose", _BY_NAME, default=False, annotation=verbose),
    ]

    @functools.wraps(command)
    def called(**said: Any) -> Any:
        for one in both:  # their callbacks have done what they are for
            said.pop(one.name)
        return command(**said)

    parameters = [one.replace(kind=_BY_NAME) for one in signature.parameters.values()]
    called.__signature__ = inspect.Signature([*parameters, *both])  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in (*parameters, *both)}
    return called


# ------------------------------------------------------------------------------------- bad options

_NOT_ONE_OF = re.compile(r"(?P<said>'.*') is not one of (?P<choices>.+?)\.?")
_OF_PYDANTIC = {
    "int_parsing": "{input!r} is no whole number",
    "float_parsing": "{input!r} is no number",
    "greater_than_equal": "{input} is less than {ge}",
    "less_than_equal": "{input} is more than {le}",
}
"""What is wrong with a number, by pydantic's name for it; with the value and its limit."""


class _PlainCommand(TyperCommand):
    """typer checks options with pydantic, and shows what that says to programmers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser takes them out of its list
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _in_our_words(error)
            raise
        except Exception as error:  # typer does not export its error of an unknown option
            name = getattr(error, "option_name", None)
            takes_overrides = any(one.name == "overrides" for one in self.params)
            if isinstance(name, str) and "." in name and takes_overrides:
                error.message = _not_an_option(name, given)  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


class _PlainGroup(TyperGroup):
    """Whoever names no command is told which there are."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:  # typer does not export its error of a wrong command line
            said = getattr(error, "message", "")
            if said.startswith("No such command"):
                meant = [one for one in args[1:2] if one in self.commands and "mean" not in said]
                hint = "".join(f" Did you mean '{one}'?" for one in meant)
                known = ", ".join(self.list_commands(ctx))
                error.message = f"{said}{hint} Choose one of {known}"  # type: ignore[attr-defined]
            raise


def _not_an_option(name: str, given: Sequence[str]) -> str:
    """How a key of the configuration is said, to one who wrote it as an option."""
    at, said = next((at, one) for at, one in enumerate(given) if one.partition("=")[0] == name)
    _, equals, value = said.partition("=")
    if not equals:
        following = given[at + 1] if at + 1 < len(given) else ""
        is_value = following and following[0] != "-" and "=" not in following
        value = shlex.quote(following) if is_value else "VALUE"
    return (
        f"No such option: {name}. Keys of the configuration have no dashes before them: "
        f"write {name.lstrip('-')}={value}"
    )


def _in_our_words(error: typer.BadParameter) -> str:
    """What is wrong with the value of an option: a choice with its choices, a number."""
    message = error.message.removeprefix("Value error, ")
    found = _NOT_ONE_OF.fullmatch(message)
    if found:
        choices = [one.strip("' ") for one in found["choices"].split(",")]
        near = nearest(found["said"].strip("'"), choices)
        hint = f" Did you mean {near}?" if near else ""
        return f"{found['said']} is none of its choices.{hint} Choose one of {', '.join(choices)}"
    told: list[Any] = getattr(error.__cause__, "errors", list)()
    wording = _OF_PYDANTIC.get(told[0]["type"]) if told else None
    if wording is None:
        return message
    return wording.format(input=told[0]["input"], **told[0].get("ctx", {}))


# --------------------------------------------------------------------------------------------------
# Options that several commands share: a dataclass of them is one parameter of a command.


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its dataclasses as options, in their place and order.

    A parameter whose annotation is a dataclass stands for one option per field, each as the field
    is annotated and with the field's default. The command is called with the dataclass made.

    Args:
        command: What typer is to register.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=_BY_NAME, annotation=kind))
            continue
        groups[parameter.name] = kind
        types = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(one.name, _BY_NAME, default=one.default, annotation=types[one.name])
            for one in fields(kind)
        ]

    @functools.wraps(command)
    def grouped(**said: Any) -> None:
        made = {
            name: kind(**{one.name: said.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        command(**made, **said)

    grouped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    grouped.__annotations__ = {one.name: one.annotation for one in parameters}
    return grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is served, how, and to whom."""

    model: ModelOption = ""
    null: Annotated[
        bool, typer.Option("--null", help="Serve no model but trivial scores, for load tests.")
    ] = False
    replicas: Annotated[
        int, typer.Option(metavar="N", help="Processes with the model; 1: this one.")
    ] = 1
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000
    engine: Annotated[Literal["laurel", "vllm"], typer.Option(help="What computes the scores.")] = (
        "laurel"
    )
    api_key_env: ApiKeyOption = None
    admin_key_env: AdminKeyOption = None
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="Need no key; on loopback only.")
    ] = False
    allow_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Private addresses, such as 10.0.0.0/8, that need no key for scores; repeatable.",
        ),
    ] = None
    precision: PrecisionOption = "float32"
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    max_length: MaxLengthOption = None
    batch_tokens: BatchTokensOption = 8192
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Completions that may wait; further requests get 429.")
    ] = 2000
    request_seconds: Annotated[
        float, typer.Option(min=0.1, help="Of one request; then it gets 503.")
    ] = 120.0
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="What was accepted may take when the server is ended.")
    ] = 30.0
    access_log: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON lines of requests; - is stderr, none is none."),
    ] = "-"
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="Put what is asked into the access log.")
    ] = False
    as_json: JsonOption = False
