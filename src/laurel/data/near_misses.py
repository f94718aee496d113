"""What rows of no known form were probably meant to be: which keys would map their columns.

A mapping is only suggested once the row at hand could be read with it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laurel.config.overrides import COLUMN_KEYS, parse_override
from laurel.config.preference_data import DatasetConfig
from laurel.config.tasks import TaskSetConfig
from laurel.data.cells import Row, UnusableRow, answer, messages
from laurel.data.known_formats import FORMATS, Trainer, recognise
from laurel.data.row_formats import judge
from laurel.data.task_formats import response
from laurel.errors import ConfigError

_PROMPTS = frozenset({"prompt", "question", "query", "instruction", "input", "context", "problem",
                      "task", "user", "human", "request", "q"})  # fmt: skip
_BETTER = frozenset({"chosen", "better", "preferred", "winner", "win", "won", "accepted", "good",
                     "positive", "pos", "best", "liked", "correct", "right"})  # fmt: skip
_WORSE = frozenset({"rejected", "worse", "dispreferred", "loser", "lose", "lost", "refused", "bad",
                    "negative", "neg", "worst", "disliked", "incorrect", "wrong"})  # fmt: skip
_ANSWERS = frozenset({"answer", "output", "solution", "completion", "response", "target", "reply",
                      "assistant", "expected", "truth", "result", "reference", "gold", "label",
                      "final", "a"})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """What may be done so that a row is read."""

    says: str
    """In words: what it looks like."""
    trainer: Trainer | None = None
    """The command that would read it."""
    settings: tuple[str, ...] = ()
    """What that command is to be told; empty where the columns have to be renamed."""


KEYS_OF_COLUMNS: Mapping[Trainer, tuple[str, ...]] = {
    "rm": COLUMN_KEYS,
    "sft": ("data.input_key", "data.output_key"),
    "grpo": ("data.input_key", "data.output_key"),
}
"""By command, the keys that name the columns of a row in its commonest form."""


def could_be_named(row: Row, trainer: Trainer) -> bool:
    """Whether a row of no known form has as many columns as those keys would name."""
    known = recognise(row)
    texts = sum(isinstance(value, str | list) for value in row.values())
    is_unclear = known is None or known.name == "prompts"
    return is_unclear and texts >= len(KEYS_OF_COLUMNS[trainer])


def suggestions(row: Row) -> list[Suggestion]:
    """What could be meant by a row, the likeliest first; empty where nothing is alike."""
    for make in (_as_pair, _renamed, _as_chat):
        found = make(row)
        if found is not None:
            return [found]
    return _as_answered(row) or _as_prompt(row)


def _words(column: str) -> set[str]:
    """`chosenResponse`, `response_chosen` and `Chosen Response` are the same two words."""
    return set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower())) - {""}


def _column(row: Row, words: Collection[str], *, but: Collection[str] = ()) -> str | None:
    """The column that is called by one of the words: that alone, or among others."""
    free = [
        key for key, value in row.items()
        if isinstance(key, str) and key not in but and isinstance(value, str | list)
    ]  # fmt: skip
    tests: tuple[Callable[[str], bool], ...] = (
        lambda key: key.lower() in words,
        lambda key: bool(_words(key) & set(words)),
        lambda key: bool(difflib.get_close_matches(key.lower(), words, n=1, cutoff=0.85)),
    )
    return next((key for test in tests for key in free if test(key)), None)


def _can(read: Callable[[], Any]) -> bool:
    try:
        read()
    except UnusableRow:
        return False
    return True


def _settings(**named: str | None) -> tuple[str, ...]:
    """Overrides for the columns that are not called as by default."""
    defaults = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    return tuple(
        f"data.{key}={_quoted(column)}"
        for key, column in named.items()
        if column is not None and column != defaults.get(key)
    )


def _quoted(column: str) -> str:
    """In quotes only where the value of an override would be taken for something else."""
    try:
        value = parse_override(f"key={column}").value
    except ConfigError:
        value = None
    return column if value is not None and value.value == column else json.dumps(column)


def _as_pair(row: Row) -> Suggestion | None:
    worse = _column(row, _WORSE)
    better = _column(row, _BETTER, but=() if worse is None else (worse,))
    if better is None or worse is None:
        return None
    prompt = _column(row, _PROMPTS, but=(better, worse))
    config = DatasetConfig(prompt_key=prompt or "prompt", chosen_key=better, rejected_key=worse)
    if not _can(lambda: judge(row, "BinaryPreferenceDataset", config, ())):
        return None
    about = f"'{prompt}' the prompt, " if prompt else ""
    return Suggestion(
        says=f"pairs: {about}'{better}' the better answer, '{worse}' the worse",
        trainer="rm",
        settings=_settings(prompt_key=prompt, chosen_key=better, rejected_key=worse),
    )


def _as_chat(row: Row) -> Suggestion | None:
    """Messages under another name."""
    for key, value in row.items():
        if key == "messages" or not _ends_with_answer(value):
            continue
        return Suggestion(
            says=f"conversations under '{key}'",
            trainer="sft",
            settings=(f"data.chat_key={_quoted(str(key))}",),
        )
    return None


def _ends_with_answer(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return False
    return _can(lambda: answer(messages(value, role="user", what=""), what=""))


def _as_answered(row: Row) -> list[Suggestion]:
    asked = _column(row, _PROMPTS)
    answered = _column(row, _ANSWERS, but=() if asked is None else (asked,))
    if asked is None or answered is None or not isinstance(row[answered], str):
        return []
    config = TaskSetConfig(input_key=asked, output_key=answered)
    if not _can(lambda: response(row, config)):
        return []
    says = f"questions under '{asked}' and their answers under '{answered}'"
    keys = (f"data.input_key={_quoted(asked)}", f"data.output_key={_quoted(answered)}")
    return [
        Suggestion(says=says, trainer="sft", settings=keys),
        Suggestion(says=says, trainer="grpo", settings=(*keys, "data.env_name=math")),
    ]


def _as_prompt(row: Row) -> list[Suggestion]:
    asked = _column(row, _PROMPTS)
    if asked is None or not _can(lambda: response(row, TaskSetConfig(input_key=asked))):
        return []
    settings = (f"data.input_key={_quoted(asked)}", "data.env_name=reward_model")
    return [Suggestion(says=f"prompts under '{asked}'", trainer="grpo", settings=settings)]


def _renamed(row: Row) -> Suggestion | None:
    """A known form whose columns are all there, some of them spelled otherwise."""
    for known in FORMATS:
        if len(known.example) < 2:
            continue
        names: dict[str, str] = {}
        for column in known.example:
            free = [str(key) for key in row if key not in names.values()]
            near = difflib.get_close_matches(column, free, n=1, cutoff=0.8)
            if near:
                names[column] = near[0]
        other = {column: found for column, found in names.items() if column != found}
        renamed = {**row, **{column: row[found] for column, found in other.items()}}
        if other and recognise(renamed) is known:
            spelled = ", ".join(f"'{found}' to '{column}'" for column, found in other.items())
            return Suggestion(says=f"{known.name}, if you rename {spelled}")
    return None
