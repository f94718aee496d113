"""What every command has: `--quiet` and `--verbose`, which may stand anywhere; whole examples;
errors of its options in our words."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from laurel.config.tree import nearest
from laurel.observe.verbosity import Verbosity, set_verbosity

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
        "--quiet", "-q", callback=_says("quiet"), hidden=is_hidden,
        help="Only errors, warnings and results. May stand anywhere.",
    )  # fmt: skip
    verbose = typer.Option(
        "--verbose", "-v", callback=_says("verbose"), hidden=is_hidden,
        help="Also debug messages, and where in the code an error is from. May stand anywhere.",
    )  # fmt: skip
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
