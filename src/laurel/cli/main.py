"""Defines the commands that train, and groups; heavy packages are imported when one runs.

Typer is extended with dataclasses as parameters, clearer errors, and `--quiet` and `--verbose`,
which every command accepts at any position.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
import typer.main
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from laurel import __version__, plugins
from laurel.config.yaml_tree import nearest
from laurel.errors import ConfigError, LaurelError
from laurel.observe.console import Verbosity, make_console, set_verbosity, verbosity
from laurel.observe.json_output import stdout_for_json
from laurel.run.options import CHECKS_OF_OPTIONS, ConfigOption, JsonOption, Overrides

Command = Callable[..., Any]
_SAID = "laurel.verbosity"


def begin(context: typer.Context) -> None:
    """Apply the `--quiet` or `--verbose` that stands before the command."""
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
        help="Print only errors, warnings and results. May stand anywhere.",
    )
    verbose = typer.Option(
        "--verbose",
        "-v",
        callback=_says("verbose"),
        hidden=is_hidden,
        help="Also print debug messages and the traceback of an error. May stand anywhere.",
    )
    return quiet, verbose


_QUIET, _VERBOSE = _options(is_hidden=False)
QuietOption = Annotated[bool, _QUIET]
VerboseOption = Annotated[bool, _VERBOSE]


class _WholeWords(typer.Context.formatter_class):  # type: ignore[misc,valid-type]
    """Break the lines of a help text at blanks only, never at the hyphens of an option's name."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, _unbreakable(args), prefix)

    def write_text(self, text: str) -> None:
        super().write_text(_unbreakable(text))

    def write_dl(self, rows: Sequence[tuple[str, str]], *sizes: int, **named: int) -> None:
        rows = [(term, _unbreakable(text)) for term, text in rows]
        super().write_dl(rows, *sizes, **named)

    def getvalue(self) -> str:
        return str(super().getvalue()).replace(_NO_BREAK_HYPHEN, "-")


_NO_BREAK_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def _unbreakable(text: str) -> str:
    return text.replace("-", _NO_BREAK_HYPHEN)


class _PlainContext(typer.Context):
    formatter_class = _WholeWords


class App(typer.Typer):
    """A typer application whose commands also take `--quiet` and `--verbose`.

    A parameter whose annotation is a dataclass stands for one option per field, with the field's
    annotation and default; the command is called with the dataclass. A parameter `as_json` that is
    true keeps stdout for JSON. An example in the help stays on one line, so that it can be copied.
    Unknown options and commands get Laurel's own messages.
    """

    def __init__(self, *, cls: type[TyperGroup] | None = None, **settings: Any) -> None:
        super().__init__(cls=cls or CommandGroup, rich_markup_mode=None, **settings)

    def command(  # type: ignore[override]
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Command], Command]:
        """Return a decorator that registers a function as a command and returns it unchanged.

        `settings` are passed on to typer.
        """

        def register(command: Command) -> Command:
            text = inspect.getdoc(command) or ""
            text = re.sub(r"^Example: ", "\b\nExample:\n  ", text, flags=re.MULTILINE)
            settings.update(cls=_PlainCommand, help=text)
            typer.Typer.command(self, name, **settings)(_with_options(command))
            return command

        return register


def _with_options(command: Command) -> Command:
    """Wrap a command so that the fields of its dataclasses are options, in place and order."""
    quiet, verbose = (Annotated[bool, one] for one in _options(is_hidden=True))
    options: dict[str, tuple[Any, Any]] = {}
    groups: dict[str, Any] = {}
    hints, empty = get_type_hints(command, include_extras=True), inspect.Parameter.empty
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            types = get_type_hints(kind, include_extras=True)
            options |= {
                one.name: (types[one.name], empty if one.default is MISSING else one.default)
                for one in fields(kind)
            }
        else:
            options[parameter.name] = kind, parameter.default
    options |= {"is_quiet": (quiet, False), "is_verbose": (verbose, False)}

    @functools.wraps(command)
    def called(*, is_quiet: bool, is_verbose: bool, **said: Any) -> Any:
        # The callbacks of `is_quiet` and `is_verbose` have already set the verbosity.
        kept = stdout_for_json() if said.get("as_json") else nullcontext()
        made = {
            name: kind(**{one.name: said.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        with kept:
            return command(**made, **said)

    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (kind, default) in options.items()
        ]
    )
    called.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    return called


_NOT_ONE_OF = re.compile(r"(?P<said>'.*') is not one of (?P<choices>.+?)\.?")
# Messages about a wrong number, by pydantic's type of the error.
_OF_PYDANTIC = {
    "int_parsing": "{input!r} is no whole number",
    "float_parsing": "{input!r} is no number",
    "greater_than_equal": "{input} is less than {ge}",
    "less_than_equal": "{input} is more than {le}",
}


class _PlainCommand(TyperCommand):
    # typer checks options with pydantic, whose messages are for programmers.

    context_class = _PlainContext

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser takes them out of its list
        try:
            left = super().parse_args(ctx, args)
            for check in ctx.meta.pop(CHECKS_OF_OPTIONS, ()):
                check(ctx)
            return left
        except typer.BadParameter as error:
            error.message = _in_our_words(error)
            raise
        except Exception as error:  # typer does not export the class of this error
            name = getattr(error, "option_name", None)
            takes_overrides = any(one.name == "overrides" for one in self.params)
            alike = set(getattr(error, "possibilities", None) or ()) - {"--help"}
            if isinstance(name, str) and takes_overrides and ("." in name or not alike):
                error.message = _not_an_option(name, given)  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


class CommandGroup(TyperGroup):
    """A group of commands, those of plug-ins among them (`laurel.plugins.Command`).

    A plug-in is imported when its command is run, or when all commands are listed. One that cannot
    be used is listed with the reason, and ends with it when it is run.
    """

    context_class = _PlainContext

    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C ends it with a message and exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            # typer itself would end with this exit code and say nothing.
            print("; ".join(("interrupted", *getattr(stop, "__notes__", ()))), file=sys.stderr)
            raise typer.Exit(130) from stop

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, or None."""
        return _of_plugin(ctx, cmd_name, self.commands) or super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in the order of the help."""
        names, prefix = list(self.commands), _prefix(ctx)
        after = {
            name.removeprefix(prefix): _after(name)
            for name in plugins.names("commands")
            if name.startswith(prefix) and " " not in name.removeprefix(prefix)
        }
        left = [name for name in after if name not in names]
        while left:
            ready = [name for name in left if after[name] in names]
            ready = ready or [name for name in left if after[name] not in left][:1] or left[:1]
            for name in reversed(ready):
                known = after[name] in names
                names.insert(names.index(after[name]) + 1 if known else len(names), name)
                left.remove(name)
        return names

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that arguments name, and the arguments behind it."""
        if self.get_command(ctx, args[0]) is not None:
            return super().resolve_command(ctx, args)
        own = self.commands  # typer looks there for names that are similar
        self.commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:  # typer does not export the class of this error
            said = getattr(error, "message", "")
            if said.startswith("No such command"):
                meant = [one for one in args[1:2] if one in self.commands and "mean" not in said]
                hint = "".join(f" Did you mean '{one}'?" for one in meant)
                known = ", ".join(self.commands)
                error.message = f"{said}{hint} Choose one of {known}"  # type: ignore[attr-defined]
            raise
        finally:
            self.commands = own


def _prefix(context: Any) -> str:
    """Return the groups above a command, as in the names of plug-ins: `config `."""
    above = ""
    while context.parent is not None:
        above, context = f"{context.info_name} {above}", context.parent
    return above


def _after(name: str) -> str:
    try:
        return plugins.find(plugins.Command, name).after
    except ConfigError:  # the command itself says what is wrong
        return ""


def _of_plugin(context: Any, word: str, own: Collection[str]) -> Any:
    """Return the command of the plug-in of a name, made; None if none is declared."""
    name = f"{_prefix(context)}{word}"
    declared = [entry for entry in plugins.entries("commands") if entry.name == name]
    if not declared:
        return None
    app = App(add_completion=False)
    try:
        if word in own:
            raise ConfigError(
                f"'laurel {name}' is a command of the package {plugins.OWN} itself, and "
                f"{' and '.join(map(str, declared))} declares it again. Uninstall that package, "
                "or rename its entry point"
            )
        made = plugins.find(plugins.Command, name).make(None, name)
        if isinstance(made, typer.Typer):
            app.add_typer(made, name=word)
        else:
            app.command(word)(made)
        return typer.main.get_group(app).commands[word]
    except Exception as error:  # what another package has made may raise anything
        problem = (
            error
            if isinstance(error, ConfigError)
            else ConfigError(
                f"'laurel {name}' is {declared[0]}, which is no command that can be made: "
                f"{type(error).__name__}: {error}; fix or uninstall that package"
            )
        )
        return _Unusable(problem, name=word)


class _Unusable(TyperCommand):
    """A command whose plug-in cannot be used."""

    context_class = _PlainContext

    def __init__(self, problem: ConfigError, *, name: str) -> None:
        super().__init__(
            name=name,
            help=f"(cannot be used) {problem}",
            rich_markup_mode=None,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self.problem = problem

    def invoke(self, ctx: Any) -> Any:
        raise self.problem


def _not_an_option(name: str, given: Sequence[str]) -> str:
    """Explain how to write a configuration key that was given as an option."""
    if "." not in name:
        return (
            f"No such option: {name}. Settings are keys of the configuration, without dashes: "
            "policy.optimizer.kwargs.lr=1e-5, for example; `laurel config` prints them all"
        )
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
    """Return Laurel's message for an invalid option value, with the choices if there are any."""
    message = error.message.removeprefix("Value error, ")
    found = _NOT_ONE_OF.fullmatch(message)
    if found:
        choices = [one.strip("' ") for one in found["choices"].split(",")]
        near = nearest(found["said"].strip("'"), choices)
        hint = f" Did you mean {near}?" if near else ""
        return f"{found['said']} is none of its choices.{hint} Choose one of {', '.join(choices)}"
    causes: list[Any] = getattr(error.__cause__, "errors", list)()
    wording = _OF_PYDANTIC.get(causes[0]["type"]) if causes else None
    if wording is None:
        return message
    return wording.format(input=causes[0]["input"], **causes[0].get("ctx", {}))


SHOW = "show"


class ShowsByDefault(CommandGroup):
    """A group that runs `show` if no command is named, as in `laurel config --describe`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `show` before arguments that do not begin with a command."""
        first = args[0] if args else ""
        if first not in ("-h", "--help") and self.get_command(ctx, first) is None:
            args = [SHOW, *args]
        return super().parse_args(ctx, args)


config_app = App(cls=ShowsByDefault, no_args_is_help=False)


@config_app.callback()
def config() -> None:
    """Print a run's configuration, or import another system's.

    `laurel config --for grpo --describe` means `laurel config show --for grpo --describe`.
    """


app = App(
    name="laurel",
    help="Train reward models, prove how good they are, and use them.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"laurel {__version__}")
        raise typer.Exit


@app.callback()
def laurel(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    is_quiet: QuietOption = False,
    is_verbose: VerboseOption = False,
) -> None:
    """Train reward models, prove how good they are, and use them."""
    begin(context)


@app.command("rm")
def rm_command(
    config: ConfigOption = None, overrides: Overrides = None, as_json: JsonOption = False
) -> None:
    """Train a reward model from preferences.

    Example: laurel rm --config examples/configs/rm.yaml policy.model_name=Qwen/Qwen3-0.6B
    """
    from laurel.run.train import run_training

    run_training("rm", config, overrides or [], as_json=as_json)


@app.command("sft")
def sft_command(
    config: ConfigOption = None, overrides: Overrides = None, as_json: JsonOption = False
) -> None:
    """Fine-tune a model on the assistant's messages in conversations.

    Example: laurel sft --config examples/configs/sft.yaml data.train_data_path=chats.jsonl
    """
    from laurel.run.train import run_training

    run_training("sft", config, overrides or [], as_json=as_json)


@app.command("grpo")
def grpo_command(
    config: ConfigOption = None, overrides: Overrides = None, as_json: JsonOption = False
) -> None:
    """Train a policy against environments with GRPO.

    An environment checks mathematics, runs programs, asks reward models, or is one of your own.

    Example: laurel grpo --config examples/configs/grpo_rm_1B.yaml grpo.max_num_steps=100
    """
    from laurel.run.train import run_training

    run_training("grpo", config, overrides or [], as_json=as_json)


sandbox_app = App(help="Where programs that a model wrote are run.", no_args_is_help=True)


@sandbox_app.callback()
def sandbox_commands() -> None:
    """Where programs that a model wrote are run."""


data_app = App(help="Examine and make data files before a run.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Examine and make data files before a run."""


app.add_typer(sandbox_app, name="sandbox")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command line; a user's error prints one message, no traceback, and exits with 2."""
    # The objects of a start are those of libraries, which stay: looking for garbage among them
    # every 700 objects takes a tenth of it.
    gc.set_threshold(50_000)
    with suppress(OSError):  # the working directory may have been deleted
        # Modules in the working directory can be named, as with `python -m`. They come last, so
        # that they shadow no installed module.
        sys.path.append(os.getcwd())
    try:
        app()
    except LaurelError as error:
        if verbosity() == "verbose":
            traceback.print_exc()
        make_console(stderr=True).print(Text(f"error: {error}"), soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
