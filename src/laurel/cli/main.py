"""The command line. Heavy packages are imported by the commands that need them, when they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel import __version__
from laurel.errors import LaurelError

app = typer.Typer(
    name="laurel",
    help="Train reward models, prove how good they are, and use them.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file; without it, the defaults.", metavar="FILE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Changes to the configuration: a.b=c sets, +a.b=c adds, ++a.b=c either, ~a.b deletes.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"laurel {__version__}")
        raise typer.Exit


@app.callback()
def laurel(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train reward models, prove how good they are, and use them."""


@app.command("rm")
def train_reward_model(config: ConfigOption = None, overrides: Overrides = None) -> None:
    """Train a reward model from preferences.

    Example: laurel rm --config examples/configs/rm.yaml policy.model_name=Qwen/Qwen3-0.6B
    """
    from laurel.cli.train import run_reward_training

    run_reward_training(config, overrides or [])


@app.command("config")
def show_config(
    config: ConfigOption = None,
    overrides: Overrides = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Write what each key means above it.")
    ] = False,
) -> None:
    """Print the configuration of a run with every default, as YAML."""
    from laurel.config.load import load_config, to_yaml
    from laurel.config.reward_training import RewardTrainingRun

    loaded = load_config(RewardTrainingRun, config, overrides or [])
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    sys.stdout.write(to_yaml(loaded.config, describe=describe))


@app.command("score")
def score(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSON lines of conversations; - is stdin.")
    ] = "-",
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A directory or a hub name.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, no table.")] = False,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Longest conversation, for a model without scoring.json."),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 8192,
    precision: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the weights and the arithmetic.")
    ] = "float32",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")
    ] = "auto",
    cpu_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads on a CPU; default: one per core.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of the policy section, e.g. tokenizer.pad_token=auto.",
        ),
    ] = None,
) -> None:
    """Score conversations with a reward model.

    A line is {"messages": [...]}, {"prompt": ..., "completions": [...]}, or a row of a preference
    data set. A prompt is a text or a list of messages. The exit code is 1 where a completion got no
    score.
    """
    from laurel.cli.load_scorer import ScorerOptions
    from laurel.cli.score import run_score

    options = ScorerOptions(
        max_length=max_length, batch_tokens=batch_tokens, precision=precision, device=device,
        cpu_threads=cpu_threads, settings=tuple(settings or ()),
    )  # fmt: skip
    exit_code = run_score(file, model=model, output=output, as_json=as_json, options=options)
    if exit_code:
        raise typer.Exit(exit_code)


@app.command("doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine has and what Laurel will use."""
    from laurel.cli.doctor import run_doctor

    run_doctor(as_json=as_json)


@app.command("demo")
def demo(
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Where everything goes.")
    ] = Path("demo"),
) -> None:
    """Make data and a small model, train a reward model, prove it and use it: offline, minutes."""
    from laurel.cli.demo import run_demo

    run_demo(directory)


def main() -> None:
    """Entry point: errors of users are one message and exit code 2, never a traceback."""
    try:
        app()
    except LaurelError as error:
        _complain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _complain(error: LaurelError) -> None:
    print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
