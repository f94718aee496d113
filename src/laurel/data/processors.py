"""How a row becomes a task: the functions that `data.processor` names, and a place for more.

A processor is given the row as it was read and the configuration of its set, and returns
`TaskParts`. Prompt files, the environment and the tokens are not its business: NeMo RL's
processors, which are given a tokenizer and return token ids, cannot be used as they are.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laurel.config.tasks import TaskSetConfig
from laurel.config.tree import nearest
from laurel.data.cells import Row, UnusableRow, kind_of, required, text
from laurel.data.own_datasets import import_object, is_import_path
from laurel.data.set_reading import LeftOutRow
from laurel.data.task_formats import TASK_SETS, TaskParts, answer_text, any_code, columns
from laurel.errors import ConfigError, DataError
from laurel.types import Message

Processor = Callable[[Row, TaskSetConfig], TaskParts]

PROCESSORS: dict[str, Processor] = {}
"""The processors by name."""


def register_processor(name: str, processor: Processor) -> None:
    """Makes a function known under a name that `data.processor` can say.

    Raises:
        ConfigError: The name is taken.
    """
    if name in PROCESSORS:
        raise ConfigError(
            f"there is already a processor called {name!r}; those are: {', '.join(PROCESSORS)}"
        )
    PROCESSORS[name] = processor


def find_processor(name: str | None) -> Processor:
    """The processor of that name or import path; null is the one that reads the set's own rows.

    Raises:
        ConfigError: An unknown name.
        DataError: An import path that leads nowhere.
    """
    if name is None:
        return own_form
    if name in PROCESSORS:
        return PROCESSORS[name]
    if not is_import_path(name):
        near = nearest(name, PROCESSORS)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(
            f"data.processor={name} is unknown.{hint} Known are: {', '.join(PROCESSORS)}; or give "
            "the import path of your own function (row, config) -> TaskParts"
        )
    found = import_object(name, key="data.processor")
    if not callable(found):
        raise DataError(f"data.processor={name} is a {type(found).__name__}, not a function")
    return _guarded(found, name)


def own_form(row: Row, config: TaskSetConfig) -> TaskParts:
    """The row in the form of its data set."""
    return TASK_SETS[config.dataset_name or "ResponseDataset"].read(row, config)


def multichoice(row: Row, config: TaskSetConfig) -> TaskParts:
    """A question with its options under it, each behind its letter; the answer is a letter.

    Options are a list, an object of letters, an object of `label` and `text` lists, or columns `A`,
    `B`, ...; the answer is a letter, the place of an option (from 0), or its text.
    """
    key = "question" if "question" in row or config.input_key == "input" else config.input_key
    question = text(required(row, key, setting="input_key"), what=f"'{key}'")
    options = _options(row)
    lines = [f"{letter}) {option}" for letter, option in options.items()]
    subject = row.get("subject")
    return TaskParts(
        prompt=(Message("user", "\n".join((question, *lines))),),
        answer=_letter(row.get("answer", row.get(config.output_key)), options),
        metadata={} if subject is None else {"subject": subject},
    )


def _options(row: Row) -> dict[str, str]:
    given: Any = row.get("options") if row.get("options") is not None else row.get("choices")
    if given is None:
        given = {letter: row[letter] for letter in string.ascii_uppercase
                 if row.get(letter) is not None}  # fmt: skip
    if isinstance(given, Mapping) and {"label", "text"} <= given.keys():
        given = dict(zip(given["label"], given["text"], strict=False))
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        given = dict(zip(string.ascii_uppercase, given, strict=False))
    if not isinstance(given, Mapping):
        raise UnusableRow(
            "options are no list", f"the options are {kind_of(given)} where a list is expected"
        )
    options = {str(letter).strip(): answer_text(option, what="an option") or ""
               for letter, option in given.items() if option is not None}  # fmt: skip
    if len(options) < 2:
        raise UnusableRow(
            "too few options",
            f"the row has {len(options)} options in 'options', 'choices' or columns A, B, ...",
        )
    return options


def _letter(value: Any, options: Mapping[str, str]) -> str | None:
    said = answer_text(value, what="'answer'")
    if said is None or said in options:
        return said
    if not isinstance(value, str) and said.isdecimal() and int(said) < len(options):
        return list(options)[int(said)]
    texts = [letter for letter, option in options.items() if option == said]
    if len(texts) == 1:
        return texts[0]
    if said.isdecimal() and int(said) < len(options) and not texts:
        return list(options)[int(said)]  # a place, as a CSV file holds it
    raise UnusableRow(
        "the answer is no option",
        f"the answer {said!r:.60} is neither one of {', '.join(options)} nor the text of an option",
    )


def _guarded(processor: Callable[..., Any], name: str) -> Processor:
    """The user's function, whose errors are told as such."""

    def run(row: Row, config: TaskSetConfig) -> TaskParts:
        try:
            parts = processor(row, config)
        except (UnusableRow, LeftOutRow):
            raise
        except Exception as problem:  # the user's code may raise anything
            raise DataError(
                f"data.processor={name} raised {type(problem).__name__}: {problem}"
            ) from problem
        if not isinstance(parts, TaskParts):
            raise DataError(
                f"data.processor={name} returned a {type(parts).__name__}; it must return "
                "laurel.data.task_formats.TaskParts"
            )
        return parts

    return run


register_processor("default", own_form)
register_processor("math_hf_data_processor", own_form)
register_processor("math_data_processor", columns("problem", "expected_answer"))
register_processor("multichoice_qa_processor", multichoice)
register_processor("helpsteer3_data_processor", own_form)
register_processor("code_data_processor", any_code)
