"""Takes typed values out of a row, or says what is wrong with it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from laurel.types import Conversation, Message

Row = Mapping[str, Any]

LEAVE_OUT = "set data.on_bad_row=skip to leave such rows out and count them"


class UnusableRow(Exception):
    """A row that cannot become a preference. It never leaves the room of data.

    `kind` is the short phrase it is counted under, `message` says what is wrong, and `remedy` what
    to do, where there is something better than mending the row. `lacks_columns`: what is expected
    may stand under other names.
    """

    def __init__(
        self, kind: str, message: str, *, remedy: str = "Mend the row", lacks_columns: bool = False
    ) -> None:
        super().__init__(kind, message, remedy)
        self.kind = kind
        self.message = message
        self.remedy = remedy
        self.lacks_columns = lacks_columns

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}, or {LEAVE_OUT}."


def required(row: Row, key: str, *, setting: str | None = None) -> Any:
    """The value of `key`; `setting` is the configuration key that could name another one."""
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
    raise UnusableRow(kind, message, remedy=f"Set data.{setting} to the key that holds it{hint}",
                      lacks_columns=True)  # fmt: skip


def text(value: Any, *, what: str) -> str:
    """The value as text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise UnusableRow(
            f"{what} is not text", f"{what} is {kind_of(value)} where text is expected"
        )
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
    """The value as a whole number; `2.0` and `"2"`, as tables hold them, count."""
    number_value = number(value, what=what)
    if not number_value.is_integer():
        raise UnusableRow(
            f"{what} is not a whole number", f"{what} is {value!r} where a whole number is expected"
        )
    return int(number_value)


def number(value: Any, *, what: str) -> float:
    """The value as a finite number; text that holds one, as in a CSV file, counts."""
    result = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            result = float(value)
        except (ValueError, OverflowError):
            result = math.nan
    if not math.isfinite(result):
        shown = repr(value) if isinstance(value, int | float | str) else kind_of(value)
        raise UnusableRow(
            f"{what} is not a number", f"{what} is {shown:.60} where a finite number is expected"
        )
    return result


def number_at(row: Row, key: str, *, setting: str) -> float:
    """The number under `key`; where no column is called that, `a-b` is column a less column b."""
    if key not in row:
        for place, character in enumerate(key):
            left, right = key[:place].strip(), key[place + 1 :].strip()
            if character == "-" and left in row and right in row:
                first = number(row[left], what=f"'{left}'")
                return first - number(row[right], what=f"'{right}'")
    return number(required(row, key, setting=setting), what=f"'{key}'")


def messages(value: Any, *, role: str, what: str) -> Conversation:
    """The value as messages; plain text becomes one message of `role`."""
    if isinstance(value, str):
        return (Message(role, text(value, what=what)),)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise UnusableRow(
            f"{what} is not text or messages",
            f"{what} is {kind_of(value)} where text or a list of messages is expected",
        )
    return tuple(_message(item, what=what) for item in value)


def _message(value: Any, *, what: str) -> Message:
    if not isinstance(value, Mapping) or "role" not in value or "content" not in value:
        shown = f"keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else repr(value)
        raise UnusableRow(
            f"{what} holds something that is no message",
            f"{what} holds something that is no {{'role': ..., 'content': ...}}: {shown:.80}",
        )
    content = value["content"]
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = _joined_parts(content, what=what)
    return Message(
        text(value["role"], what=f"a role in {what}"), text(content, what=f"a turn in {what}")
    )


def _joined_parts(parts: Sequence[Any], *, what: str) -> str:
    """Content written as `[{"type": "text", "text": ...}, ...]`."""
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
            raise UnusableRow(
                f"{what} holds something other than text",
                f"{what} holds a part that is not text: {part!r:.80}",
            )
        texts.append(text(part["text"], what=f"a turn in {what}"))
    return "".join(texts)


def answer(conversation: Conversation, *, what: str) -> Conversation:
    """The conversation, which must end with what the assistant says."""
    if not conversation or conversation[-1].role != "assistant":
        last = f"'{conversation[-1].role}'" if conversation else "nothing"
        raise UnusableRow(
            f"{what} does not end with an assistant turn",
            f"{what} must end with a message of role 'assistant', and ends with {last}",
        )
    return conversation


def kind_of(value: Any) -> str:
    """What a value is, in the words of JSON."""
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
