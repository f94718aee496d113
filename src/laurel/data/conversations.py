"""Conversations to be scored, from a file or standard input: each row becomes one group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, NoReturn

from laurel.config.preference_data import DatasetConfig
from laurel.data.benchmark_rows import ANSWER_LISTS
from laurel.data.cells import Row, UnusableRow, answer, kind_of, messages, required
from laurel.data.file_formats import json_lines
from laurel.data.row_formats import binary, infer_class
from laurel.data.sources import locate, read_rows
from laurel.errors import DataError
from laurel.types import Completion, Conversation, Group

STDIN = "-"
"""What stands for standard input where a file is asked for."""

_PROMPTS = ("prompt", "context", "question")
_ANSWERS = ("completion", "response")
_COLUMNS = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRow:
    """A prompt and the completions that a row asks to be scored."""

    group: Group
    """Its completions are in the order of the row; its id says where the row stands."""
    source: str
    """`file:line`, or `name[index]` where the format has no lines."""
    id: str | int | None = None
    """What the row calls itself under `id`, where that is a text or a whole number."""


class _Parts(NamedTuple):
    prompt: Conversation
    completions_G: tuple[Completion, ...]


def read_scoring_rows(
    path: str, *, columns: Mapping[str, str] | None = None, stdin: IO[bytes] | None = None
) -> Iterator[ScoringRow]:
    """The rows of a file, in any format that preferences are read from, or of standard input.

    Nothing is held: rows are read as they are asked for.

    Args:
        path: The file; `-` is standard input, JSON lines.
        columns: Columns of other names, by the keys of the `data` section: `prompt_key`,
            `chosen_key`, `rejected_key`.
        stdin: Stands in for the standard input of this process.

    Raises:
        DataError: A row that cannot be read, with its file and line; no rows at all.
    """

    def refuse(source: str, problem: UnusableRow) -> NoReturn:
        where = source if path == STDIN else locate(path, source)
        raise DataError(f"{where}: {problem.message}. {problem.remedy}.") from problem

    if path == STDIN:
        rows = _stdin_rows(stdin if stdin is not None else sys.stdin.buffer, refuse)
    else:
        rows = read_rows(path, on_bad_row=refuse)
    for source, row in rows:
        where = source if path == STDIN else locate(path, source)
        yield scoring_row(row, source=source, where=where, columns=columns)


def scoring_row(
    row: Row, *, source: str, where: str, columns: Mapping[str, str] | None = None
) -> ScoringRow:
    """What a row asks to be scored.

    Args:
        row: In any of the shapes that a file's rows may have.
        source: See `ScoringRow.source`.
        where: The same with the place of the file, for messages and as the id of the group.
        columns: See `read_scoring_rows`.

    Raises:
        DataError: It cannot be read.
    """
    try:
        prompt, completions_G = _parts(_as_called(row, columns or {}))
    except UnusableRow as problem:
        raise DataError(f"{where}: {problem.message}. {problem.remedy}.") from problem
    own_id = row.get("id")
    return ScoringRow(
        group=Group(id=where, prompt=prompt, completions_G=completions_G),
        source=source,
        id=own_id if isinstance(own_id, str | int) and not isinstance(own_id, bool) else None,
    )


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


# ---------------------------------------------------------------------------------------- shapes


def _parts(row: Row) -> _Parts:
    """What the row says, by the first shape that it has."""
    for shape in _SHAPES:
        if shape.fits(row):
            return shape.read(row)
    raise UnusableRow(
        "unknown shape",
        f"the row has the keys {', '.join(map(str, row)) or '(none)'}, which say no conversation",
        remedy=f"A row can be {_SHAPES_IN_WORDS}",
    )


def _as_called(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the columns that are named under the names that they have by default."""
    named = {
        key.removesuffix("_key"): required(row, column, setting=key)
        for key, column in columns.items()
    }
    return {**row, **named} if named else row


def _list_of_completions(row: Row) -> _Parts:
    key = _first_of(row, ANSWER_LISTS)
    values = required(row, key)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UnusableRow(
            f"'{key}' is not a list",
            f"'{key}' is {kind_of(values)} where a list is expected",
        )
    if not values:
        raise UnusableRow("no completions", f"'{key}' is empty, so there is nothing to score")
    prompt = _prompt(row)
    places = enumerate(values, start=1)
    return _Parts(
        prompt, tuple(_completion(value, prompt, f"completion {n}") for n, value in places)
    )


def _one_completion(row: Row) -> _Parts:
    prompt, key = _prompt(row), _first_of(row, _ANSWERS)
    return _Parts(prompt, (_completion(required(row, key), prompt, f"'{key}'"),))


def _two_responses(row: Row) -> _Parts:
    prompt, keys = _prompt(row), ("response1", "response2")
    return _Parts(
        prompt, tuple(_completion(required(row, key), prompt, f"'{key}'") for key in keys)
    )


def _chosen_and_rejected(row: Row) -> _Parts:
    judged = binary(row, _COLUMNS)
    return _Parts(judged.prompt, judged.completions_G)


def _whole_conversation(row: Row) -> _Parts:
    value = required(row, "messages")
    if isinstance(value, str):
        raise UnusableRow(
            "'messages' is not a list",
            "'messages' is a string where a list of messages is expected",
        )
    conversation = messages(value, role="assistant", what="'messages'")
    conversation = answer(conversation, what="'messages'")
    return _Parts(conversation[:-1], (Completion(messages=conversation[-1:]),))


class _Shape(NamedTuple):
    """A form that a row can have."""

    written: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], _Parts]


def _has_prompt_and(*keys: str) -> Callable[[Row], bool]:
    return lambda row: _has(row, _PROMPTS) and all(key in row for key in keys)


# The most specific first: data sets often repeat the chosen conversation under `messages`.
_SHAPES = (
    _Shape(
        '{"prompt": ..., "completions": [..., ...]} (also "context" for "prompt", "responses" for '
        '"completions", and {"rank", "completion"} for a completion)',
        lambda row: _has(row, _PROMPTS) and _has(row, ANSWER_LISTS),
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
        _has_prompt_and("response1", "response2"),
        _two_responses,
    ),
    _Shape(
        '{"prompt": ..., "completion": ...} (also "response" for "completion")',
        lambda row: _has(row, _PROMPTS) and _has(row, _ANSWERS),
        _one_completion,
    ),
    _Shape('{"messages": [...]}', lambda row: "messages" in row, _whole_conversation),
)
_SHAPES_IN_WORDS = "; or ".join(shape.written for shape in reversed(_SHAPES))


def _has(row: Row, keys: Sequence[str]) -> bool:
    return any(row.get(key) is not None for key in keys)


def _first_of(row: Row, keys: Sequence[str]) -> str:
    return next(key for key in keys if row.get(key) is not None)


def _prompt(row: Row) -> Conversation:
    key = _first_of(row, _PROMPTS)
    return messages(row[key], role="user", what=f"'{key}'")


def _completion(value: Any, prompt: Conversation, what: str) -> Completion:
    """A completion: text, a message, messages, or an object that holds one of these.

    Messages may begin by repeating the prompt, as whole conversations do.
    """
    if isinstance(value, Mapping):
        if "role" in value and "content" in value:
            value = [value]
        elif _has(value, _ANSWERS):
            value = value[_first_of(value, _ANSWERS)]
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
