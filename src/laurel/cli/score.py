"""`laurel score`: conversations in, what a reward model says of each out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from laurel.data.conversations import STDIN, ScoringRow, read_scoring_rows
from laurel.errors import counted
from laurel.observe.console import make_console, message_console, print_scores, say_on
from laurel.observe.files import check_output, replace_file
from laurel.observe.json_output import json_stream, json_text
from laurel.observe.progress import RowProgress
from laurel.rewards.spec import Say, ScorerSpec
from laurel.run.specs import asked_scorer, open_asked

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.rewards.scorer import LocalScorer
    from laurel.types import Score

CHUNK = 256
"""Rows that are read, scored and written at a time; more are never held."""

ScoredRows = Sequence[tuple[ScoringRow, tuple["Score", ...]]]
Write = Callable[[ScoredRows], None]


def run_score(
    file: str,
    *,
    model: str,
    columns: Mapping[str, str] | None = None,
    output: Path | None,
    as_json: bool,
    options: ScorerSpec,
    settings: Sequence[str] = (),
    cpu_threads: int | None = None,
    stdin: IO[bytes] | None = None,
) -> int:
    """Score every row of a file or of standard input, in order.

    Scores go to standard output, as a table or JSON lines, or to a file that is whole or not there;
    all else to standard error. What needs no model is checked first.

    Args:
        file: Rows; `-` is standard input. See `data.conversations`.
        model: A directory or a hub name. See `rewards.spec.find_model`.
        columns: See `data.conversations.read_scoring_rows`.
        output: Write JSON lines here.
        as_json: Print JSON lines.
        options: How the model is loaded and scores.
        settings: What `--set` says; see `policy_of_settings`.
        cpu_threads: On CPU; None is one per core.
        stdin: Stands in for the standard input of this process.

    Returns:
        The exit code: 1 where a completion has no score, else 0.

    Raises:
        UserError: A row, a model, a file or a setting that cannot be used.
    """
    messages = message_console()
    say = say_on(messages)
    spec = asked_scorer(model, options)
    if output is not None:
        check_output(output, read_from=file)
    rows, num_rows = _open_rows(file, columns or {}, stdin, say)
    scorer = open_asked(spec, settings, cpu_threads=cpu_threads, console=messages)
    rules = scorer.contract.rules
    tally = Tally(max_length=rules.max_length)
    with ExitStack() as stack:
        write = _writer(stack, output, as_json=as_json, has_attributes=bool(rules.attributes))
        shares_screen = (as_json or output is None) and json_stream().isatty()
        progress = RowProgress(messages, num_rows, chunk=CHUNK, shares_screen=shares_screen)
        stack.enter_context(progress)
        for scored in _scored(rows, scorer, progress):
            tally.add(scored)
            write(scored)
    tally.report(say)
    if output is not None:
        say(f"written to {output}")
    return 1 if tally.num_failed else 0


# ----------------------------------------------------------------------------------------- input


def _open_rows(
    file: str, columns: Mapping[str, str], stdin: IO[bytes] | None, say: Say
) -> tuple[Iterator[ScoringRow], int | None]:
    """The rows, and how many there are where that can be known.

    A file is read once before anything is scored: a bad row at its end is told at once, not after
    hours. Of standard input only the first row can be looked at.
    """
    if file != STDIN and Path(file).expanduser().is_file():
        num_rows = sum(1 for _ in read_scoring_rows(file, columns=columns))
        return read_scoring_rows(file, columns=columns), num_rows
    if file == STDIN and stdin is None and sys.stdin.isatty():
        say("reading conversations from the terminal, one JSON object a line; Ctrl-D ends them")
    rows = read_scoring_rows(file, columns=columns, stdin=stdin)
    first = next(rows)  # no rows at all is a DataError
    return chain([first], rows), None


def _chunks(rows: Iterable[ScoringRow], size: int) -> Iterator[list[ScoringRow]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _scored(
    rows: Iterable[ScoringRow], scorer: LocalScorer, progress: RowProgress
) -> Iterator[ScoredRows]:
    """The rows with their scores, a chunk at a time."""
    for chunk in _chunks(rows, CHUNK):
        progress.show()
        scores = scorer.score_now([row.group for row in chunk], on_batch=progress.advance)
        progress.hide(done=len(chunk))
        yield list(zip(chunk, scores, strict=True))


# ---------------------------------------------------------------------------------------- output


def _writer(stack: ExitStack, output: Path | None, *, as_json: bool, has_attributes: bool) -> Write:
    """What takes the scores of each chunk to where they are wanted."""
    streams: list[TextIO] = []
    if output is not None:
        streams.append(stack.enter_context(replace_file(output)))
    if as_json:
        streams.append(json_stream())
    if not streams:
        return _table_writer(make_console())

    def write_lines(scored: ScoredRows) -> None:
        lines = "".join(
            json_text(json_line(row, scores, has_attributes=has_attributes), indent=None) + "\n"
            for row, scores in scored
        )
        for stream in streams:
            stream.write(lines)
            stream.flush()

    return write_lines


def _table_writer(console: Console) -> Write:
    def write_table(scored: ScoredRows) -> None:
        print_scores(
            console,
            [
                (row.group.conversation(index), score)
                for row, scores in scored
                for index, score in enumerate(scores)
            ],
        )

    return write_table


def json_line(row: ScoringRow, scores: Sequence[Score], *, has_attributes: bool) -> dict[str, Any]:
    """What is written of a row: lists with one entry per completion, in the order of the row."""
    line: dict[str, Any] = {} if row.id is None else {"id": row.id}
    line["source"] = row.source
    line["scores"] = [score.value for score in scores]
    if has_attributes:
        line["values"] = [list(score.values_K) or None for score in scores]
    line["num_tokens"] = [score.num_tokens for score in scores]
    line["truncated"] = [score.truncated for score in scores]
    line["failures"] = [score.failure for score in scores]
    return line


@dataclass(slots=True, kw_only=True)
class Tally:
    """What has to be said at the end: how many, how fast, and what went wrong."""

    max_length: int
    num_rows: int = 0
    num_completions: int = 0
    num_truncated: int = 0
    num_failed: int = 0
    first_failure: str = ""
    started: float = field(default_factory=time.monotonic)

    def add(self, scored: ScoredRows) -> None:
        """Count the scores of some rows."""
        self.num_rows += len(scored)
        for row, scores in scored:
            self.num_completions += len(scores)
            self.num_truncated += sum(score.truncated for score in scores)
            for score in scores:
                if score.failure is not None:
                    self.num_failed += 1
                    self.first_failure = self.first_failure or f"{row.group.id}: {score.failure}"

    def report(self, say: Say) -> None:
        """Say it."""
        seconds = time.monotonic() - self.started
        say(
            f"scored  {counted(self.num_completions, 'completion')} in "
            f"{counted(self.num_rows, 'row')}, {seconds:.1f} s "
            f"({self.num_completions / max(seconds, 1e-9):,.0f}/s)"
        )
        if self.num_truncated:
            say(
                f"note    {counted(self.num_truncated, 'conversation')} cut to {self.max_length:,} "
                "tokens"
            )
        if self.num_failed:
            say(
                f"FAILED  {counted(self.num_failed, 'completion')} without a score; the first: "
                f"{self.first_failure}"
            )
