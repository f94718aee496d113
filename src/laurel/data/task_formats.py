"""Reads rows that hold a question and its known answer, and lists the named data sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from laurel import plugins
from laurel.config.data import DatasetConfig, TaskSetConfig
from laurel.data.columns import KNOWN_ANSWERS, QUESTIONS, find_question, is_there, question_of
from laurel.data.preferences import DATASET_CLASSES, best_answer, infer_class, refuse_trees
from laurel.data.reading import NO_HUB, HubSet, LeftOutRow
from laurel.data.sources import (
    Row,
    UnusableRow,
    json_kind,
    messages,
    required,
    text,
    unlike,
    without_thoughts,
)
from laurel.plugins import TaskForm
from laurel.types import Conversation, Message

_CALCULATED = re.compile(r"<<[^<>]*>>")
_UNNAMED = TaskSetConfig()
_PREFERENCES = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts:
    """The prompt, answer and metadata of a row, before the prompt files are applied."""

    prompt: Conversation
    answer: str | None = None
    """The known answer, which is stored as `metadata["ground_truth"]`."""
    answer_key: str = "answer"
    """The column that the answer comes from, for messages."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other values of the row that are passed to the environment."""


Reader = Callable[[Row, TaskSetConfig], TaskParts]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """A named data set of tasks: how its rows are read, and their place if no path is given."""

    read: Reader
    hub: HubSet = NO_HUB
    repeat: int = 1
    """The number of times that each task is used by default."""
    validation: TaskSetConfig | None = None
    """The data set that is used for validation by default; None if there is none."""
    otherwise: Collection[str] = ()
    """Columns that are read and whose texts do not come up in the task as they are."""
    environment: str | None = None
    """The environment whose package makes the rows, and that grades them if no other is named."""


def columns(question: str, answer: str) -> Reader:
    """Return a reader for rows with the question and the answer in the named columns."""

    def read(row: Row, config: TaskSetConfig) -> TaskParts:
        return TaskParts(
            prompt=messages(required(row, question), role="user", what=f"'{question}'"),
            answer=answer_text(row.get(answer), what=f"'{answer}'"),
            answer_key=answer,
        )

    return read


def answer_text(value: Any, *, what: str) -> str | None:
    """Return a known answer as text, or None if the value is None; `2.0` becomes `2`.

    `what` names the value in messages.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise UnusableRow(
            f"{what} is no answer",
            f"{what} is {json_kind(value)} where a text or a number is expected",
        )
    if value is None or value != value:  # a table says NaN where nothing stands
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return text(str(value), what=what).strip() or None


def gsm8k(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a row of GSM8K; the final answer comes after the last `####` of the column `answer`.

    Commas are removed from the final answer.
    """
    solution = text(required(row, "answer"), what="'answer'")
    _, mark, final = solution.rpartition("####")
    if not mark:
        raise UnusableRow(
            "no '####' in the answer",
            "'answer' has no '####', after which the final answer of a GSM8K solution stands",
            remedy="Set data.dataset_name=ResponseDataset if the column holds the answer alone",
        )
    return TaskParts(
        prompt=messages(required(row, "question"), role="user", what="'question'"),
        answer=final.replace(",", "").strip() or None,
    )


def gsm8k_demonstration(row: Row) -> Conversation:
    r"""Return a row of GSM8K as a conversation whose last message is the worked solution.

    Calculator marks (`<<48/2=24>>`) are removed, and the final answer is put into `\boxed{}`.
    """
    parts = gsm8k(row, _UNNAMED)
    steps, _, final = row["answer"].rpartition("####")
    said = f"{_CALCULATED.sub('', steps).strip()}\nThe answer is \\boxed{{{final.strip()}}}."
    return (*parts.prompt, Message("assistant", said.strip()))


def dapo(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a row of DAPO-Math: `prompt` holds messages, `reward_model.ground_truth` the answer."""
    judge_of_row = required(row, "reward_model")
    if not isinstance(judge_of_row, Mapping):
        form = "{'ground_truth': ...}"
        raise unlike(judge_of_row, "an object", what="'reward_model'", form=form)
    key = "reward_model.ground_truth"
    return TaskParts(
        prompt=messages(required(row, "prompt"), role="user", what="'prompt'"),
        answer=answer_text(judge_of_row.get("ground_truth"), what=f"'{key}'"),
        answer_key=key,
    )


def numina(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a row of NuminaMath; leave it out if its answer is `proof` or `notfound`.

    Such answers cannot be checked.
    """
    parts = columns("problem", "answer")(row, config)
    if parts.answer is not None and parts.answer.lower() in ("proof", "notfound"):
        raise LeftOutRow("no answer", f"the answer is {parts.answer}")
    return parts


def response(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a row with a `messages` column, or with the configured question and answer columns."""
    if row.get("messages") is not None and config.input_key == _UNNAMED.input_key:
        said = messages(row["messages"], role="user", what="'messages'")
        if said and said[-1].role == "assistant":
            answer = without_thoughts(said[-1].content).strip() or None
            return TaskParts(prompt=said[:-1], answer=answer, answer_key="messages")
        return TaskParts(prompt=said, answer_key="messages")
    return TaskParts(
        prompt=question_of(row, config.input_key, but=(config.output_key,), setting="input_key"),
        answer=answer_text(row.get(config.output_key), what=f"'{config.output_key}'"),
        answer_key=config.output_key,
    )


def preference(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a preference as a task: its prompt is the question, its best answer the known answer."""
    prompt, answered = best_answer(row, config.dataset_name or "")
    said = without_thoughts(answered[-1].content)
    return TaskParts(prompt=prompt, answer=said.strip() or None, answer_key="completions")


def made(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a row that a package made, as `data.tasks.MadeRows` describes it."""
    return TaskParts(
        prompt=messages(row.get("prompt"), role="user", what="'prompt'"),
        answer=answer_text(row.get("answer"), what="'answer'"),
        metadata=row.get("metadata") or {},
    )


def resolve_columns(row: Row, config: TaskSetConfig) -> tuple[TaskSetConfig, str | None]:
    """Find the question and answer columns of a ResponseDataset from its first row.

    Returns the completed configuration, and a note on the columns found, if any. Columns that the
    configuration names are kept; one that is missing is an error when the row is read.
    """
    is_named = config.input_key != _UNNAMED.input_key
    if config.input_key not in row if is_named else row.get("messages") is not None:
        return config, None
    if config.output_key != _UNNAMED.output_key:
        answers: str | None = config.output_key
    else:
        # Alpaca's `output` answers its `input`, whatever other columns there are.
        known = ("output", *KNOWN_ANSWERS) if is_there(row, "input") else KNOWN_ANSWERS
        answers = next((key for key in known if is_there(row, key)), None)
    asks = config.input_key if is_named else find_question(row, but=(answers,))
    if (answers is None or asks is None) and not is_named:
        found = infer_class(row, _PREFERENCES)
        if found is not None:
            return config.model_copy(update={"dataset_name": found[0]}), (
                f"prompts of rows of {found[0]}, recognized by: {found[1]}"
            )
    if asks is None:
        refuse_trees(row)
        raise UnusableRow(
            "no question",
            f"the row has no '{config.input_key}', and none of {', '.join(QUESTIONS)} or messages "
            f"either; its keys are: {', '.join(map(str, row)) or 'none'}",
            remedy="Set data.input_key and data.output_key to the columns of question and answer",
            lacks_columns=True,
        )
    if asks == "question" and answers == "answer" and "\n#### " in str(row["answer"]):
        return config.model_copy(update={"dataset_name": "GSM8K"}), (
            "read as GSM8K, recognized by: the answer stands after '####'"
        )
    update = {"input_key": asks} if answers is None else {"input_key": asks, "output_key": answers}
    taken = f"'{asks}' is the question, " + (
        "and there is no answer" if answers is None else f"'{answers}' the answer"
    )
    is_as_configured = (asks, answers) == (config.input_key, config.output_key)
    return config.model_copy(update=update), None if is_as_configured else taken


def _hub(name: str, *parts: tuple[str | None, str | None]) -> HubSet:
    return HubSet(name=name, parts=parts or ((None, None),))


TASK_SETS: dict[str, TaskSet] = {
    "OpenMathInstruct-2": TaskSet(
        read=columns("problem", "expected_answer"),
        hub=_hub("nvidia/OpenMathInstruct-2", (None, "train_1M")),
    ),
    "DeepScaler": TaskSet(
        read=columns("problem", "answer"),
        hub=_hub("agentica-org/DeepScaleR-Preview-Dataset"),
        validation=TaskSetConfig(dataset_name="AIME2024"),
    ),
    "AIME2024": TaskSet(
        read=columns("problem", "answer"), hub=_hub("HuggingFaceH4/aime_2024"), repeat=16
    ),
    "AIME2025": TaskSet(
        read=columns("question", "answer"),
        hub=_hub("opencompass/AIME2025", ("AIME2025-I", "test"), ("AIME2025-II", "test")),
        repeat=16,
    ),
    "AIME2026": TaskSet(
        read=columns("problem", "answer"), hub=_hub("MathArena/aime_2026"), repeat=16
    ),
    "DAPOMath17K": TaskSet(read=dapo, hub=_hub("BytedTsinghua-SIA/DAPO-Math-17k")),
    "DAPOMathAIME2024": TaskSet(read=dapo, hub=_hub("BytedTsinghua-SIA/AIME-2024")),
    "GSM8K": TaskSet(read=gsm8k, hub=_hub("openai/gsm8k", ("main", None))),
    "NuminaMath-1.5": TaskSet(read=numina, hub=_hub("AI-MO/NuminaMath-1.5")),
    "OpenR1-Math-220k": TaskSet(
        read=columns("problem", "answer"), hub=_hub("open-r1/OpenR1-Math-220k")
    ),
    **{name: TaskSet(read=preference, hub=known.hub) for name, known in DATASET_CLASSES.items()},
    "ResponseDataset": TaskSet(read=response),
}

PREFERENCE_SETS = frozenset(name for name, known in TASK_SETS.items() if known.read is preference)
"""The names of the data sets whose rows are preferences."""


def task_set(name: str | None) -> TaskSet | None:
    """Return the data set of a name, also one of a package; None if there is none."""
    if name in plugins.names("rows"):
        return TaskSet(read=made, environment=name)
    if name in plugins.names("task_forms"):
        form = plugins.find(TaskForm, name or "")
        return TaskSet(
            read=form.make(None, name),
            hub=_hub(form.hub) if form.hub else NO_HUB,
            otherwise=form.otherwise,
        )
    return TASK_SETS.get(name or "")


def names_of_sets() -> list[str]:
    """Return the names of all data sets of tasks whose rows stand in files or on the hub."""
    return [*TASK_SETS, *plugins.names("task_forms")]


@cache
def own_forms() -> Mapping[str, TaskForm]:
    """Return the forms of tasks among Laurel's own plug-ins, by name."""
    names = [name for name in plugins.names("task_forms") if plugins.is_own("task_forms", name)]
    return {name: plugins.find(TaskForm, name) for name in names}
