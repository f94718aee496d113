"""Says what columns mean by their names, and names the columns that nothing was read from.

All readers of rows share these names, so that one file is read by the same columns whatever it is
read for: `question_of` and `with_system` make the prompt, and `ColumnNotes` compares the row with
what became of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from laurel.data.sources import (
    Row,
    UnusableRow,
    is_list,
    is_transcript,
    looks_written,
    messages,
    parse_transcript,
    required,
    text,
    thoughts_key,
)
from laurel.errors import counted
from laurel.types import Conversation, Message

QUESTIONS = ("prompt", "question", "problem", "instruction", "query", "input", "context")
"""The columns that may hold the question, in the order in which they are looked for."""
ANSWERS = ("completion", "response", "answer", "output", "generated_solution", "solution")
"""The columns that may hold one answer, in the order in which they are looked for."""
KNOWN_ANSWERS = ("answer", "expected_answer", "ground_truth", "output", "solution")
"""The columns that may hold the answer by which others are checked, likewise."""
_SYSTEMS = ("system", "system_prompt", "system_message")
_DETAILS = ("input", "context")


def is_there(row: Row, key: str) -> bool:
    """Report whether a row has a value in a column."""
    return row.get(key) is not None


def find_question(row: Row, *, but: Collection[str | None] = ()) -> str | None:
    """Return the column of a row's question, by its name; None if there is none."""
    # Beside Alpaca's columns, `prompt` is all of them rendered, often with the answer.
    first = ("instruction",) if is_there(row, "instruction") and is_there(row, "output") else ()
    names = (*first, *QUESTIONS)
    return next((key for key in names if key not in but and is_there(row, key)), None)


def question_of(
    row: Row, key: str, *, but: Collection[str | None] = (), setting: str | None = None
) -> Conversation:
    """Return the prompt in column `key`, with what the row adds to it in columns of its own.

    Rows in Alpaca's form put what an instruction is about into `input`, Dolly's into `context`: a
    text there follows the question as a paragraph of its own. Pairs of texts in `history`, as
    LLaMA-Factory has them, are the turns before.

    Args:
        key: The column of the question. One with another name than `QUESTIONS` is taken alone.
        but: Columns that are something else, such as the answer.
        setting: The key of `data` that can name another column, for messages.

    Raises:
        UnusableRow: The column is missing, or holds neither text nor messages.
    """
    value = required(row, key, setting=setting)
    if not isinstance(value, str) or key not in QUESTIONS or is_transcript(value):
        return messages(value, role="user", what=f"'{key}'")
    if key in _DETAILS and _says(row, "instruction") and "instruction" not in but:
        key, value = "instruction", row["instruction"]
    details = [
        row[other]
        for other in _DETAILS
        if other != key and other not in but and _says(row, other) and row[other] not in value
    ]
    asked = "\n\n".join(one for one in (value, *details) if details == [] or one.strip())
    return (*_history(row), *messages(asked, role="user", what=f"'{key}'"))


def _says(row: Row, key: str) -> bool:
    value = row.get(key)
    return isinstance(value, str) and bool(value.strip())


def _history(row: Row) -> Conversation:
    turns = row.get("history")
    if not is_list(turns) or not all(
        is_list(turn) and len(turn) == 2 and all(isinstance(one, str) for one in turn)
        for turn in turns
    ):
        return ()
    roles = ("user", "assistant")
    return tuple(
        Message(role, text(said, what="'history'"))
        for turn in turns
        for role, said in zip(roles, turn, strict=True)
    )


def with_system(row: Row, prompt: Conversation, key: str | None) -> Conversation:
    """Return a prompt after the system message in a column of its row, if it has none of its own.

    `key` is the column, an empty name is no column, and None is the first of `system`,
    `system_prompt` and `system_message` that holds a text.

    Raises:
        UnusableRow: The column holds no text.
    """
    if key is None:
        key = next((name for name in _SYSTEMS if _says(row, name)), "")
    said = row.get(key)
    if said is None or said == "" or (prompt and prompt[0].role == "system"):
        return prompt
    return (Message("system", text(said, what=f"the system message in '{key}'")), *prompt)


def refuse_tools(row: Row) -> None:
    """Refuse a row with functions, for a reader that shows none.

    Raises:
        UnusableRow: The column `tools` holds some.
    """
    value = row.get("tools")
    if isinstance(value, str):
        value = None if value.strip() in ("", "[]", "null") else value
    if value:
        raise UnusableRow(
            "functions in 'tools'",
            "the row has functions in 'tools', which only laurel sft shows to the model: they "
            "would be left out",
            remedy="Write them into the system message as the chat template does "
            "(docs/tools.md), or take the column out",
        )


# What nothing was read from.

# Such values identify or describe a row, and say nothing that could be learned. A longer text under
# such a name is named all the same.
_MEANS_NOTHING = re.compile(
    r"unnamed: \d+|(?:.*_)?(?:ids?|uuid|hash|idx|index|sources?|origin|datasets?|models?|lang|"
    r"language|split|subset|category|domain|type|licen[sc]e|url|date|time|timestamp|created|"
    r"version)|id_.*|role|from|rank|turns|num_.*",
    re.IGNORECASE,
)
_MOST_WORDS = 3

READ_OTHERWISE: Mapping[str, frozenset[str]] = {
    "HelpSteer3": frozenset({"overall_preference"}),
    "PreferenceDataset": frozenset({"margin", "target"}),
    "PKU-SafeRLHF": frozenset({"better_response_id"}),
    "SHP": frozenset({"labels"}),
    "WebGPT": frozenset({"score_0", "score_1"}),
    "StepwiseSupervision": frozenset({"completions", "labels"}),
    "MathShepherd": frozenset({"input", "label"}),
    "PRM800K": frozenset({"question", "label"}),
    "GSM8K": frozenset({"answer"}),
    "DAPOMath17K": frozenset({"reward_model"}),
    "DAPOMathAIME2024": frozenset({"reward_model"}),
}
"""The columns that a class of rows reads and that are not found in what becomes of a row, such as
numbers and texts that are taken apart."""


@dataclass(slots=True)
class ColumnNotes:
    """Notes which columns, and which keys in them, a message was made of, and which of none.

    What a reader asked for is not considered: a column counts as read if its texts are in the
    messages, the functions or the metadata of the row, or if it is known by name.
    """

    unread: dict[str, str] = field(default_factory=dict)
    """The source of the first row with each column that is nowhere in what was read."""
    remarks: dict[str, str] = field(default_factory=dict)
    """The source of the first row for each remark on what messages were made of."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of rows of each remark."""

    def look(
        self,
        source: str,
        row: Row,
        said: Conversation,
        *,
        others: Iterable[str] = (),
        read: Collection[str] = (),
    ) -> None:
        """Compare a row with what was read from it.

        Args:
            said: All messages that were read.
            others: Other texts that were read, such as those of functions.
            read: Columns that were read in another way.
        """
        texts = [message.content for message in said]
        for remark in dict.fromkeys([*_made_of(row, said), *_as_text(texts)]):
            self.counts[remark] += 1
            self.remarks.setdefault(remark, source)
        seen = _Texts((*texts, *others))
        for key, value in row.items():
            if key not in read:
                self._look(source, str(key), str(key), value, seen, read)

    def _look(
        self, source: str, path: str, key: str, value: Any, seen: _Texts, read: Collection[str]
    ) -> None:
        if value is None or path in self.unread or path in read or value in ("", [], {}):
            return
        if isinstance(value, Mapping):
            for inner, held in value.items():
                self._look(source, f"{path}.{inner}", str(inner), held, seen, read)
        elif is_list(value):
            for held in value:
                self._look(source, path, key, held, seen, read)
        elif isinstance(value, str):
            is_tag = _MEANS_NOTHING.fullmatch(key) and len(value.split()) <= _MOST_WORDS
            if value.strip() and not is_tag and not seen.hold(value):
                self.unread[path] = source
        elif value == value and not _MEANS_NOTHING.fullmatch(key):
            self.unread[path] = source

    def notes(self) -> list[str]:
        """Return the notes of the data report; the last names the columns that were not read."""
        notes = [
            f"{remark}: {counted(self.counts[remark], 'row')}, the first {source}"
            for remark, source in self.remarks.items()
        ]
        if self.unread:
            named = ", ".join(f"'{path}'" for path in self.unread)
            source = next(iter(self.unread.values()))
            notes.append(f"nothing is learned from {named} (first in {source})")
        return notes


def _made_of(row: Row, said: Conversation) -> Iterator[str]:
    """Yield what was made of columns that Laurel found by their names."""
    for turn in said:
        if turn.role == "system":
            # A named column may have any name.
            key = next((key for key, value in row.items() if value == turn.content), None)
            if key is not None:
                yield f"the system message is from '{key}'"
        elif turn.role == "user":
            for key in _DETAILS:
                if _says(row, key) and turn.content.endswith(f"\n\n{row[key]}"):
                    yield f"the question goes on with '{key}'"
        elif turn.role == "assistant" and not turn.learned:
            yield "a turn of the assistant with a weight of 0, or with train=false, is not learned"
    thinks = any(turn.content.startswith("<think>") for turn in said)
    for value in row.values() if thinks else ():
        for turn in value if is_list(value) else ():
            key = thoughts_key(turn) if isinstance(turn, Mapping) else None
            if key is not None:
                yield f"thoughts from '{key}' go to the template before the answer, as <think>"


def _as_text(texts: Iterable[str]) -> Iterator[str]:
    for form in filter(None, map(looks_written, texts)):
        yield f"a message holds {form}, which is read as text"


class _Texts:
    """The texts that were read from a row, in which values of its columns are looked for."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole = set(texts)

    def hold(self, value: str) -> bool:
        if value in self._whole:
            return True
        if is_transcript(value):
            return all(self.hold(turn.content) for turn in parse_transcript(value))
        stripped = value.strip()
        return any(stripped in one for one in self._whole)


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a nested value, and its numbers as text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif is_list(value):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, int | float):
        yield json.dumps(value)
