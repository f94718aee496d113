"""Lists the known forms of rows, with the columns that identify them and the commands they fit.

The readers are in `preferences`, `conversations`, `task_formats` and `benchmarks`; this module and
`formats.yaml` are their table of contents, for people and for `laurel data check`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

import yaml

from laurel.config.data import BenchmarkName, DatasetConfig, TaskSetConfig
from laurel.config.load import parse_override
from laurel.data.benchmarks import benchmark_of
from laurel.data.columns import ANSWERS, KNOWN_ANSWERS, QUESTIONS
from laurel.data.preferences import (
    PUBLISHED,
    RANK_THE_REPLIES,
    infer_class,
    is_of_tree,
    ranked_row,
)
from laurel.data.sources import Row, UnusableRow, answer, is_list, messages
from laurel.data.task_formats import response
from laurel.errors import ConfigError

Trainer = Literal["rm", "sft", "grpo"]
"""The name of a training command: reward model, supervised fine-tuning or GRPO."""
TRAINERS: tuple[Trainer, ...] = ("rm", "sft", "grpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFormat:
    """A form that rows can have: its columns, an example, and the commands that read it."""

    name: str
    """The short name of the form."""
    says: str
    """Describes in words what one row holds."""
    columns: str
    """Names the columns that identify the form, as text for people."""
    example: Mapping[str, Any]
    """An example of a complete row."""
    fits: Callable[[Row], bool]
    """Returns whether a row has this form, provided that it has none of the earlier `FORMATS`."""
    trainers: Mapping[Trainer, Sequence[str]] = field(default_factory=dict)
    """The commands that train on such rows, each with the settings it needs besides the path."""
    uses: Mapping[Trainer, str] = field(default_factory=dict)
    """The part of a row that a command uses, by command, for commands that do not use all of it."""
    evaluation: BenchmarkName | None = None
    """The subcommand of `laurel eval` that reads such rows; None if there is none."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Maps each column that may have another name to the key of `data` that sets that name."""


def recognise(row: Row) -> KnownFormat | None:
    """Return the known form that a row has; None if it has none of `FORMATS`."""
    return next((known for known in FORMATS if known.fits(row)), None)


def _has(*columns: str) -> Callable[[Row], bool]:
    return lambda row: all(row.get(column) is not None for column in columns)


def _has_one_of(row: Row, columns: Sequence[str]) -> bool:
    return any(row.get(column) is not None for column in columns)


def _class_is(name: str, *, whole: bool | None = None) -> Callable[[Row], bool]:
    """Return a test for rows of a preference class; `whole`: the answers contain the prompt."""

    def fits(row: Row) -> bool:
        row_class = infer_class(row, DatasetConfig())
        if row_class is None or row_class[0] != name:
            return False
        return whole is None or whole == row_class[1].startswith("whole")

    return fits


def _benchmark_is(name: BenchmarkName) -> Callable[[Row], bool]:
    return lambda row: benchmark_of(row) == name


def _is_transcripts(row: Row) -> bool:
    row_class = infer_class(row, DatasetConfig())
    return row_class is not None and row_class[1].startswith("transcripts")


def _brings_tests(row: Row) -> bool:
    own = ("test_code", "test_list", "stdio_tests", "call_tests", "public_test_cases")
    if _has_one_of(row, own) or row.get("input_output"):
        return True
    judge = row.get("reward_model")
    truth = judge.get("ground_truth") if isinstance(judge, Mapping) else None
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        # verl's files hold the tests as JSON inside of a text.
        with contextlib.suppress(ValueError):
            truth = json.loads(truth)
    return isinstance(truth, Mapping)


# A form's test may rely on the earlier ones: a row has none of those.
_FITS: Mapping[str, Callable[[Row], bool]] = {
    "JudgeBench": _benchmark_is("judge-bench"),
    "ProcessBench": _benchmark_is("process-bench"),
    "answers in steps": _class_is("StepwiseSupervision"),
    "Math-Shepherd": _class_is("MathShepherd"),
    "PRM800K": _class_is("PRM800K"),
    "RM-Bench": _benchmark_is("rm-bench"),
    "RewardBench 2": _benchmark_is("reward-bench-2"),
    "best of n": _benchmark_is("best-of-n"),
    "RewardBench": _benchmark_is("reward-bench"),
    "HelpSteer3": _class_is("HelpSteer3"),
    "ranked answers": _class_is("PreferenceDataset"),
    **{name: _class_is(name) for name in PUBLISHED},
    "transcripts": _is_transcripts,
    "pairs of conversations": _class_is("BinaryPreferenceDataset", whole=True),
    "pairs": _class_is("BinaryPreferenceDataset", whole=False),
    # HumanEval was translated into other languages, which the code environment does not run.
    "HumanEval": lambda row: (
        _has("prompt", "entry_point", "test")(row)
        and isinstance(row["prompt"], str)
        and "def " in row["prompt"]
    ),
    "MBPP": lambda row: _has_one_of(row, ("text", "prompt")) and _has("test_list", "code")(row),
    "code tasks": _brings_tests,
    "DAPO-Math": lambda row: (
        _has("prompt", "reward_model")(row)
        and isinstance(row["reward_model"], Mapping)
        and "ground_truth" in row["reward_model"]
    ),
    "GSM8K": lambda row: _has("question", "answer")(row) and "\n#### " in str(row["answer"]),
    "SQuAD": lambda row: (
        _has("context", "question", "answers")(row)
        and isinstance(row["answers"], Mapping)
        and "text" in row["answers"]
    ),
    "conversations": _has("messages"),
    "turns": lambda row: isinstance(row.get("conversations"), Sequence),
    "questions and answers": lambda row: (
        _has_one_of(row, QUESTIONS) and _has_one_of(row, (*ANSWERS, *KNOWN_ANSWERS))
    ),
    "prompts": lambda row: _has_one_of(row, QUESTIONS),
}

_TABLE = yaml.safe_load(files(__package__).joinpath("formats.yaml").read_text(encoding="utf-8"))
FORMATS = tuple(KnownFormat(fits=_FITS[one["name"]], **one) for one in _TABLE["formats"])
"""All known forms of rows; a more specific form comes before a more general one."""


# What rows of no known form were probably meant to be: which keys would map their columns.
#
# A mapping is only suggested once the row at hand could be read with it.

_WORDS: Mapping[str, Collection[str]] = _TABLE["words"]
"""The words in the names of columns that tell a prompt, a better or a worse one, or an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Advice for a row of no known form: what it might be, and the settings that would read it."""

    says: str
    """Describes in words what the row seems to be."""
    trainer: Trainer | None = None
    """The command that could read the row."""
    settings: tuple[str, ...] = ()
    """The settings that the command needs to read the row; empty if columns have to be renamed."""
    program: str = ""
    """Lines of Python that write the rows of `FILE` in a known form."""


def suggestions(row: Row) -> list[Suggestion]:
    """List the forms that a row may be meant to have, the likeliest first; empty without any."""
    if is_of_tree(row):
        says = "messages of trees (OASST). These two lines of Python write them as ranked answers:"
        return [Suggestion(says=says, program=RANK_THE_REPLIES)]
    for make in (_as_pair, _renamed, _as_chat):
        suggestion = make(row)
        if suggestion is not None:
            return [suggestion]
    if answered := _as_answered(row):
        return answered
    prompt_key = _column(row, _WORDS["prompt"])
    if prompt_key is None or not _can(lambda: response(row, TaskSetConfig(input_key=prompt_key))):
        return []
    settings = (f"data.input_key={_quoted(prompt_key)}", "data.env_name=reward_model")
    return [Suggestion(says=f"prompts under '{prompt_key}'", trainer="grpo", settings=settings)]


def _words(column: str) -> set[str]:
    # `chosenResponse`, `response_chosen` and `Chosen Response` are the same two words.
    return set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower())) - {""}


def _column(row: Row, words: Collection[str], *, but: Collection[str] = ()) -> str | None:
    """Find a column whose name is one of the words, contains one, or resembles one."""
    free = [
        key
        for key, value in row.items()
        if isinstance(key, str) and key not in but and isinstance(value, str | list)
    ]
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


def _quoted(column: str) -> str:
    # Quotes are needed only where the value of an override would be read as something else.
    try:
        value = parse_override(f"key={column}").value
    except ConfigError:
        value = None
    return column if value is not None and value.value == column else json.dumps(column)


def _as_pair(row: Row) -> Suggestion | None:
    worse = _column(row, _WORDS["worse"])
    better = _column(row, _WORDS["better"], but=() if worse is None else (worse,))
    if better is None or worse is None:
        return None
    prompt = _column(row, _WORDS["prompt"], but=(better, worse))

    def can_be_read() -> bool:
        config = DatasetConfig(prompt_key=prompt or "prompt", chosen_key=better, rejected_key=worse)
        return _can(lambda: ranked_row(row, "BinaryPreferenceDataset", config, ()))

    if prompt is None and not can_be_read():
        # No name is like a prompt's (perhaps it is in another language): the longest text is.
        texts = {
            key: len(value)
            for key, value in row.items()
            if isinstance(value, str) and key not in (better, worse)
        }
        prompt = max(texts, key=lambda key: texts[key], default=None)
    if not can_be_read():
        return None
    about = f"'{prompt}' the prompt, " if prompt else ""
    return Suggestion(
        says=f"pairs: {about}'{better}' the better answer, '{worse}' the worse",
        trainer="rm",
        settings=tuple(
            f"data.{name}_key={_quoted(column)}"
            for name, column in (("prompt", prompt), ("chosen", better), ("rejected", worse))
            if column not in (None, name)
        ),
    )


def _as_chat(row: Row) -> Suggestion | None:
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
    if not is_list(value) or not value:
        return False
    return _can(lambda: answer(messages(value, role="user", what=""), what=""))


def _as_answered(row: Row) -> list[Suggestion]:
    prompt_key = _column(row, _WORDS["prompt"])
    answer_key = _column(row, _WORDS["answer"], but=() if prompt_key is None else (prompt_key,))
    if prompt_key is None or answer_key is None or not isinstance(row[answer_key], str):
        return []
    config = TaskSetConfig(input_key=prompt_key, output_key=answer_key)
    if not _can(lambda: response(row, config)):
        return []
    says = f"questions under '{prompt_key}' and their answers under '{answer_key}'"
    keys = (f"data.input_key={_quoted(prompt_key)}", f"data.output_key={_quoted(answer_key)}")
    return [
        Suggestion(says=says, trainer="sft", settings=keys),
        Suggestion(says=says, trainer="grpo", settings=(*keys, "data.env_name=math")),
    ]


def _renamed(row: Row) -> Suggestion | None:
    """Suggest a known form whose columns are all there, some of them spelled otherwise."""
    for known in FORMATS:
        if len(known.example) < 2:
            continue
        names: dict[str, str] = {}
        for column in known.example:
            free = [str(key) for key in row if key not in names.values()]
            near = difflib.get_close_matches(column, free, n=1, cutoff=0.8)
            if near:
                names[column] = near[0]
        other = {column: spelling for column, spelling in names.items() if column != spelling}
        renamed = {**row, **{column: row[spelling] for column, spelling in other.items()}}
        if other and recognise(renamed) is known:
            spelled = ", ".join(f"'{spelling}' to '{column}'" for column, spelling in other.items())
            return Suggestion(says=f"{known.name}, if you rename {spelled}")
    return None
