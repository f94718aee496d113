"""The command `laurel report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from laurel.observe.comparisons import Comparison
from laurel.observe.json_output import write_json
from laurel.plugins import Command
from laurel.run.options import JsonOption


class Report(Command):
    """Write one HTML page about runs, or serve it while they go on."""

    after = "demo"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return report_command

    def write(
        self,
        path: Path,
        runs: Sequence[Path],
        *,
        title: str,
        facts: Sequence[tuple[str, str, str]],
        comparisons: Sequence[Comparison],
    ) -> None:
        """Write the page of runs, for a program that has found this command by its name.

        Args:
            runs: The directories to which the runs logged, in the order of the page.
            facts: The numbers of the summary: a name, a value and a note each.
        """
        from laurel.extensions.report.page import Fact, write_report

        write_report(
            path,
            runs,
            title=title,
            facts=[Fact(*fact) for fact in facts],
            comparisons=comparisons,
        )


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="The log directories of runs, or the directory of one sweep."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page to write.", metavar="FILE")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "Laurel report",
    is_followed: Annotated[
        bool,
        typer.Option(
            "--follow", help="Serve the page while the run continues, instead of writing a file."
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="The loopback port of --follow; 0 chooses one that is free."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about runs.

    The page begins with the findings to look at first, and goes on with curves, samples and the
    configuration.

    Example: laurel report logs/exp_001 logs/exp_002 --output report.html
    """
    if is_followed and as_json:
        raise typer.BadParameter("--follow serves a page and writes no JSON")
    if any((run / "sweep.json").is_file() for run in runs):
        if is_followed or title != "Laurel report":
            raise typer.BadParameter("the page of a sweep has neither --follow nor --title")
        from laurel.extensions.report.sweep_page import copy_page

        copy_page(runs, output)
        if as_json:
            write_json({"page": output, "sweep": runs[0]})
        else:
            print(output)
        return
    if is_followed:
        from laurel.extensions.report.live import follow

        try:
            follow(runs, title=title, port=port, say=partial(print, flush=True))
        except KeyboardInterrupt:  # ends the server, which has printed a message
            raise typer.Exit(130) from None
        return
    from laurel.extensions.report.page import findings_of, write_report

    write_report(output, runs, title=title)
    if as_json:
        write_json({"page": output, "runs": findings_of(runs)})
    else:
        print(output)
