"""Reads conversations to imitate, from any data set: what supervised fine-tuning learns from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from laurel.config.data import DatasetConfig, is_import_path
from laurel.config.sft import DemonstrationDataConfig, DemonstrationSetConfig
from laurel.data.benchmarks import ANSWER_LISTS
from laurel.data.columns import (
    ANSWERS,
    READ_OTHERWISE,
    ColumnNotes,
    find_question,
    is_there,
    question_of,
    with_system,
)
from laurel.data.own_rows import own_validation_split
from laurel.data.preferences import (
    DATASET_CLASSES,
    best_answer,
    infer_class,
    refuse_trees,
)
from laurel.data.reading import (
    NO_HUB,
    HubSet,
    LeftOutRow,
    OpenedSet,
    UnusualRoles,
    asks_share,
    hold_out_of_sets,
    open_set,
    read_sets,
)
from laurel.data.report import TextReport, no_rows_left
from laurel.data.sources import (
    Row,
    UnusableRow,
    answer,
    is_list,
    messages,
    required,
    text,
    unlike,
)
from laurel.data.task_formats import gsm8k_demonstration
from laurel.errors import DataError
from laurel.types import Conversation, Message, ToolSchemas

DEFAULT_DEMONSTRATIONS = "squad"
"""The data set that is read if the configuration names neither a set nor a path."""

_UNNAMED = DemonstrationSetConfig()
_PREFERENCES = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A demonstration: a conversation that ends with the assistant, whose turns are imitated."""

    id: str
    messages: Conversation
    name: str = ""
    """The name of the data set that the conversation comes from."""
    source: str = ""
    """The row's place, as `file:line` or `name[index]`."""
    tools: ToolSchemas = ()
    """The functions in the row's column `tools`, which the chat template shows."""

    @property
    def texts(self) -> list[str]:
        """Return all texts that the conversation is rendered from."""
        return [turn.content for turn in self.messages] + [json.dumps(one) for one in self.tools]

    @property
    def prompt(self) -> Conversation:
        """Return the messages before the first assistant message."""
        first = next(i for i, turn in enumerate(self.messages) if turn.role == "assistant")
        return self.messages[:first]


@dataclass(slots=True, kw_only=True)
class DialogueReport(TextReport):
    """Reports the rows of demonstration data sets; its lengths are those of whole conversations."""

    def describe(self, items: Iterable[Dialogue]) -> None:
        """Count and measure the kept conversations."""
        self.describe_items((one.name, one.prompt, one.messages) for one in items)


class DemonstrationData(NamedTuple):
    """The training and validation conversations of a run, with their reports."""

    train: list[Dialogue]
    validation: list[Dialogue]
    reports: dict[str, DialogueReport]
    """The report of `train` and, if there is a validation set, of `validation`."""


def load_demonstration_data(data: DemonstrationDataConfig) -> DemonstrationData:
    """Read all conversations that the `data` section names, and hold out the share it asks for.

    Raises:
        DataError: A file or a row cannot be used, or no conversation is left.
    """
    sets = data.train_sets()
    train, report = load_demonstrations(
        sets, name="train", on_bad_row=data.on_bad_row, limit=data.max_samples
    )
    loaded = DemonstrationData(train, [], {"train": report})
    validation_sets = data.validation_sets()
    if not validation_sets and not asks_share(sets):
        validation_sets = [
            block.model_copy(update={"split": split})
            for block in sets
            if is_import_path(block.dataset_name or "")
            and (split := own_validation_split(block)) is not None
        ]
    if validation_sets:
        validation, loaded.reports["validation"] = load_demonstrations(
            validation_sets, name="validation", on_bad_row=data.on_bad_row
        )
        return loaded._replace(validation=validation)
    kept, held = hold_out_of_sets(train, sets)
    if not held:
        return loaded
    loaded.reports["validation"] = report.move_out(kept=kept, held_out=held, name="validation")
    return loaded._replace(train=kept, validation=held)


def load_demonstrations(
    sets: Sequence[DemonstrationSetConfig],
    *,
    name: str,
    on_bad_row: Literal["error", "skip"] = "error",
    limit: int | None = None,
) -> tuple[list[Dialogue], DialogueReport]:
    """Read the conversations of several data sets in sequence, and report what was left out.

    Args:
        name: The name of the whole, in the report and at the start of every id.

    Raises:
        DataError: A file or a row cannot be used, or no row of a set is left.
    """
    return read_sets(sets, partial(_load, on_bad_row=on_bad_row), name=name, limit=limit)


def _load(
    config: DemonstrationSetConfig,
    name: str,
    limit: int | None,
    *,
    on_bad_row: Literal["error", "skip"],
) -> tuple[list[Dialogue], DialogueReport]:
    report = DialogueReport(name=name)
    if config.dataset_name is None and config.data_path is None:
        config = config.model_copy(update={"dataset_name": DEFAULT_DEMONSTRATIONS})
    opened = open_set(config, known=_HUBS, report=report)
    set_name = opened.task_name or config.dataset_name or report.origin
    report.dataset_class = config.dataset_name or "conversations"
    noted: set[str] = set()
    roles, columns = UnusualRoles(), ColumnNotes()

    def convert(source: str, row: Row) -> Dialogue:
        said, clue, class_name = _conversation(row, opened)
        if clue not in noted:
            noted.add(clue)
            report.notes.append(f"read as {clue}")
        said = with_system(row, said, config.system_key)
        if config.system_prompt and not (said and said[0].role == "system"):
            said = (Message("system", config.system_prompt), *said)
        checked = _checked(opened.frame.around(said))
        roles.look(source, checked)
        tools = _tools(row.get("tools"))
        # Weights of turns are numbers, and `tools` is taken whole.
        weights = {f"{key}.{weight}" for key in row for weight in ("weight", "train")}
        read = {"tools", *weights, *READ_OTHERWISE.get(class_name, ())}
        columns.look(source, row, checked, read=read)
        return Dialogue(
            id=f"{report.name}:{source}",
            messages=checked,
            name=set_name,
            source=source,
            tools=tools,
        )

    dialogues = opened.read(convert, report=report, on_bad_row=on_bad_row, limit=limit)
    report.notes += roles.notes() + columns.notes()
    if not dialogues:
        raise DataError(no_rows_left(report))
    report.describe(dialogues)
    return dialogues, report


def _tools(value: Any) -> ToolSchemas:
    """Read the column `tools`: a list of JSON schemas, or such a list as text."""
    try:
        schemas = json.loads(value) if isinstance(value, str) else value or []
        named = [isinstance(one["function"]["name"], str) for one in schemas]
    except (ValueError, TypeError, KeyError):
        named = [False]
    if not all(named):
        raise UnusableRow(
            "tools are no schemas",
            "'tools' must be a list of {'type': 'function', 'function': {'name': ..., ...}}",
        )
    return tuple(schemas)


def _checked(said: Conversation) -> Conversation:
    answer(said, what="the conversation")
    first = next(i for i, turn in enumerate(said) if turn.role == "assistant")
    if not any(turn.content.strip() for turn in said[:first] if turn.role != "system"):
        raise LeftOutRow("empty", "nothing is asked")
    if any(not turn.content.strip() for turn in said if turn.role == "assistant"):
        raise LeftOutRow("empty", "the assistant says nothing")
    if not any(turn.learned for turn in said if turn.role == "assistant"):
        raise LeftOutRow("nothing to learn", "no turn of the assistant has a weight")
    return said


def _conversation(
    row: Row, opened: OpenedSet[DemonstrationSetConfig]
) -> tuple[Conversation, str, str]:
    """Return the conversation of a row, the name of its form, and its class if it has one."""
    config = opened.config
    name = config.dataset_name or ""
    if not opened.is_own and name in _NAMED:
        return _NAMED[name].read(row), name, name
    if name in DATASET_CLASSES:
        return _best(row, name), f"{name}: the best answer of each row", name
    several = next((k for k in ANSWER_LISTS if is_list(row.get(k)) and len(row[k]) > 1), None)
    for shape in _DEMONSTRATION_SHAPES:
        # A known answer beside several sampled ones ("420") is for checking those.
        if shape is _GUESSED and several is not None:
            continue
        if shape.fits(row, config):
            if shape is _GUESSED and row.get("label") is False:
                raise UnusableRow(
                    "a bad answer",
                    "'label' is false, as KTO's rows say of a bad answer, which would be imitated",
                    remedy="Leave such rows out (data.on_bad_row=skip), or set data.input_key and "
                    "data.output_key if 'label' means something else",
                )
            return shape.read(row, config), shape.written(row, config), ""
    found = infer_class(row, _PREFERENCES)
    if found is None and several is not None:
        raise UnusableRow(
            "several answers",
            f"'{several}' holds several answers and nothing says which to imitate",
            remedy="Set data.input_key and data.output_key to the columns of a question and the "
            "one answer to imitate; laurel eval best-of-n measures a reward model on rows that "
            "say which answers are right",
            lacks_columns=True,
        )
    if found is not None:
        return _best(row, found[0]), f"{found[0]}: the best answer of each row", found[0]
    refuse_trees(row)
    raise UnusableRow(
        "unknown shape",
        f"the row has the keys {', '.join(map(str, row)) or '(none)'}, which say no conversation",
        remedy='A row can be {"messages": [...]}, {"conversations": [{"from", "value"}, ...]}, '
        '{"prompt": ..., "completion": ...}, {"question": ..., "answer": ...}, or one of a known '
        "class of preferences; or set data.input_key and data.output_key to your columns",
        lacks_columns=True,
    )


def _is_pair(row: Row) -> bool:
    return all(is_there(row, key) for key in (_PREFERENCES.chosen_key, _PREFERENCES.rejected_key))


class _DemonstrationShape(NamedTuple):
    fits: Callable[[Row, DemonstrationSetConfig], bool]
    read: Callable[[Row, DemonstrationSetConfig], Conversation]
    written: Callable[[Row, DemonstrationSetConfig], str]


def _names_columns(row: Row, config: DemonstrationSetConfig) -> bool:
    return (config.input_key, config.output_key) != (_UNNAMED.input_key, _UNNAMED.output_key)


def _whole(row: Row, config: DemonstrationSetConfig) -> Conversation:
    value = required(row, config.chat_key, setting="chat_key")
    if isinstance(value, str):
        raise unlike(value, "a list", what=f"'{config.chat_key}'", form="a list of messages")
    return messages(value, role="user", what=f"'{config.chat_key}'")


def _share_gpt(row: Row, config: DemonstrationSetConfig) -> Conversation:
    turns = row["conversations"]
    if not is_list(turns):
        raise unlike(turns, "a list", what="'conversations'", form="a list of turns")
    return messages(turns, role="user", what="'conversations'")


def _pair(row: Row, asked: str, answered: str, *, setting: bool = False) -> Conversation:
    """Make a conversation of two columns; the second may begin by repeating the first."""
    keys = ("input_key", "output_key") if setting else (None, None)
    question = question_of(row, asked, but=(answered,), setting=keys[0])
    reply = messages(
        required(row, answered, setting=keys[1]), role="assistant", what=f"'{answered}'"
    )
    if len(reply) > len(question) and reply[: len(question)] == question:
        reply = reply[len(question) :]
    return question + reply


def _found(row: Row) -> tuple[str, str] | None:
    # Alpaca's `output` answers its `input`, whatever other columns there are.
    answers = ("output", *ANSWERS) if is_there(row, "input") else ANSWERS
    answered = next((key for key in answers if is_there(row, key)), None)
    asked = find_question(row, but=(answered,))
    return None if asked is None or answered is None else (asked, answered)


def _best(row: Row, class_name: str) -> Conversation:
    prompt, answered = best_answer(row, class_name)
    return prompt + answered


def _squad(row: Row) -> Conversation:
    answers = required(row, "answers")
    texts = answers.get("text") if isinstance(answers, Mapping) else None
    if not texts:
        raise LeftOutRow("no answer", "the question cannot be answered")
    return (
        Message("system", text(required(row, "context"), what="'context'")),
        Message("user", text(required(row, "question"), what="'question'")),
        Message("assistant", text(texts[0], what="'answers'")),
    )


_GUESSED = _DemonstrationShape(
    lambda row, config: _found(row) is not None,
    lambda row, config: _pair(row, *(_found(row) or ("", ""))),
    lambda row, config: "'{}', answered by '{}'".format(*(_found(row) or ("", ""))),
)
# The most specific first.
_DEMONSTRATION_SHAPES = (
    _DemonstrationShape(
        lambda row, config: (
            config.dataset_name == "openai_format"
            or config.chat_key != _UNNAMED.chat_key
            or is_there(row, config.chat_key)
        ),
        _whole,
        lambda row, config: f"whole conversations under '{config.chat_key}'",
    ),
    _DemonstrationShape(
        lambda row, config: is_there(row, "conversations") and not _is_pair(row),
        _share_gpt,
        lambda row, config: "turns under 'conversations'",
    ),
    _DemonstrationShape(
        _names_columns,
        lambda row, config: _pair(row, config.input_key, config.output_key, setting=True),
        lambda row, config: f"'{config.input_key}', answered by '{config.output_key}'",
    ),
    _GUESSED,
)


class _Named(NamedTuple):
    hub: HubSet
    read: Callable[[Row], Conversation]


_NAMED = {
    "squad": _Named(HubSet(name="rajpurkar/squad"), _squad),
    "tulu3_sft_mixture": _Named(
        HubSet(name="allenai/tulu-3-sft-mixture"), lambda row: _whole(row, _UNNAMED)
    ),
    "OpenMathInstruct-2": _Named(
        HubSet(name="nvidia/OpenMathInstruct-2", parts=((None, "train_1M"),)),
        lambda row: _pair(row, "problem", "generated_solution"),
    ),
    "GSM8K": _Named(HubSet(name="openai/gsm8k", parts=(("main", None),)), gsm8k_demonstration),
}
_HUBS = {
    **{name: named.hub for name, named in _NAMED.items()},
    "openai_format": NO_HUB,
    "ResponseDataset": NO_HUB,
    **{name: known.hub for name, known in DATASET_CLASSES.items()},
}
