"""Lists the known forms of rows, with the columns that identify them and the commands they fit.

The readers are in `preferences`, `conversations`, `task_formats` and `benchmarks`; this module is
their table of contents, for people and for `laurel data check`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from laurel.config.data import BenchmarkName, DatasetConfig, TaskSetConfig
from laurel.config.overrides import parse_override
from laurel.data.benchmarks import benchmark_of
from laurel.data.preferences import infer_class, ranked_row
from laurel.data.sources import Row, UnusableRow, answer, messages
from laurel.data.task_formats import response
from laurel.errors import ConfigError

Trainer = Literal["rm", "sft", "grpo"]
"""The name of a training command: reward model, supervised fine-tuning or GRPO."""
TRAINERS: tuple[Trainer, ...] = ("rm", "sft", "grpo")

_ASKED = {"role": "user", "content": "Where is the laurel?"}
_SAID = {"role": "assistant", "content": "By the gate."}


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


def _class_is(name: str, *, whole: bool | None = None) -> Callable[[Row], bool]:
    """Return a test for rows of a preference class; `whole`: the answers contain the prompt."""

    def fits(row: Row) -> bool:
        found = infer_class(row, DatasetConfig())
        is_class = found is not None and found[0] == name
        return is_class and (whole is None or whole == (row.get("prompt") is None))

    return fits


def _benchmark_is(name: BenchmarkName) -> Callable[[Row], bool]:
    return lambda row: benchmark_of(row) == name


def _is_transcripts(row: Row) -> bool:
    found = infer_class(row, DatasetConfig())
    return found is not None and found[1].startswith("transcripts")


def _brings_tests(row: Row) -> bool:
    own = ("test_code", "test_list", "stdio_tests", "call_tests", "public_test_cases")
    if any(row.get(column) is not None for column in own) or row.get("input_output"):
        return True
    judge = row.get("reward_model")
    truth = judge.get("ground_truth") if isinstance(judge, Mapping) else None
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        # verl's files hold the tests as JSON inside of a text.
        with contextlib.suppress(ValueError):
            truth = json.loads(truth)
    return isinstance(truth, Mapping)


_QUESTIONS = ("input", "question", "problem", "prompt", "query", "instruction")
_ANSWERS = (
    "output",
    "answer",
    "expected_answer",
    "ground_truth",
    "solution",
    "completion",
    "response",
    "generated_solution",
)


_PROMPTS: Sequence[str] = ("data.env_name=reward_model",)
_BEST = {"sft": "the best answer is imitated", "grpo": "the prompts are asked"}
_PREFERENCE: Mapping[Trainer, Sequence[str]] = {"rm": (), "sft": (), "grpo": _PROMPTS}
_PREFERENCE_USES: Mapping[Trainer, str] = {"sft": _BEST["sft"], "grpo": _BEST["grpo"]}

FORMATS: tuple[KnownFormat, ...] = (
    KnownFormat(
        name="JudgeBench",
        says="a question, two answers, and which of them is right",
        columns="question, response_A, response_B, label, source",
        example={
            "pair_id": "1",
            "source": "math",
            "question": "What is 1 + 1?",
            "response_A": "2",
            "response_B": "3",
            "label": "A>B",
        },
        fits=_benchmark_is("judge-bench"),
        evaluation="judge-bench",
    ),
    KnownFormat(
        name="RM-Bench",
        says="three right and three wrong answers, in rising order of style",
        columns="prompt, chosen (a list of three), rejected (a list of three), domain (or the "
        "subset of its files of one domain)",
        example={
            "id": 1,
            "domain": "chat",
            "prompt": "What is 1 + 1?",
            "chosen": ["2", "It is 2.", "It is **2**."],
            "rejected": ["3", "It is 3.", "It is **3**."],
        },
        fits=_benchmark_is("rm-bench"),
        evaluation="rm-bench",
    ),
    KnownFormat(
        name="RewardBench 2",
        says="lists of right and of wrong answers, with a subset",
        columns="prompt, chosen (a list), rejected (a list), subset",
        example={
            "id": "1",
            "subset": "Math",
            "prompt": "What is 1 + 1?",
            "chosen": ["2"],
            "rejected": ["1", "3", "11"],
        },
        fits=_benchmark_is("reward-bench-2"),
        evaluation="reward-bench-2",
    ),
    KnownFormat(
        name="best of n",
        says="completions of a prompt, and which of them are right",
        columns="prompt (or question), completions (or responses), correct (or passed), a list; "
        "or prompt, chosen (a list), rejected (a list)",
        example={"prompt": "What is 1 + 1?", "completions": ["2", "3"], "correct": [True, False]},
        fits=_benchmark_is("best-of-n"),
        evaluation="best-of-n",
    ),
    KnownFormat(
        name="RewardBench",
        says="a prompt, a better and a worse answer, with a subset",
        columns="prompt, chosen, rejected, subset",
        example={
            "id": 1,
            "subset": "math-prm",
            "prompt": "What is 1 + 1?",
            "chosen": "2",
            "rejected": "3",
        },
        fits=_benchmark_is("reward-bench"),
        evaluation="reward-bench",
        trainers=_PREFERENCE,
        uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="HelpSteer3",
        says="a conversation, two answers, and how much people prefer which",
        columns="context, response1, response2, overall_preference",
        example={
            "context": [_ASKED],
            "response1": "By the gate.",
            "response2": "No.",
            "overall_preference": -2,
        },
        fits=_class_is("HelpSteer3"),
        evaluation="pairs",
        trainers=_PREFERENCE,
        uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="ranked answers",
        says="a conversation and any number of answers, each with its rank (0 is the best) and "
        "perhaps ratings",
        columns="context, completions (of rank and completion)",
        example={
            "context": [_ASKED],
            "completions": [
                {"rank": 0, "completion": [_SAID]},
                {"rank": 1, "completion": [{"role": "assistant", "content": "No."}]},
            ],
        },
        fits=_class_is("PreferenceDataset"),
        evaluation="pairs",
        trainers=_PREFERENCE,
        uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="transcripts",
        says="two transcripts of Human and Assistant that differ in the last answer (HH-RLHF)",
        columns="chosen, rejected (texts that begin with a blank line and 'Human:')",
        example={
            "chosen": "\n\nHuman: Where is the laurel?\n\nAssistant: By the gate.",
            "rejected": "\n\nHuman: Where is the laurel?\n\nAssistant: No.",
        },
        fits=_is_transcripts,
        evaluation="pairs",
        trainers=_PREFERENCE,
        uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="pairs of conversations",
        says="two whole conversations that differ in the answer (Tulu 3)",
        columns="chosen, rejected (lists of messages)",
        example={
            "chosen": [_ASKED, _SAID],
            "rejected": [_ASKED, {"role": "assistant", "content": "No."}],
        },
        fits=_class_is("BinaryPreferenceDataset", whole=True),
        evaluation="pairs",
        trainers=_PREFERENCE,
        uses=_PREFERENCE_USES,
        keys={"chosen": "data.chosen_key", "rejected": "data.rejected_key"},
    ),
    KnownFormat(
        name="pairs",
        says="a prompt, a better and a worse answer",
        columns="prompt, chosen, rejected",
        example={"prompt": "Where is the laurel?", "chosen": "By the gate.", "rejected": "No."},
        fits=_class_is("BinaryPreferenceDataset", whole=False),
        evaluation="pairs",
        trainers=_PREFERENCE,
        uses=_PREFERENCE_USES,
        keys={
            "prompt": "data.prompt_key",
            "chosen": "data.chosen_key",
            "rejected": "data.rejected_key",
        },
    ),
    KnownFormat(
        name="HumanEval",
        says="the head of a function, and a function that checks it",
        columns="prompt, entry_point, test",
        example={
            "task_id": "HumanEval/0",
            "prompt": 'def one():\n    """Return 1."""\n',
            "entry_point": "one",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
        },
        # HumanEval was translated into other languages, which the code environment does not run.
        fits=lambda row: (
            _has("prompt", "entry_point", "test")(row)
            and isinstance(row["prompt"], str)
            and "def " in row["prompt"]
        ),
        trainers={"grpo": ("data.dataset_name=HumanEval", "data.env_name=code")},
    ),
    KnownFormat(
        name="MBPP",
        says="what a function is to do, and asserts",
        columns="text (or prompt), code, test_list",
        example={
            "task_id": 1,
            "text": "Write a function that returns its argument.",
            "code": "def same(x):\n    return x",
            "test_list": ["assert same(1) == 1"],
        },
        fits=lambda row: (
            any(row.get(column) is not None for column in ("text", "prompt"))
            and _has("test_list", "code")(row)
        ),
        trainers={"grpo": ("data.dataset_name=MBPP", "data.env_name=code")},
    ),
    KnownFormat(
        name="code tasks",
        says="what a program is to do, and tests of it: our own, or those of APPS, TACO, "
        "LiveCodeBench or verl",
        columns="prompt, and one of test_list, test_code (with entry, the function's name), "
        "call_tests (with entry), stdio_tests, input_output, public_test_cases",
        example={
            "prompt": "Print the sum of two numbers, one a line.",
            "stdio_tests": [{"stdin": "1\n2\n", "stdout": "3\n"}],
        },
        fits=_brings_tests,
        trainers={"grpo": ("data.dataset_name=CodeTasks", "data.env_name=code")},
    ),
    KnownFormat(
        name="DAPO-Math",
        says="a prompt of messages, and the known answer inside reward_model",
        columns="prompt, reward_model (with ground_truth)",
        example={
            "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
            "reward_model": {"ground_truth": "42"},
        },
        fits=lambda row: (
            _has("prompt", "reward_model")(row)
            and isinstance(row["reward_model"], Mapping)
            and "ground_truth" in row["reward_model"]
        ),
        trainers={"grpo": ("data.dataset_name=DAPOMath17K", "data.env_name=math")},
    ),
    KnownFormat(
        name="GSM8K",
        says="a question, and a solution that ends with the answer after ####",
        columns="question, answer",
        example={
            "question": "Ann has 2 laurels and buys 3. How many has she?",
            "answer": "2 + 3 = <<2+3=5>>5\n#### 5",
        },
        fits=lambda row: _has("question", "answer")(row) and "\n#### " in str(row["answer"]),
        trainers={"sft": ("data.dataset_name=GSM8K",), "grpo": ("data.env_name=math",)},
    ),
    KnownFormat(
        name="SQuAD",
        says="a passage, a question, and answers from the passage",
        columns="context, question, answers (with text)",
        example={
            "context": "The laurel stands by the gate.",
            "question": "Where is the laurel?",
            "answers": {"text": ["by the gate"], "answer_start": [18]},
        },
        fits=lambda row: (
            _has("context", "question", "answers")(row)
            and isinstance(row["answers"], Mapping)
            and "text" in row["answers"]
        ),
        trainers={"sft": ("data.dataset_name=squad",)},
    ),
    KnownFormat(
        name="conversations",
        says="whole conversations; what the assistant says is to be learned",
        columns="messages (of role and content)",
        example={"messages": [_ASKED, _SAID]},
        fits=_has("messages"),
        trainers={"sft": (), "grpo": _PROMPTS},
        uses={"grpo": "what stands before the last answer is asked"},
        keys={"messages": "data.chat_key"},
    ),
    KnownFormat(
        name="turns",
        says="whole conversations as ShareGPT has them",
        columns="conversations (of from and value)",
        example={
            "conversations": [
                {"from": "human", "value": "Where is the laurel?"},
                {"from": "gpt", "value": "By the gate."},
            ]
        },
        fits=lambda row: isinstance(row.get("conversations"), Sequence),
        trainers={"sft": ()},
    ),
    KnownFormat(
        name="questions and answers",
        says="a question and its answer: to be imitated (sft), or to check answers by (grpo)",
        columns="input, output; also question, problem, prompt, query, instruction and answer, "
        "expected_answer, ground_truth, solution, completion, response",
        example={"input": "What is 6 times 7?", "output": "42"},
        fits=lambda row: (
            any(row.get(key) is not None for key in _QUESTIONS)
            and any(row.get(key) is not None for key in _ANSWERS)
        ),
        trainers={"sft": (), "grpo": ("data.env_name=math",)},
        keys={"input": "data.input_key", "output": "data.output_key"},
    ),
    KnownFormat(
        name="prompts",
        says="prompts without answers",
        columns="prompt; also input, question, problem, query, instruction",
        example={"prompt": "Write a line about laurels."},
        fits=lambda row: any(row.get(key) is not None for key in _QUESTIONS),
        trainers={"grpo": _PROMPTS},
        keys={"prompt": "data.input_key"},
    ),
)
"""All known forms of rows; a more specific form comes before a more general one."""


# --------------------------------------------------------------------------------------------------
# What rows of no known form were probably meant to be: which keys would map their columns.
#
# A mapping is only suggested once the row at hand could be read with it.

_PROMPT_LIKE = frozenset(
    {
        "prompt",
        "question",
        "query",
        "instruction",
        "input",
        "context",
        "problem",
        "task",
        "user",
        "human",
        "request",
        "q",
    }
)
_BETTER = frozenset(
    {
        "chosen",
        "better",
        "preferred",
        "winner",
        "win",
        "won",
        "accepted",
        "good",
        "positive",
        "pos",
        "best",
        "liked",
        "correct",
        "right",
    }
)
_WORSE = frozenset(
    {
        "rejected",
        "worse",
        "dispreferred",
        "loser",
        "lose",
        "lost",
        "refused",
        "bad",
        "negative",
        "neg",
        "worst",
        "disliked",
        "incorrect",
        "wrong",
    }
)
_ANSWER_LIKE = frozenset(
    {
        "answer",
        "output",
        "solution",
        "completion",
        "response",
        "target",
        "reply",
        "assistant",
        "expected",
        "truth",
        "result",
        "reference",
        "gold",
        "label",
        "final",
        "a",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Advice for a row of no known form: what it might be, and the settings that would read it."""

    says: str
    """Describes in words what the row seems to be."""
    trainer: Trainer | None = None
    """The command that could read the row."""
    settings: tuple[str, ...] = ()
    """The settings that the command needs to read the row; empty if columns have to be renamed."""


def suggestions(row: Row) -> list[Suggestion]:
    """List the forms that a row may be meant to have, the likeliest first; empty without any."""
    for make in (_as_pair, _renamed, _as_chat):
        found = make(row)
        if found is not None:
            return [found]
    if answered := _as_answered(row):
        return answered
    asked = _column(row, _PROMPT_LIKE)
    if asked is None or not _can(lambda: response(row, TaskSetConfig(input_key=asked))):
        return []
    settings = (f"data.input_key={_quoted(asked)}", "data.env_name=reward_model")
    return [Suggestion(says=f"prompts under '{asked}'", trainer="grpo", settings=settings)]


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


def _settings(**named: str | None) -> tuple[str, ...]:
    defaults = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    return tuple(
        f"data.{key}={_quoted(column)}"
        for key, column in named.items()
        if column is not None and column != defaults.get(key)
    )


def _quoted(column: str) -> str:
    # Quotes are needed only where the value of an override would be read as something else.
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
    prompt = _column(row, _PROMPT_LIKE, but=(better, worse))

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
        settings=_settings(prompt_key=prompt, chosen_key=better, rejected_key=worse),
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
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return False
    return _can(lambda: answer(messages(value, role="user", what=""), what=""))


def _as_answered(row: Row) -> list[Suggestion]:
    asked = _column(row, _PROMPT_LIKE)
    answered = _column(row, _ANSWER_LIKE, but=() if asked is None else (asked,))
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
        other = {column: found for column, found in names.items() if column != found}
        renamed = {**row, **{column: row[found] for column, found in other.items()}}
        if other and recognise(renamed) is known:
            spelled = ", ".join(f"'{found}' to '{column}'" for column, found in other.items())
            return Suggestion(says=f"{known.name}, if you rename {spelled}")
    return None
