"""Defines the top-level commands; each imports its heavy packages only when it runs."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from laurel import __version__
from laurel.cli.app import App, QuietOption, VerboseOption, begin
from laurel.cli.config import config_app
from laurel.errors import LaurelError
from laurel.observe.console import make_console, verbosity
from laurel.run.options import ConfigOption, JsonOption, Overrides

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
