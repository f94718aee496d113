"""Reads rows, each with its place, from local files, saved data sets and the Hugging Face hub."""

from __future__ import annotations

import ast
import codecs
import contextlib
import csv
import difflib
import glob
import gzip
import importlib
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeGuard, cast

from laurel.errors import DataError, no_file_at
from laurel.observe.hub import WITHOUT_ASKING, why_not_fetched
from laurel.types import Conversation, Message

# Takes typed values out of a row, or says what is wrong with it.

Row = Mapping[str, Any]

LEAVE_OUT = "set data.on_bad_row=skip to leave such rows out and count them"


class UnusableRow(Exception):
    """Raised for a row that cannot be used; only `laurel.data` and readers of rows catch it.

    `message` states the problem, `kind` is the short phrase that such rows are counted under, and
    `remedy` is advice that replaces the general advice to fix the row. `lacks_columns` is True if
    the expected columns may exist under other names. `program` is two lines of Python that write
    the rows of `FILE` in a form that can be read.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        remedy: str = "Fix the row",
        lacks_columns: bool = False,
        program: str = "",
    ) -> None:
        super().__init__(kind, message, remedy)
        self.kind = kind
        self.message = message
        self.remedy = remedy
        self.lacks_columns = lacks_columns
        self.program = program

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}, or {LEAVE_OUT}."

    @property
    def program_in_words(self) -> str:
        """Return the program with a sentence before it, empty if there is none."""
        return f" These two lines of Python do it:\n{self.program}" if self.program else ""


def required(row: Row, key: str, *, setting: str | None = None) -> Any:
    """Return the value of a column that a row must have.

    `setting` is the configuration key that can name another column, for the message.

    Raises:
        UnusableRow: The column is missing.
    """
    value = row.get(key)
    if value is not None:
        return value
    kind = f"missing key '{key}'"
    if key in row:
        raise UnusableRow(f"'{key}' is null", f"'{key}' is null")
    keys = [str(other) for other in row]
    message = f"the row has no '{key}'; its keys are: {', '.join(keys) or 'none'}"
    if setting is None:
        raise UnusableRow(kind, message)
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f" ('{near[0]}'?)" if near else ""
    raise UnusableRow(
        kind,
        message,
        remedy=f"Set data.{setting} to the key that holds it{hint}",
        lacks_columns=True,
    )


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Report whether a value is what JSON calls a list."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def unlike(value: Any, expected: str, *, what: str, form: str = "") -> UnusableRow:
    """Return the problem of a value that is not `expected`, such as `a list`.

    `what` names the value in messages, and `form` says what is expected in more detail.
    """
    return UnusableRow(
        f"{what} is not {expected}",
        f"{what} is {json_kind(value)} where {form or expected} is expected",
    )


def text(value: Any, *, what: str) -> str:
    """Return a value that must be text which UTF-8 can encode; `what` names it in messages.

    Raises:
        UnusableRow: The value is no such text.
    """
    if not isinstance(value, str):
        raise unlike(value, "text", what=what)
    if "\0" in value:
        raise UnusableRow(
            f"{what} holds a NUL character",
            f"{what} holds a NUL character (\\u0000), which is no text, at character "
            f"{value.index(chr(0)) + 1}",
        )
    # ASCII holds no surrogates, and to see that is quicker than to encode.
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            broken = value[problem.start]
            raise UnusableRow(
                f"{what} holds half a character",
                f"{what} holds half of a surrogate pair (\\u{ord(broken):04x}) at character "
                f"{problem.start + 1}, which no tokenizer can read",
            ) from None
    return value


def integer(value: Any, *, what: str) -> int:
    """Return a value as a whole number; tables may hold it as `2.0` or `"2"`.

    Raises:
        UnusableRow: The value is no whole number.
    """
    number_value = number(value, what=what)
    if not number_value.is_integer():
        raise UnusableRow(
            f"{what} is not a whole number", f"{what} is {value!r} where a whole number is expected"
        )
    return int(number_value)


def number(value: Any, *, what: str) -> float:
    """Return a value as a finite number; a CSV file may hold it as text.

    Raises:
        UnusableRow: The value is no finite number.
    """
    result = math.nan
    # To Python `true` is 1.
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            result = float(value)
        except (ValueError, OverflowError):
            result = math.nan
    if not math.isfinite(result):
        shown = repr(value) if isinstance(value, int | float | str) else json_kind(value)
        raise UnusableRow(
            f"{what} is not a number", f"{what} is {shown:.60} where a finite number is expected"
        )
    return result


def number_at(row: Row, key: str, *, setting: str) -> float:
    """Return the number in column `key`; if there is no such column, `a-b` means a minus b.

    `setting` is the configuration key that names the column, for messages.
    """
    if key not in row:
        for place, character in enumerate(key):
            left, right = key[:place].strip(), key[place + 1 :].strip()
            if character == "-" and left in row and right in row:
                first = number(row[left], what=f"'{left}'")
                return first - number(row[right], what=f"'{right}'")
    return number(required(row, key, setting=setting), what=f"'{key}'")


def messages(value: Any, *, role: str, what: str) -> Conversation:
    """Return a value as a list of messages; plain text becomes one message of `role`.

    A transcript in place of a prompt becomes its turns, without an empty last one.

    Raises:
        UnusableRow: The value is neither text nor messages, or a prompt that is already rendered.
    """
    if isinstance(value, str):
        if role == "user" and is_transcript(value):
            said = parse_transcript(text(value, what=what))
            return said[:-1] if said[-1] == Message("assistant", "") else said
        if role == "user" and (found := _RENDERED.match(value)):
            raise UnusableRow(
                f"{what} is rendered text",
                f"{what} was rendered by a chat template (it begins with {found[0].strip()!r}), "
                "and the template of the model would make one message of it",
                remedy="Give it as text without such marks, or as messages {'role', 'content'}",
            )
        return (Message(role, text(value, what=what)),)
    if speaker(value) is not None:
        value = [value]
    if not is_list(value):
        raise unlike(value, "text or messages", what=what, form="text or a list of messages")
    return tuple(message(item, what=what) for item in value)


# Who speaks in turns of `from` and `value`, as ShareGPT writes them.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def speaker(value: Any) -> str | None:
    """Return who speaks in a message, as a role or as ShareGPT's name; None if it is no message."""
    if not isinstance(value, Mapping):
        return None
    if {"role", "content"} <= value.keys():
        return str(value["role"])
    return str(value["from"]) if {"from", "value"} <= value.keys() else None


_UNREAD_KEYS = {
    "tool_calls": "write the calls into its content, as the chat template writes them "
    "(docs/tools.md)",
    "function_call": "write the call into its content, as the chat template writes it "
    "(docs/tools.md)",
    "tools": "give the functions in the row's column 'tools' (laurel sft)",
    "name": "write the name into its content, or take the key out",
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def message(value: Any, *, what: str) -> Message:
    """Return an object with `role` and `content`, or with `from` and `value`, as a message.

    Thoughts beside the content come before it, between `<think>` and `</think>`, as templates of
    reasoning models read them. A `weight` of 0, or a `train` that is false, keeps an imitated turn
    out of the loss.

    Raises:
        UnusableRow: It is no such object, or a key of it would be left out.
    """
    if speaker(value) is None:
        shown = f"keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else repr(value)
        raise UnusableRow(
            f"{what} holds something that is no message",
            f"{what} holds something that is no {{'role': ..., 'content': ...}} and no "
            f"{{'from': ..., 'value': ...}}: {shown:.80}",
        )
    if "role" not in value or "content" not in value:
        role = _SPEAKERS.get(str(value["from"]).lower())
        if role is None:
            raise UnusableRow(
                "a speaker nobody knows",
                f"a turn is from {value['from']!r}; known are {', '.join(_SPEAKERS)}",
            )
        value = {**value, "role": role, "content": value["value"]}
    for key, remedy in _UNREAD_KEYS.items():
        if value.get(key):
            raise UnusableRow(
                f"{what} holds '{key}'",
                f"{what} holds a message with '{key}', which would be left out: {remedy}",
            )
    content = value["content"]
    if is_list(content):
        texts: list[str] = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
                raise UnusableRow(
                    f"{what} holds something other than text",
                    f"{what} holds a part that is not text: {part!r:.80}",
                )
            texts.append(text(part["text"], what=f"a turn in {what}"))
        content = "".join(texts)
    role = text(value["role"], what=f"a role in {what}")
    content = text(content, what=f"a turn in {what}")
    if (thought := thoughts_key(value)) is not None:
        thoughts = text(value[thought], what=f"'{thought}' in {what}").strip()
        if role != "assistant":
            raise UnusableRow(
                f"{what} holds '{thought}' of another role",
                f"{what} holds a message of role '{role}' with '{thought}', which would be left "
                "out",
            )
        if thoughts not in content:
            content = f"<think>\n{thoughts}\n</think>\n\n{content}"
    return Message(role, content, learned=_is_learned(value, what))


def thoughts_key(value: Row) -> str | None:
    """Return the key under which a message holds thoughts beside its content; None without any."""
    return next((key for key in _THOUGHTS if value.get(key)), None)


def _is_learned(value: Row, what: str) -> bool:
    said = [value[key] for key in ("weight", "train") if value.get(key) is not None]
    for one in said:
        if not isinstance(one, bool | int | float) or one not in (0, 1):
            raise UnusableRow(
                f"{what} holds a weight that is not 0 or 1",
                f"{what} holds a message with a weight of {one!r:.40}: a turn is learned or it is "
                "not, so that a 'weight' is 0 or 1, and a 'train' true or false",
            )
    return all(said)


def without_thoughts(content: str) -> str:
    """Return what an answer says after its thoughts, where it begins with `<think>`."""
    thoughts, ended, said = content.partition("</think>")
    return said.lstrip() if ended and thoughts.lstrip().startswith("<think>") else content


def answer(conversation: Conversation, *, what: str) -> Conversation:
    """Return a conversation after checking that its last message is the assistant's.

    Raises:
        UnusableRow: The last message is not the assistant's.
    """
    if not conversation or conversation[-1].role != "assistant":
        last = f"'{conversation[-1].role}'" if conversation else "nothing"
        raise UnusableRow(
            f"{what} does not end with an assistant turn",
            f"{what} must end with a message of role 'assistant', and ends with {last}",
        )
    return conversation


def json_kind(value: Any) -> str:
    """Return what JSON calls a value's type, such as an object or a list, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, Sequence) else f"a {type(value).__name__}"


# Conversations that are written as text: transcripts, printed lists of messages, rendered prompts.

# As HH-RLHF has them: one string in which `Human:` and `Assistant:` take turns.
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_START = "\n\nHuman:"
# As HelpSteer has prompts of several turns: the first is the user's, and has no mark.
_NEXT_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
# What opens a turn in well-known templates, perhaps after the token that begins a text.
_RENDERED = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>)?\s*"
    r"(?:<\|im_start\|>\w+\n|<\|start_header_id\|>\w+|<start_of_turn>\w+\n|\[INST\]"
    r"|<\|(?:system|user|assistant)\|>|<｜(?:User|Assistant)｜>|<\|start\|>\w+)"
)
_ENDED = re.compile(
    r"(?:<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>|<\|endoftext\|>|<end_of_turn>"
    r"|<｜end▁of▁sentence｜>|<\|return\|>)\s*$"
)
_SPOKEN = re.compile(
    r"\s*(?:Human|User|USER|H)\s*:.*^\s*(?:Assistant|ASSISTANT|A)\s*:", re.S | re.M
)


def is_transcript(value: object) -> bool:
    """Report whether a value is a text of several turns, as HH-RLHF's or HelpSteer's.

    HH-RLHF's transcripts begin with a `Human:` turn.
    """
    if not isinstance(value, str):
        return False
    if value.startswith(_START):
        return True
    # To look for a string is quicker than to search a pattern that may begin with a line break.
    return "<extra_id_1>" in value and _NEXT_TURN.search(value) is not None


def parse_transcript(transcript: str) -> Conversation:
    """Split a transcript into messages without surrounding blanks.

    A turn may be empty, and a role may repeat.
    """
    before, *parts = _NEXT_TURN.split(transcript)
    if parts:
        roles = ["user", *map(str.lower, parts[::2])]
        return tuple(map(Message, roles, [before, *parts[1::2]]))
    before, *parts = _TURN.split(transcript)
    if before or not parts:
        raise UnusableRow(
            "no transcript",
            f"a transcript starts with {_START!r}, and this one with {before!r:.40}",
        )
    return tuple(
        Message(_ROLES[speaker], said.strip())
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    )


def looks_written(content: str) -> str | None:
    """Say what a text that is taken as it is looks like: a transcript or a rendered turn, or None.

    Both may be meant as text, so that such rows are kept.
    """
    if _SPOKEN.match(content):
        return "a transcript ('User: ... Assistant: ...')"
    if found := _ENDED.search(content):
        return f"text that a template ended ({found[0].strip()})"
    return None


# A list or an object whose first key is in quotes, perhaps as NumPy prints it.
_PRINTED = re.compile(r"\s*(?:array\(\s*)?(\[?)\s*\{\s*['\"](\w+)['\"]\s*:")
_OF_MESSAGES = ({"role", "content"}, {"from", "value"})
_KEYS = frozenset().union(*_OF_MESSAGES)
_ANY_KEY = re.compile(r"""['"](?:role|from|completion)['"]\s*:""")
_OF_ANSWERS = ({"rank", "completion"}, {"completion", "attributes"})
_STRING = re.compile(r"('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")", re.DOTALL)


def printed_messages(written: str, *, what: str) -> list[Any] | dict[str, Any] | None:
    """Return the messages or ranked answers that a text holds as JSON or as Python prints them.

    The result is one of them, or a list; None if the text is something else. `what` names the value
    in messages.

    Raises:
        UnusableRow: The text begins as a list of messages does, and cannot be read as one.
    """
    found = _PRINTED.match(written)
    # Tests of programs are long, and other JSON need not be parsed.
    if found is None or (found[2] not in _KEYS and not _ANY_KEY.search(written)):
        return None
    for read in (_parse, _printed_by_python):
        try:
            values = read(written)
        except _RepeatedKeyError:
            break  # Python would read it
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        is_known = all(
            isinstance(value, dict)
            and any(keys <= value.keys() for keys in (*_OF_MESSAGES, *_OF_ANSWERS))
            for value in (values if isinstance(values, list) else [values])
        )
        return values if is_known else None
    if found[1] and found[2] in _KEYS:
        raise UnusableRow(
            "messages written as text that cannot be read",
            f"{what} holds messages as text that is neither JSON nor Python: {written:.60}",
            remedy="Write the messages as JSON (json.dumps), or the rows as JSON lines or Parquet",
        )
    return None


def _printed_by_python(written: str) -> Any:
    # NumPy names its arrays, and puts no commas between objects.
    listed = re.sub(r"^\s*array\(|,\s*dtype=object\s*\)\s*$|\)\s*$", "", written).strip()
    parts = _STRING.split(listed)
    parts[::2] = [re.sub(r"\}\s*\{", "}, {", part) for part in parts[::2]]
    return ast.literal_eval("".join(parts))


# How each file format is read into rows.

Rows = Iterator[tuple[str, Row]]
Complain = Callable[[str, UnusableRow], None]
"""A function that is called for each unreadable row with its source and the problem.

Reading continues if it returns, and ends if it raises.
"""
Reader = Callable[[IO[bytes], str, Complain], Rows]
"""A function that yields the rows of an open file, given its path and a `Complain` for bad rows."""

# Strings are matched first, so that a NaN inside one is not taken for the bare word.
_BARE_WORD = re.compile(r'"(?:\\.|[^"\\])*"|(-?Infinity|NaN)')
_LONGEST_CELL = 2**31 - 1
# What pandas calls the column that it writes without a name: the number of the row.
_PANDAS_INDEX = "Unnamed: 0"


class _NotANumber(ValueError):
    """Raised for a bare NaN or Infinity, which Python's parser accepts and JSON does not allow."""


class _RepeatedKeyError(json.JSONDecodeError):
    """Raised for an object with a key twice, of which Python's parser would keep the last."""


def _refuse(word: str) -> NoReturn:
    raise _NotANumber(word)


def _parse(content: str) -> Any:
    """Parse a JSON text.

    Raises:
        json.JSONDecodeError: The text is not JSON, or an object in it has a key twice; no other
            error is raised.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((key, _),) = Counter(name for name, _ in pairs).most_common(1)
            places = [match.start() for match in re.finditer(re.escape(json.dumps(key)), content)]
            said = f"the key {key!r} is twice in one object"
            raise _RepeatedKeyError(said, content, places[1] if len(places) > 1 else 0)
        return found

    try:
        return json.loads(content, parse_constant=_refuse, object_pairs_hook=unique)
    except json.JSONDecodeError:
        raise
    except _NotANumber as problem:
        places = [match.start(1) for match in _BARE_WORD.finditer(content) if match.group(1)]
        place = places[0] if places else 0
        raise json.JSONDecodeError(f"{problem} is no JSON value", content, place) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", content, 0) from None
    except ValueError as problem:  # a number with more digits than Python converts
        raise json.JSONDecodeError(str(problem), content, 0) from None


def _near(problem: json.JSONDecodeError) -> str:
    start, end = max(problem.pos - 30, 0), problem.pos + 30
    snippet = problem.doc[start:end]
    return f"{'…' if start else ''}{snippet}{'…' if end < len(problem.doc) else ''}".strip("\r\n")


def _json_line(raw: bytes) -> Row:
    if b"\0" in raw:
        raise UnusableRow(
            "NUL bytes",
            f"byte {raw.index(0) + 1} of the line is NUL (0x00), which no JSON holds: the file is "
            "damaged, or UTF-16",
            remedy="Write it again as UTF-8",
        )
    try:
        content = raw.decode()
    except UnicodeDecodeError as problem:
        raise UnusableRow(
            "not UTF-8",
            f"byte {problem.start + 1} of the line (0x{raw[problem.start]:02x}) is not UTF-8",
            remedy="Convert the file to UTF-8",
        ) from None
    try:
        row = _parse(content)
    except _RepeatedKeyError as problem:
        raise UnusableRow("a key twice", f"column {problem.pos + 1}: {problem.msg}") from None
    except json.JSONDecodeError as problem:
        raise UnusableRow(
            "not JSON",
            f"column {problem.pos + 1}: not JSON ({problem.msg}), near {_near(problem)!r}",
            remedy="Fix the line (each line is one JSON object)",
        ) from None
    return as_row(row)


def as_row(value: Any) -> Row:
    """Return a row after checking that it is an object; messages written as text become lists.

    Raises:
        UnusableRow: It is something else, or holds messages as text that cannot be read.
    """
    if not isinstance(value, Mapping):
        raise UnusableRow(
            "not an object",
            f"the row is {json_kind(value)} where an object {{key: value}} is expected",
        )
    printed = {
        key: [found] if isinstance(found, dict) else found
        for key, held in value.items()
        if (found := _read_printed(held, what=f"'{key}'")) is not None
    }
    return {**value, **printed} if printed else value


def _read_printed(value: Any, *, what: str) -> Any | None:
    """Return a value with the messages that it holds as text; None if it holds none."""
    if isinstance(value, str):
        may_be = value.lstrip()[:1] in ("[", "{", "a")
        return printed_messages(value, what=what) if may_be else None
    if isinstance(value, list) and any(isinstance(one, str) for one in value):
        read = [_read_printed(one, what=what) for one in value]
        if any(one is not None for one in read):
            return [old if new is None else new for old, new in zip(value, read, strict=True)]
    return None


def json_lines(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read one JSON object per line; blank lines are skipped.

    A stream that is one JSON text may also be an array of objects, an object that holds the array
    (`{"data": [...]}`), or a table by its columns.
    """
    label = os.path.basename(path)
    first, number = b"", 0
    while not first.strip():
        line = stream.readline()
        if not line:
            return
        number += 1
        # Some editors begin a file with a byte-order mark.
        first = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    if _may_begin_a_text(first.strip()):
        content = first + stream.read()
        values = _rows_of_text(content, path, number)
        if values is not None:
            for index, value in enumerate(values):
                yield from _one_row(f"{label}[{index}]", as_row, value, complain)
            return
        stream = io.BytesIO(content[len(first) :])
    for place, line in enumerate(itertools.chain([first], stream), start=number):
        if line.strip():
            yield from _one_row(f"{label}:{place}", _json_line, line, complain)


def _one_row(source: str, read: Callable[[Any], Row], value: Any, complain: Complain) -> Rows:
    try:
        row = read(value)
    except UnusableRow as problem:
        complain(source, problem)
    else:
        yield source, row


# The names under which a JSON text holds its rows.
_HOLDERS = ("data", "rows", "examples", "instances", "items", "records", "train")


def _may_begin_a_text(line: bytes) -> bool:
    """Whether a first line may begin a text of several lines, or hold all rows itself."""
    if line.startswith(b"{") and line.endswith(b"}"):
        try:
            return _held_rows(_parse(line.decode())) is not None
        except ValueError:
            return False
    return line.startswith((b"[", b"{"))


def _rows_of_text(content: bytes, path: str, line: int) -> Sequence[Any] | None:
    """Return the rows of a JSON text that begins at a line; None if its lines are the rows.

    Raises:
        DataError: An array is broken.
    """
    try:
        found = _parse(content.decode())
    except ValueError as problem:
        # An array that ends before the text does is a row of its own, which is refused.
        is_whole = not getattr(problem, "msg", "").startswith("Extra data")
        if not (content.startswith(b"[") and is_whole):
            return None
        if isinstance(problem, UnicodeDecodeError):
            where = line + content.count(b"\n", 0, problem.start)
            raise DataError(
                f"{path}:{where}: byte {problem.start + 1} of the file "
                f"(0x{content[problem.start]:02x}) is not UTF-8; convert the file to UTF-8"
            ) from None
        # The parser raises no other error.
        problem = cast("json.JSONDecodeError", problem)
        said = (
            problem.msg if isinstance(problem, _RepeatedKeyError) else f"not JSON ({problem.msg})"
        )
        raise DataError(
            f"{path}:{problem.lineno + line - 1}: column {problem.colno}: {said}, near "
            f"{_near(problem)!r}. Fix the array, or write one object per line so that a bad row "
            "can be left out"
        ) from None
    if isinstance(found, list):
        # A line that is a list is no table of rows, but a bad row.
        return found if not found or any(isinstance(one, Mapping) for one in found) else None
    return _held_rows(found) or [found]


def _held_rows(found: Any) -> Sequence[Any] | None:
    """Return the rows that an object holds as a list or as columns; None if it is a row itself."""
    if not isinstance(found, Mapping) or not found:
        return None
    for key in _HOLDERS:
        held = found.get(key)
        if isinstance(held, list) and held and all(isinstance(one, Mapping) for one in held):
            others = [value for name, value in found.items() if name != key]
            return None if any(isinstance(value, list) for value in others) else held
    # As `to_dict` and pandas' `to_json` write a table: lists, or objects by the number of the row.
    columns = list(found.values())
    if all(isinstance(one, Mapping) for one in columns):
        numbers = list(columns[0])
        if not numbers or any(list(one) != numbers for one in columns):
            return None
        if not all(number.isdecimal() for number in numbers):
            return None
        columns = [list(one.values()) for one in columns]
    elif not all(isinstance(one, list) for one in columns) or len(columns) < 2:
        return None
    has_texts = any(one and all(isinstance(value, str) for value in one) for one in columns)
    if not has_texts or len({len(one) for one in columns}) > 1:
        return None
    return [dict(zip(found, values, strict=True)) for values in zip(*columns, strict=True)]


def csv_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read comma-separated rows under a header."""
    # The limit belongs to the process; prompts are longer than its default of 131072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    start = stream.readline().removeprefix(codecs.BOM_UTF8)
    lines = (line.decode(errors="surrogateescape") for line in itertools.chain([start], stream))
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as problem:
        raise DataError(f"{path}:1: the header is not CSV: {problem}") from None
    if header and not header[0]:
        header[0] = _PANDAS_INDEX
    if len(set(header)) < len(header) or "" in header:
        raise DataError(
            f"{path}:1: the header must name each column once, and reads: {', '.join(header)}"
        )
    for mark, name in ((";", "semicolons (;)"), ("\t", "tabs")):
        names = header[0].split(mark) if len(header) == 1 else []
        if len(names) > 1 and all(one.strip() for one in names):
            raise DataError(
                f"{path}:1: the columns are separated by {name}, where CSV has commas. Write the "
                "file again with commas between the columns (spreadsheets ask for the separator "
                "when they export), or as JSON lines"
            )
    label = os.path.basename(path)
    while True:
        source = f"{label}:{reader.line_num + 1}"
        try:
            cells = next(reader)
            if cells:
                yield source, _csv_row(header, cells)
        except StopIteration:
            return
        except csv.Error as problem:
            complain(source, UnusableRow("not CSV", f"not CSV: {problem}"))
        except UnusableRow as problem:
            complain(source, problem)


def _csv_row(header: list[str], cells: list[str]) -> Row:
    if len(cells) != len(header):
        raise UnusableRow(
            "wrong number of cells",
            f"the row has {len(cells)} cells where the header names {len(header)} columns",
        )
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell):
            raise UnusableRow(
                "not UTF-8", f"'{name}' is not UTF-8", remedy="Convert the file to UTF-8"
            )
    return as_row(dict(zip(header, cells, strict=True)))


def parquet_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read the rows of a Parquet table."""
    import pyarrow.parquet
    from pyarrow.lib import ArrowException

    try:
        table: Any = pyarrow.parquet.ParquetFile(_seekable(stream))  # type: ignore[no-untyped-call]
        yield from _batches(table.iter_batches(), path, complain)
    except ArrowException as problem:
        raise DataError(f"{path} is no Parquet file, or is damaged: {problem}") from problem


def arrow_file(stream: IO[bytes], path: str, complain: Complain) -> Rows:
    """Read the rows of an Arrow table in stream format (as `datasets` writes) or file format."""
    from pyarrow.ipc import open_file, open_stream
    from pyarrow.lib import ArrowException

    content = _seekable(stream)
    try:
        magic = content.read(6)
        content.seek(0)
        if magic == b"ARROW1":
            table = open_file(content)  # type: ignore[no-untyped-call]
            batches = (table.get_batch(place) for place in range(table.num_record_batches))
        else:
            batches = iter(open_stream(content))  # type: ignore[no-untyped-call]
        yield from _batches(batches, path, complain)
    except ArrowException as problem:
        raise DataError(f"{path} is no Arrow file, or is damaged: {problem}") from problem


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """Return the stream or, if it is compressed, its content, because reads are out of order."""
    return io.BytesIO(stream.read()) if isinstance(stream, gzip.GzipFile) else stream


def _batches(batches: Iterator[Any], path: str, complain: Complain) -> Rows:
    label, index = os.path.basename(path), 0
    for batch in batches:
        for row in batch.to_pylist():
            yield from _one_row(f"{label}[{index}]", as_row, row, complain)
            index += 1


READERS: dict[str, Reader] = {
    ".jsonl": json_lines,
    ".json": json_lines,
    ".csv": csv_file,
    ".parquet": parquet_file,
    ".arrow": arrow_file,
}


# Files that no data set has, and what a directory is that holds one.
_OTHER_DIRECTORIES = {
    "training_info.json": "a checkpoint",
    "model.safetensors": "a model",
    "model.safetensors.index.json": "a model",
}
# Directories below the one that is named: `results` holds `rm/step_10/policy`.
_DEEPEST_MARK = 3
_WHAT_TO_NAME = (
    f"Name a file of rows (it ends in {', '.join(READERS)}), or a directory that holds one"
)


def read_rows(
    path_or_name: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    on_bad_row: Complain | None = None,
) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, a directory or a hub data set, each with its source.

    A source is `train.jsonl.gz:17` (the line, from 1) for files made of lines and `name[17]` (the
    index, from 0) for others; `locate` turns it into a path. `split` is `train` by default;
    `subset` and `split` mean nothing to a single file. `on_bad_row` is called with each row that
    cannot be read; without it, such a row is an error.

    Raises:
        DataError: The place or a row cannot be read, or there are no rows.
    """
    path = os.path.expanduser(path_or_name)
    num_rows = 0

    def complain(source: str, problem: UnusableRow) -> None:
        nonlocal num_rows
        num_rows += 1
        if on_bad_row is None:
            raise DataError(f"{locate(path_or_name, source)}: {problem}")
        on_bad_row(source, problem)

    if (problem := no_file_at(path)) is not None:
        raise DataError(f"{problem}. Name a file that holds the rows")
    if os.path.isdir(path):
        rows = _directory_rows(path, complain, subset=subset, split=split)
    elif os.path.exists(path):
        rows = _file_rows(path, complain)
    elif _looks_local(path):
        raise DataError(_absent(path))
    else:
        rows = _hub_rows(path_or_name, complain, subset=subset, split=split)
    for row in rows:
        num_rows += 1
        yield row
    if num_rows == 0:
        raise DataError(f"{path_or_name} holds no rows; name a file, or a split, that has some")


def locate(path_or_name: str, source: str) -> str:
    """Return a source of `read_rows` with the directory of its file added, for messages."""
    if source.startswith(path_or_name):
        return source
    return os.path.join(os.path.dirname(os.path.normpath(path_or_name)), source)


def complaint(problem: UnusableRow, path: str | None, source: str, *, said: str = "") -> str:
    """Return the error message for a row that cannot be used, with the row's place.

    Args:
        path: The file or name that the rows come from; None if an object supplies them.
        said: Advice that replaces the usual advice about configuration keys.
    """
    where = source if path is None else locate(path, source)
    words = f"{where}: " + (f"{problem.message}. {said}" if said else str(problem))
    words += problem.program_in_words
    if problem.lacks_columns and path is not None and os.path.exists(path):
        words += f" What the columns could be: laurel data check {shlex.quote(path)}"
    return words


_GZIP = b"\x1f\x8b"
# The first bytes of files, what they are, and the endings of names that are read as such.
_MAGIC: dict[bytes, tuple[str, tuple[str, ...]]] = {
    b"PAR1": ("a Parquet file", (".parquet",)),
    b"ARROW1": ("an Arrow file", (".arrow",)),
    b"PK\x03\x04": ("a zip archive (or a spreadsheet)", ()),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", ()),
    b"BZh": ("compressed by bzip2", ()),
    b"\xfd7zXZ": ("compressed by xz", ()),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", ()),
    b"SQLite format 3": ("a SQLite database", ()),
    b"version https://": ("a pointer of Git LFS, without the data", ()),
}


def _advice(endings: Sequence[str]) -> str:
    if endings:
        return f"Name it so that it ends in {endings[0]}"
    return f"Write its rows as {', '.join(READERS)}, or one of these with .gz"


def _suffix(path: str) -> str:
    """Return the suffix that names the file's format, without `.gz`."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _file_rows(path: str, complain: Complain) -> Rows:
    read = READERS.get(_suffix(path))
    if read is None:
        raise DataError(
            f"{path}: cannot tell the format from the name. Known endings are "
            f"{', '.join(READERS)}, each also with .gz"
        )
    # A stream that breaks off has no line of its own: the last row that was read shows the place.
    last = "the start"
    try:
        if os.path.getsize(path) == 0:
            raise DataError(
                f"{path} is empty (0 bytes). Write it again: each row a line (or as its format "
                "has it); laurel data check says what rows may hold"
            )
        with open(path, "rb") as raw:
            begins = raw.read(16)
        # Some tools decompress a file and keep its name, or compress it without another.
        is_gzip = begins.startswith(_GZIP) or path.lower().endswith(".gz")
        suffix = _suffix(path)
        for mark, (kind, own) in _MAGIC.items():
            if begins.startswith(mark) and suffix not in own:
                raise DataError(f"{path} is {kind}, and its name ends in {suffix}. {_advice(own)}")
        with cast("IO[bytes]", gzip.open(path)) if is_gzip else open(path, "rb") as stream:
            for source, row in read(stream, path, complain):
                last = source
                yield source, row
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(
            f"{path}: the gzip stream breaks off after {last} ({problem}). The file was not copied "
            "whole, or is no gzip file; fetch it again"
        ) from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}") from problem


def _looks_local(path: str) -> bool:
    if path.startswith((".", os.sep)) or _suffix(path) in READERS:
        return True
    parent = os.path.dirname(path)
    return bool(parent) and os.path.isdir(parent)


def _absent(path: str) -> str:
    folder, wanted = os.path.split(os.path.normpath(path))
    if not os.path.isdir(folder or "."):
        return f"{path} does not exist, and neither does the directory {folder}"
    present = sorted(os.listdir(folder or "."))
    near = difflib.get_close_matches(wanted, present, n=3, cutoff=0.5)
    if not near:
        near = [name for name in present if _suffix(name) in READERS][:5]
    verb = "is" if len(near) == 1 else "are"
    hint = f"; there {verb} {', '.join(near)}" if near else ", and nothing there looks like data"
    return f"{path} does not exist in {folder or 'the working directory'}{hint}"


def _directory_rows(
    path: str, complain: Complain, *, subset: str | None, split: str | None
) -> Rows:
    saved = [
        name
        for name in ("dataset_dict.json", "state.json")
        if os.path.exists(os.path.join(path, name))
    ]
    label = os.path.basename(os.path.normpath(path))
    if not saved:
        if (other := _other_than_data(path)) is not None:
            raise DataError(f"{path} {other}. {_WHAT_TO_NAME}")
        yield from _hub_rows(path, complain, subset=subset, split=split, label=label)
        return
    with _quiet():
        from datasets.load import load_from_disk

        try:
            dataset: Any = load_from_disk(path)
        except Exception as problem:
            raise DataError(f"{path} cannot be read: {_in_one_line(problem)}") from problem
    if isinstance(dataset, dict):
        chosen = split or "train"
        if chosen not in dataset:
            raise DataError(f"{path} has no split '{chosen}'; it has: {', '.join(dataset)}")
        dataset = dataset[chosen]
    yield from _dataset_rows(dataset, label, complain)


def _hub_rows(
    name: str,
    complain: Complain,
    *,
    subset: str | None,
    split: str | None,
    label: str | None = None,
) -> Rows:
    with _quiet():
        from datasets.load import load_dataset

        if not os.path.isdir(name) and not _is_prepared(name):
            why = why_not_fetched(name, "dataset")
            if why is not None:
                raise DataError(_unreachable(name, why))
        try:
            dataset = load_dataset(name, subset, split=split or "train")
        except Exception as problem:
            # The library raises whatever its parts raise; each means that there are no rows.
            raise DataError(_hub_failure(name, subset, split or "train", problem)) from problem
    yield from _dataset_rows(dataset, label or name, complain)


def _is_prepared(name: str) -> bool:
    # Data sets of this owner that were prepared here may load without the hub.
    from datasets import config

    owner, slash, _ = name.partition("/")
    return any(Path(config.HF_DATASETS_CACHE).glob(glob.escape(owner) + ("___*" if slash else "")))


def _unreachable(name: str, why: str) -> str:
    return (
        f"'{name}' is no file or directory here, so it was taken for a name on the hub, which "
        f"cannot be reached ({why}). Go online, or give the path of a local copy. {WITHOUT_ASKING}"
    )


def _hub_failure(name: str, subset: str | None, split: str, problem: Exception) -> str:
    said = _in_one_line(problem)
    asked = f"split '{split}'" + (f" of subset '{subset}'" if subset else "")
    if os.path.isdir(name):
        names = (name for _, _, files in os.walk(name) for name in files)
        if not any(_suffix(file) in READERS for file in names):
            return f"{name} is a directory with no data file in it. {_WHAT_TO_NAME}"
        return (
            f"{name} is a directory, and {asked} of it cannot be loaded: {said}. Give one of its "
            "files, or a directory written by datasets.save_to_disk"
        )
    taken = f"'{name}' is no file or directory here, so it was taken for a name on the hub, "
    if isinstance(problem, ConnectionError):
        return _unreachable(name, said)
    return f"{taken}where {asked} cannot be loaded: {said}"


def _other_than_data(directory: str) -> str | None:
    """Name the kind of a directory that other commands have written; None if it may hold data."""
    top = directory.rstrip(os.sep)
    for folder, inside, files in os.walk(directory):
        for mark, kind in _OTHER_DIRECTORIES.items():
            if mark in files:
                where = os.path.relpath(os.path.join(folder, mark), directory)
                return f"is the directory of {kind} (it holds {where}), and not of data"
        if folder.count(os.sep) - top.count(os.sep) >= _DEEPEST_MARK:
            # `os.walk` does not enter what is taken out of its list.
            inside.clear()
    return None


def _in_one_line(problem: Exception) -> str:
    said = " ".join(str(problem).split()) or "no reason given"
    return f"{type(problem).__name__}: {said[:400]}"


def _dataset_rows(dataset: Any, label: str, complain: Complain) -> Rows:
    for index, row in enumerate(dataset):
        yield from _one_row(f"{label}[{index}]", as_row, row, complain)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars and retry notices of the libraries."""
    reading, fetching = (
        importlib.import_module(f"{package}.utils.tqdm")
        for package in ("datasets", "huggingface_hub")
    )
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # Only those that are on are switched on again.
    silenced = [bars for bars in (reading, fetching) if not bars.are_progress_bars_disabled()]
    for bars in silenced:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        for bars in silenced:
            bars.enable_progress_bars()
        logger.setLevel(level)
