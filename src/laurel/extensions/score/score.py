"""Runs `laurel score`: reads conversations, scores them with a reward model, writes the scores."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO

from rich.console import Console
from rich.text import Text

from laurel.data.columns import ColumnNotes
from laurel.errors import DataError, counted, counted_that, if_interrupted
from laurel.extensions.score.rows import (
    STDIN,
    ScoringRow,
    read_scoring_rows,
    with_steps_joined,
)
from laurel.observe.console import (
    format_number,
    make_console,
    message_console,
    new_table,
    print_table,
    say_on,
    shorten_middle,
    visible,
)
from laurel.observe.files import check_output, replace_file
from laurel.observe.json_output import json_stream, json_text
from laurel.observe.progress import RowProgress
from laurel.rewards.spec import Say, ScorerSpec
from laurel.run.specs import asked_scorer, check_judge, open_asked, open_asked_judge, read_judge
from laurel.types import Conversation, Score

if TYPE_CHECKING:
    from laurel.models.scoring import ScoringContract
    from laurel.types import Group

CHUNK = 256
"""The number of rows that are read, scored and written at a time, which bounds the memory."""

ScoredRows = Sequence[tuple[ScoringRow, tuple[Score, ...]]]
Advance = Callable[[int, int], None]
ScoreRows = Callable[["Sequence[Group]", Advance], "list[tuple[Score, ...]]"]
Write = Callable[[ScoredRows], None]


_ANSWER_LENGTH = 320
_MESSAGES_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFile:
    """The rows to score, as `read_scoring_rows` reads them."""

    file: str
    """`-` is standard input."""
    columns: Mapping[str, str] | None = None
    """Keys of `data` and the names of their columns."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether a row that cannot be read is an error, or gets a failure for a score."""
    stdin: IO[bytes] | None = None
    """A stream that is read in place of this process's standard input."""

    def _read(self, notes: ColumnNotes | None) -> Iterator[ScoringRow]:
        return read_scoring_rows(
            self.file,
            columns=self.columns,
            on_bad_row=self.on_bad_row,
            stdin=self.stdin,
            notes=notes,
        )

    def open(self, notes: ColumnNotes, say: Say) -> tuple[Iterator[ScoringRow], int | None]:
        """Open the rows, and count them if that is possible."""
        if self.file != STDIN and Path(self.file).expanduser().is_file():
            # One pass before anything is scored: a bad row at the end is reported now, not in
            # hours.
            problems = [row.problem for row in self._read(notes)]
            if problems and all(problems):
                count = counted(len(problems), "row")
                raise DataError(
                    f"{self.file}: none of its {count} can be read; the first: {problems[0]}"
                )
            return self._read(None), len(problems)
        if self.file == STDIN and self.stdin is None and sys.stdin.isatty():
            say(
                "reading conversations from the terminal, one JSON object per line; Ctrl-D ends "
                "them"
            )
        rows = self._read(notes)
        first = next(rows)  # raises a DataError if there are no rows
        return chain([first], rows), None


def run_score(
    rows_file: RowsFile,
    *,
    model: str,
    judge_file: Path | None = None,
    output: Path | None,
    as_json: bool,
    options: ScorerSpec,
    settings: Sequence[str] = (),
    cpu_threads: int | None = None,
) -> int:
    """Score every row of a file or of standard input, in order.

    Scores go to standard output, as a table or JSON lines, or to a file, which is written whole or
    not at all; messages go to standard error. Everything that needs no model is checked first.

    Args:
        model: A directory or a hub name, as `rewards.spec.find_model` reads it.
        judge_file: The file of a judge that scores in place of a model.
        settings: The settings of `--set`, as `policy_of_settings` reads them.
        cpu_threads: The number of threads on a CPU; None is as `prepare` chooses.

    Returns:
        The exit code: 1 if a completion has no score, or none could be read; otherwise 0.

    Raises:
        UserError: A row, a model, a file or a setting cannot be used.
    """
    messages = message_console()
    say = say_on(messages)
    judge = None if judge_file is None else read_judge(judge_file, say=say)
    if judge is not None:
        check_judge(judge)
    spec = options if judge is not None else asked_scorer(model, options)
    # Before the model is loaded: that it cannot be written is known at once.
    if output is not None:
        check_output(output, read_from=rows_file.file)
    notes = ColumnNotes()
    rows, num_rows = rows_file.open(notes, say)
    tally = Tally()
    with if_interrupted(lambda: tally.kept(output)), ExitStack() as stack:
        has_values = False
        score: ScoreRows
        if judge is not None:
            asked = stack.enter_context(
                open_asked_judge(judge, options, messages, cpu_threads=cpu_threads)
            )

            def score(groups: Sequence[Group], _: Advance) -> list[tuple[Score, ...]]:
                return asked.score_now(groups)

        else:
            scorer = open_asked(spec, settings, cpu_threads=cpu_threads, console=messages)
            rules = scorer.contract.rules
            has_values = bool(rules.attributes) or rules.steps is not None
            tally.max_length, score = rules.max_length, scorer.score_now
            tally.contract = scorer.contract
            if rules.steps is not None:
                separator = rules.steps.separator
                rows = (with_steps_joined(row, separator, rows_file.on_bad_row) for row in rows)
        write = _writer(stack, output, as_json=as_json, has_values=has_values)
        shares_screen = (as_json or output is None) and json_stream().isatty()
        progress = RowProgress(messages, num_rows, chunk=CHUNK, shares_screen=shares_screen)
        stack.enter_context(progress)
        for scored in _scored(rows, score, progress):
            tally.add(scored)
            write(scored)
    tally.report(say)
    for note in notes.notes():
        say(f"note    {note}")
    if output is not None:
        say(f"wrote the scores to {output}")
    is_all_bad = tally.num_bad_rows > 0 and not tally.num_completions
    return 1 if tally.num_failed or is_all_bad else 0


def _scored(
    rows: Iterable[ScoringRow], score: ScoreRows, progress: RowProgress
) -> Iterator[ScoredRows]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK)):
        progress.show()
        groups = [row.group for row in chunk if row.problem is None]
        scores = iter(score(groups, progress.advance))
        progress.hide(done=len(chunk))
        yield [
            (row, next(scores))
            if row.problem is None
            else (row, (Score(value=None, failure=row.problem),))
            for row in chunk
        ]


def _writer(stack: ExitStack, output: Path | None, *, as_json: bool, has_values: bool) -> Write:
    streams: list[TextIO] = []
    if output is not None:
        streams.append(stack.enter_context(replace_file(output)))
    if as_json:
        streams.append(json_stream())
    if not streams:
        console = make_console()
        return lambda scored: print_scores(
            console,
            [
                (row.group.conversation(index) if row.problem is None else (), score)
                for row, scores in scored
                for index, score in enumerate(scores)
            ],
        )

    def write_lines(scored: ScoredRows) -> None:
        lines = "".join(
            json_text(json_line(row, scores, has_values=has_values), indent=None) + "\n"
            for row, scores in scored
        )
        for stream in streams:
            stream.write(lines)
            # A program that reads the pipe gets each chunk, and a kill loses no more than one.
            stream.flush()

    return write_lines


def print_scores(console: Console, rows: Sequence[tuple[Conversation, Score]]) -> None:
    """Print conversations with their scores, or with the reasons why they have none."""
    if not rows:
        console.print(Text("no conversations"))
        return
    table = new_table("")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("conversation", overflow="fold")
    for conversation, score in rows:
        if score.value is None:
            number = Text("failed", style="red")
        else:
            number = Text(format_number(score.value))
        table.add_row(number, _conversation(conversation, score), end_section=True)
    print_table(console, table)


def _conversation(conversation: Conversation, score: Score) -> Text:
    # Each message has one line; a long conversation is shown by its first and its last messages.
    lines = Text()
    hidden = range(1, len(conversation) - _MESSAGES_SHOWN + 1)
    for index, message in enumerate(conversation):
        if index in hidden:
            if index == hidden.start:
                lines.append(f"... {len(hidden)} more messages ...\n", style="dim")
            continue
        lines.append(f"{visible(message.role)}: ", style="dim")
        lines.append(shorten_middle(message.content, _ANSWER_LENGTH) + "\n")
    if score.failure is not None:
        lines.append(shorten_middle(score.failure, _ANSWER_LENGTH), style="red")
    elif score.truncated:
        lines.append(f"(cut to {score.num_tokens:,} tokens)", style="yellow")
    lines.rstrip()
    return lines


def json_line(row: ScoringRow, scores: Sequence[Score], *, has_values: bool) -> dict[str, Any]:
    """Return a row's scores as one line of JSON output, with one list entry per completion."""
    line: dict[str, Any] = {} if row.id is None else {"id": row.id}
    line["source"] = row.source
    line["scores"] = [score.value for score in scores]
    if has_values:
        line["values"] = [list(score.values_K) or None for score in scores]
    line["num_tokens"] = [score.num_tokens for score in scores]
    line["truncated"] = [score.truncated for score in scores]
    line["failures"] = [score.failure for score in scores]
    return line


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts scored rows, speed and problems for the summary at the end of `laurel score`."""

    max_length: int = 0
    num_rows: int = 0
    num_completions: int = 0
    contract: ScoringContract | None = None
    """The contract of the model; None for a judge."""
    loses_thoughts: bool | None = None
    """Whether its template leaves out thoughts; None before an answer has some."""
    first_thoughts: str = ""
    num_truncated: int = 0
    num_failed: int = 0
    first_failure: str = ""
    num_bad_rows: int = 0
    first_problem: str = ""
    started: float = field(default_factory=time.monotonic)

    def add(self, scored: ScoredRows) -> None:
        """Add the counts of one chunk of scored rows to the totals."""
        for row, scores in scored:
            if row.problem is not None:
                self.num_bad_rows += 1
                self.first_problem = self.first_problem or row.problem
                continue
            self.num_rows += 1
            has_failed = any(score.failure is not None for score in scores)
            if self.contract is not None and self.loses_thoughts is None and not has_failed:
                self.loses_thoughts = self.contract.loses_thoughts(row.group)
                self.first_thoughts = row.source
            self.num_completions += len(scores)
            self.num_truncated += sum(one.truncated and one.failure is None for one in scores)
            for score in scores:
                if score.failure is not None:
                    self.num_failed += 1
                    self.first_failure = self.first_failure or f"{row.group.id}: {score.failure}"

    def kept(self, output: Path | None) -> str:
        """Say what an interrupted command leaves: lines on the screen, or nothing in its file."""
        scored = f"{counted(self.num_rows, 'row')} scored"
        return scored if output is None else f"{scored}, and {output} is not written"

    def report(self, say: Say) -> None:
        """Print the counts, and how many completions were truncated or failed."""
        seconds = time.monotonic() - self.started
        say(
            f"scored  {counted(self.num_completions, 'completion')} in "
            f"{counted(self.num_rows, 'row')}, {seconds:.1f} s "
            f"({self.num_completions / max(seconds, 1e-9):,.1f}/s)"
        )
        if self.num_truncated:
            say(
                f"note    {counted_that(self.num_truncated, 'conversation', 'were')} cut to "
                f"{self.max_length:,} tokens"
            )
        if self.loses_thoughts:
            say(
                "note    the chat template leaves out the thoughts of answers (<think> ... "
                f"</think>), so that they are not scored (first in {self.first_thoughts})"
            )
        if self.num_failed:
            say(
                f"FAILED  {counted(self.num_failed, 'completion')} got no score; the first: "
                f"{self.first_failure}"
            )
        if self.num_bad_rows:
            say(
                f"FAILED  {counted(self.num_bad_rows, 'row')} could not be read; the first: "
                f"{self.first_problem}"
            )
