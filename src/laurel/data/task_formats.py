"""The forms in which rows say a question and its known answer, and the table of named sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laurel.config.preference_data import DatasetConfig
from laurel.config.tasks import TaskSetConfig
from laurel.data.cells import Row, UnusableRow, kind_of, messages, required, text
from laurel.data.code_tasks import FORMS as CODE_FORMS
from laurel.data.code_tasks import CodeTask, code_task
from laurel.data.row_formats import best_answer, infer_class
from laurel.data.set_reading import NO_HUB, HubSet, LeftOutRow
from laurel.types import Conversation, Message

QUESTIONS = ("question", "problem", "prompt", "input", "query", "instruction")
"""Columns in which a question is looked for where none is named."""
ANSWERS = ("answer", "expected_answer", "ground_truth", "output", "solution")
"""Columns in which an answer is looked for where none is named."""

_CALCULATED = re.compile(r"<<[^<>]*>>")
_UNNAMED = TaskSetConfig()
_PREFERENCES = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts:
    """What a row says, before the prompt files are put around its prompt."""

    prompt: Conversation
    answer: str | None = None
    """The known answer, which becomes `metadata["ground_truth"]`."""
    answer_key: str = "answer"
    """The column in which it was looked for, for messages."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the environment is to be given."""


Reader = Callable[[Row, TaskSetConfig], TaskParts]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """How one named set reads its rows, and where it finds them if no path is given."""

    read: Reader
    hub: HubSet = NO_HUB
    repeat: int = 1
    """Times that each task occurs where the configuration says nothing."""
    validation: TaskSetConfig | None = None
    """The set that it is validated on where none is named."""


def columns(question: str, answer: str) -> Reader:
    """A reader of rows with the question and the answer in those columns."""

    def read(row: Row, config: TaskSetConfig) -> TaskParts:
        return TaskParts(
            prompt=messages(required(row, question), role="user", what=f"'{question}'"),
            answer=answer_text(row.get(answer), what=f"'{answer}'"),
            answer_key=answer,
        )

    return read


def answer_text(value: Any, *, what: str) -> str | None:
    """A known answer as text; numbers without a needless `.0`; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise UnusableRow(
            f"{what} is no answer",
            f"{what} is {kind_of(value)} where a text or a number is expected",
        )
    if value is None or value != value:  # a table says NaN where nothing stands
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return text(str(value), what=what).strip() or None


def gsm8k(row: Row, config: TaskSetConfig) -> TaskParts:
    """The answer is what follows the last `####` of the solution, without thousands' commas."""
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
    """The solution without its calculator marks (`<<48/2=24>>`), the answer inside `\\boxed{}`."""
    parts = gsm8k(row, _UNNAMED)
    steps, _, final = row["answer"].rpartition("####")
    said = f"{_CALCULATED.sub('', steps).strip()}\nThe answer is \\boxed{{{final.strip()}}}."
    return (*parts.prompt, Message("assistant", said.strip()))


def dapo(row: Row, config: TaskSetConfig) -> TaskParts:
    """A prompt of messages, and the answer inside `reward_model`."""
    judge_of_row = required(row, "reward_model")
    if not isinstance(judge_of_row, Mapping):
        raise UnusableRow(
            "'reward_model' is not an object",
            f"'reward_model' is {kind_of(judge_of_row)} where {{'ground_truth': ...}} is expected",
        )
    key = "reward_model.ground_truth"
    return TaskParts(
        prompt=messages(required(row, "prompt"), role="user", what="'prompt'"),
        answer=answer_text(judge_of_row.get("ground_truth"), what=f"'{key}'"),
        answer_key=key,
    )


def numina(row: Row, config: TaskSetConfig) -> TaskParts:
    """Rows whose answer is `proof` or `notfound` have none that could be checked."""
    parts = columns("problem", "answer")(row, config)
    if parts.answer is not None and parts.answer.lower() in ("proof", "notfound"):
        raise LeftOutRow("no answer", f"the answer is {parts.answer}")
    return parts


def response(row: Row, config: TaskSetConfig) -> TaskParts:
    """A `messages` column as it is, or the configured columns of question and answer."""
    if row.get("messages") is not None and config.input_key == _UNNAMED.input_key:
        said = messages(row["messages"], role="user", what="'messages'")
        if said and said[-1].role == "assistant":
            answer = said[-1].content.strip() or None
            return TaskParts(prompt=said[:-1], answer=answer, answer_key="messages")
        return TaskParts(prompt=said, answer_key="messages")
    question = required(row, config.input_key, setting="input_key")
    return TaskParts(
        prompt=messages(question, role="user", what=f"'{config.input_key}'"),
        answer=answer_text(row.get(config.output_key), what=f"'{config.output_key}'"),
        answer_key=config.output_key,
    )


def preference(row: Row, config: TaskSetConfig) -> TaskParts:
    """The prompt of a judged row; its best answer is the known one."""
    prompt, answered = best_answer(row, config.dataset_name or "")
    said = answered[-1].content
    return TaskParts(prompt=prompt, answer=said.strip() or None, answer_key="completions")


def code(read: Callable[[Row], CodeTask]) -> Reader:
    """A reader of rows that ask for a program; what they are judged by is in the metadata."""

    def reader(row: Row, config: TaskSetConfig) -> TaskParts:
        task = read(row)
        return TaskParts(prompt=task.prompt, metadata=task.metadata)

    return reader


any_code = code(code_task)
"""Rows that ask for a program and bring their tests in any of the known forms."""


def settle(row: Row, config: TaskSetConfig) -> tuple[TaskSetConfig, str | None]:
    """How the rows of a ResponseDataset are read, told from its first, and what to say about it.

    Columns that the configuration names are left alone; a name that is missing is an error when
    the row is read.
    """
    is_named = config.input_key != _UNNAMED.input_key
    if config.input_key not in row if is_named else row.get("messages") is not None:
        return config, None
    asks = next((key for key in (config.input_key, *QUESTIONS) if key in row), None)
    if config.output_key != _UNNAMED.output_key:
        answers: str | None = config.output_key
    else:
        answers = next((key for key in (config.output_key, *ANSWERS) if key in row), None)
    if (answers is None or asks is None) and not is_named:
        found = infer_class(row, _PREFERENCES)
        if found is not None:
            return config.model_copy(update={"dataset_name": found[0]}), (
                f"prompts of rows of {found[0]}, told by: {found[1]}"
            )
    if asks is None:
        raise UnusableRow(
            "no question",
            f"the row has no '{config.input_key}', and none of {', '.join(QUESTIONS)} or messages "
            f"either; its keys are: {', '.join(map(str, row)) or 'none'}",
            remedy="Set data.input_key and data.output_key to the columns of question and answer",
            lacks_columns=True,
        )
    if asks == "question" and answers == "answer" and "\n#### " in str(row["answer"]):
        return config.model_copy(update={"dataset_name": "GSM8K"}), (
            "read as GSM8K, told by: the answer stands after '####'"
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
    "HelpSteer3": TaskSet(read=preference, hub=_hub("nvidia/HelpSteer3", ("preference", None))),
    "Tulu3Preference": TaskSet(
        read=preference, hub=_hub("allenai/llama-3.1-tulu-3-8b-preference-mixture")
    ),
    **{
        name: TaskSet(read=code(read), hub=_hub(hub) if hub else NO_HUB)
        for name, (read, hub) in CODE_FORMS.items()
    },
    "PreferenceDataset": TaskSet(read=preference),
    "BinaryPreferenceDataset": TaskSet(read=preference),
    "ResponseDataset": TaskSet(read=response),
}

PREFERENCE_SETS = frozenset(name for name, known in TASK_SETS.items() if known.read is preference)
"""The sets whose rows say which answer is better."""
