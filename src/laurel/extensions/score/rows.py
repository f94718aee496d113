"""Reads conversations to score, from a file, standard input or a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Literal, NamedTuple

from laurel.config.data import DatasetConfig
from laurel.config.load import COLUMNS_IN_WORDS
from laurel.data.benchmarks import ANSWER_LISTS
from laurel.data.columns import (
    ANSWERS,
    QUESTIONS,
    ColumnNotes,
    find_question,
    question_of,
    refuse_tools,
    with_system,
)
from laurel.data.preferences import (
    PUBLISHED,
    binary,
    infer_class,
    ranked_row,
)
from laurel.data.sources import (
    Row,
    UnusableRow,
    answer,
    as_row,
    is_list,
    json_lines,
    locate,
    messages,
    read_rows,
    required,
    unlike,
)
from laurel.data.steps import is_trl_row, joined_steps, trl_row
from laurel.errors import DataError
from laurel.types import Completion, Conversation, Group, Message

STDIN = "-"
"""The path that stands for standard input."""

_COLUMNS = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRow:
    """A row to score: a prompt and its completions."""

    group: Group
    """The prompt and its completions in the row's order; the group's id is the row's place."""
    source: str
    """The row's place: `file:line`, or `name[index]` if the format has no lines."""
    id: str | int | None = None
    """The value of the row's `id` column, if that is a text or a whole number."""
    problem: str | None = None
    """The reason why the row cannot be read, if it cannot; its group is then empty."""
    labelled: Row | None = None
    """The row itself if it has texts with `labels`, as in training of process reward models."""


class _Parts(NamedTuple):
    prompt: Conversation
    completions_G: tuple[Completion, ...]


def read_scoring_rows(
    path: str,
    *,
    columns: Mapping[str, str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    stdin: IO[bytes] | None = None,
    notes: ColumnNotes | None = None,
) -> Iterator[ScoringRow]:
    """Yield the rows of a file or of standard input, in any format that preferences are read from.

    Rows are read lazily, so memory never holds the whole file.

    Args:
        path: The file; `-` is standard input, which holds JSON lines.
        columns: The columns with other names, by the keys of the `data` section: `prompt_key`,
            `chosen_key`, `rejected_key`, `system_key`.
        on_bad_row: Whether an unreadable row is an error, or is yielded with its `problem`.
        stdin: A stream that is read in place of this process's standard input.

    Raises:
        DataError: A row cannot be read (the message has its file and line), or there are no rows.
    """
    ready: list[ScoringRow] = []

    def place(source: str) -> str:
        return source if path == STDIN else locate(path, source)

    def complain(source: str, problem: UnusableRow) -> None:
        ready.append(_bad_row(problem, source, place(source), on_bad_row))

    if path == STDIN:
        rows = _stdin_rows(stdin if stdin is not None else sys.stdin.buffer, complain)
    else:
        rows = read_rows(path, on_bad_row=complain)
    for source, row in rows:
        read = scoring_row(
            row, source=source, where=place(source), columns=columns, on_bad_row=on_bad_row
        )
        ready.append(read)
        if notes is not None and read.problem is None:
            turns = (turn for one in read.group.completions_G for turn in one.messages)
            numbers = ("labels", "overall_preference") if read.labelled is None else read.labelled
            notes.look(source, row, (*read.group.prompt, *turns), read=numbers)
        # Lines before this one that hold no row are among them.
        yield from ready
        ready.clear()
    yield from ready


def scoring_row(
    row: Row,
    *,
    source: str,
    where: str,
    columns: Mapping[str, str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
) -> ScoringRow:
    """Read the prompt and the completions of a row to score.

    Args:
        where: The row's place with the path of the file, for messages and as the group's id.

    Raises:
        DataError: The row cannot be read.
    """
    try:
        # The shapes know columns by their default names.
        named = {
            key.removesuffix("_key"): required(row, column, setting=key)
            for key, column in (columns or {}).items()
            if key != "system_key"
        }
        row = as_row(row)
        system_key = (columns or {}).get("system_key")
        merged = {**row, **named}
        refuse_tools(merged)
        prompt, completions_G = _parts(merged, written=row)
        prompt = with_system(row, prompt, system_key)
    except UnusableRow as problem:
        return _bad_row(problem, source, where, on_bad_row)
    own_id = row.get("id")
    return ScoringRow(
        group=Group(id=where, prompt=prompt, completions_G=completions_G),
        source=source,
        id=own_id if isinstance(own_id, str | int) and not isinstance(own_id, bool) else None,
        labelled=merged if _has_labelled_texts(merged) else None,
    )


def with_steps_joined(
    row: ScoringRow, separator: str, on_bad_row: Literal["error", "skip"]
) -> ScoringRow:
    """Return a row for a process reward model: labelled completions are steps of one answer.

    Args:
        row: A row; one without labels is returned as it is.

    Raises:
        DataError: A step is empty, or holds the separator; or the labels do not fit the steps.
    """
    if row.labelled is None:
        return row
    try:
        (steps,) = trl_row(row.labelled, "prompt").answers_GS
        text, _ = joined_steps(steps, separator)
    except UnusableRow as problem:
        return _bad_row(problem, row.source, row.group.id, on_bad_row)
    answered = Completion(messages=(Message("assistant", text),))
    return replace(row, group=replace(row.group, completions_G=(answered,)))


def _has_labelled_texts(row: Row) -> bool:
    # `completions` may be null where the row has its answer under another name.
    steps = row.get("completions")
    return is_trl_row(row, "prompt") and is_list(steps) and all(isinstance(s, str) for s in steps)


def _bad_row(
    problem: UnusableRow, source: str, where: str, on_bad_row: Literal["error", "skip"]
) -> ScoringRow:
    if on_bad_row == "error":
        raise DataError(f"{where}: {problem}{problem.program_in_words}") from problem
    said = f"{where}: {problem.message}. {problem.remedy}."
    nothing = Group(id=where, prompt=(), completions_G=())
    return ScoringRow(group=nothing, source=source, problem=said)


def _stdin_rows(
    stream: IO[bytes], refuse: Callable[[str, UnusableRow], None]
) -> Iterator[tuple[str, Row]]:
    is_empty = True
    for row in json_lines(stream, "stdin", refuse):
        is_empty = False
        yield row
    if is_empty:
        raise DataError(
            f"standard input holds no rows. Pipe JSON lines into it, each {_SHAPES_IN_WORDS}; or "
            "name a file"
        )


def _parts(row: Row, *, written: Row) -> _Parts:
    for shape in _SHAPES:
        if shape.fits(row):
            return shape.read(row)
    raise UnusableRow(
        "unknown shape",
        f"the row has the keys {', '.join(map(str, written)) or '(none)'}, which say no "
        "conversation",
        remedy=f"A row can be {_SHAPES_IN_WORDS}; or name its columns ({COLUMNS_IN_WORDS})",
    )


def _list_of_completions(row: Row) -> _Parts:
    key = _first_of(row, ANSWER_LISTS)
    values = required(row, key)
    if not is_list(values):
        raise unlike(values, "a list", what=f"'{key}'")
    if not values:
        raise UnusableRow("no completions", f"'{key}' is empty, so there is nothing to score")
    prompt = _prompt(row, key)
    places = enumerate(values, start=1)
    return _Parts(
        prompt, tuple(_completion(value, prompt, f"completion {n}") for n, value in places)
    )


def _completions_at(row: Row, *keys: str) -> _Parts:
    prompt = _prompt(row, *keys)
    return _Parts(
        prompt, tuple(_completion(required(row, key), prompt, f"'{key}'") for key in keys)
    )


def _chosen_and_rejected(row: Row) -> _Parts:
    pair = binary(row, _COLUMNS)
    return _Parts(pair.prompt, pair.completions_G)


def _whole_conversation(row: Row) -> _Parts:
    value = required(row, "messages")
    if isinstance(value, str):
        raise unlike(value, "a list", what="'messages'", form="a list of messages")
    conversation = messages(value, role="assistant", what="'messages'")
    conversation = answer(conversation, what="'messages'")
    return _Parts(conversation[:-1], (Completion(messages=conversation[-1:]),))


def _published(row: Row) -> _Parts:
    name, _ = infer_class(row, _COLUMNS) or ("", "")
    read = ranked_row(row, name, _COLUMNS, ())
    return _Parts(read.prompt, read.completions_G)


class _Shape(NamedTuple):
    written: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], _Parts]


# The most specific first: data sets often repeat the chosen conversation under `messages`.
_SHAPES = (
    _Shape(
        f"of {', '.join(PUBLISHED)}",
        lambda row: (infer_class(row, _COLUMNS) or ("",))[0] in PUBLISHED,
        _published,
    ),
    _Shape(
        '{"prompt": ..., "completions": [..., ...]} (also "context" for "prompt", "responses" for '
        '"completions", and {"rank", "completion"} for a completion)',
        lambda row: _has(row, QUESTIONS) and _has(row, ANSWER_LISTS),
        _list_of_completions,
    ),
    _Shape(
        '{"prompt": ..., "chosen": ..., "rejected": ...} (without "prompt" where the two are whole '
        "conversations)",
        lambda row: (infer_class(row, _COLUMNS) or ("",))[0] == "BinaryPreferenceDataset",
        _chosen_and_rejected,
    ),
    _Shape(
        '{"context": ..., "response1": ..., "response2": ...}',
        lambda row: _has(row, QUESTIONS) and {"response1", "response2"} <= row.keys(),
        lambda row: _completions_at(row, "response1", "response2"),
    ),
    _Shape(
        '{"prompt": ..., "completion": ...} (also "response" for "completion")',
        lambda row: _has(row, QUESTIONS) and _has(row, ANSWERS),
        lambda row: _completions_at(row, _first_of(row, ANSWERS)),
    ),
    _Shape('{"messages": [...]}', lambda row: "messages" in row, _whole_conversation),
)
_SHAPES_IN_WORDS = "; or ".join(shape.written for shape in reversed(_SHAPES))


def _has(row: Row, keys: Sequence[str]) -> bool:
    return any(row.get(key) is not None for key in keys)


def _first_of(row: Row, keys: Sequence[str]) -> str:
    return next(key for key in keys if row.get(key) is not None)


def _prompt(row: Row, *answers: str) -> Conversation:
    return question_of(row, find_question(row, but=answers) or QUESTIONS[0], but=answers)


def _completion(value: Any, prompt: Conversation, what: str) -> Completion:
    """Read a completion from text, a message, messages, or an object that holds one of these.

    Messages may begin by repeating the prompt, as whole conversations do.
    """
    if isinstance(value, Mapping):
        if "role" in value and "content" in value:
            value = [value]
        elif _has(value, ANSWERS):
            value = value[_first_of(value, ANSWERS)]
        else:
            raise UnusableRow(
                "a completion of no known form",
                f"{what} is an object with the keys {', '.join(map(str, value)) or '(none)'}, and "
                "neither a message nor one with 'completion'",
            )
    said = messages(value, role="assistant", what=what)
    if prompt and len(said) > len(prompt) and said[: len(prompt)] == prompt:
        said = said[len(prompt) :]
    return Completion(messages=answer(said, what=what))
