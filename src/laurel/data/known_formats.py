"""The forms in which rows may be written, with the columns that tell them and who reads them.

The readers themselves are in `row_formats`, `task_formats`, `demonstrations`, `code_tasks` and
`benchmark_rows`; this is their table of contents, for people and for `laurel data check`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from laurel.config.benchmarks import BenchmarkName
from laurel.config.preference_data import DatasetConfig
from laurel.data.benchmark_rows import benchmark_of
from laurel.data.cells import Row
from laurel.data.row_formats import infer_class

Trainer = Literal["rm", "sft", "grpo"]
"""The commands that learn from rows."""
TRAINERS: tuple[Trainer, ...] = ("rm", "sft", "grpo")

_ASKED = {"role": "user", "content": "Where is the laurel?"}
_SAID = {"role": "assistant", "content": "By the gate."}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFormat:
    """One form of rows."""

    name: str
    """What it is called, in a word or two."""
    says: str
    """What a row says."""
    columns: str
    """The columns that tell it, for people."""
    example: Mapping[str, Any]
    """One whole row."""
    fits: Callable[[Row], bool]
    """Whether a row has this form, given that it has none of those before it in `FORMATS`."""
    trainers: Mapping[Trainer, Sequence[str]] = field(default_factory=dict)
    """The commands that learn from it, and what they are to be told besides the path."""
    uses: Mapping[Trainer, str] = field(default_factory=dict)
    """What of a row a command takes, where that is not all of it."""
    evaluation: BenchmarkName | None = None
    """The command of `laurel eval` that takes it."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Columns that may be called otherwise, and the key of the `data` section that says how."""


def recognise(row: Row) -> KnownFormat | None:
    """The form of a row; None where it has none that is known."""
    return next((known for known in FORMATS if known.fits(row)), None)


def _has(*columns: str) -> Callable[[Row], bool]:
    return lambda row: all(row.get(column) is not None for column in columns)


def _class_is(name: str, *, whole: bool | None = None) -> Callable[[Row], bool]:
    """A test for rows of a class of preferences; `whole`: with the prompt inside the answers."""

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


def _is_python(head: Any) -> bool:
    """HumanEval was translated into other languages, which the code environment does not run."""
    return isinstance(head, str) and "def " in head


def _is_mbpp(row: Row) -> bool:
    asks = row.get("text") is not None or row.get("prompt") is not None
    return asks and _has("test_list", "code")(row)


def _brings_tests(row: Row) -> bool:
    own = ("test_code", "test_list", "stdio_tests", "call_tests", "public_test_cases")
    if any(row.get(column) is not None for column in own) or row.get("input_output"):
        return True
    return isinstance(_tests_of_verl(row), Mapping)


def _tests_of_verl(row: Row) -> Any:
    judge = row.get("reward_model")
    truth = judge.get("ground_truth") if isinstance(judge, Mapping) else None
    if not isinstance(truth, str) or not truth.lstrip().startswith("{"):
        return truth
    try:
        return json.loads(truth)
    except ValueError:
        return truth


def _is_dapo(row: Row) -> bool:
    judge = row.get("reward_model")
    return row.get("prompt") is not None and isinstance(judge, Mapping) and "ground_truth" in judge


def _is_gsm8k(row: Row) -> bool:
    return _has("question", "answer")(row) and "\n#### " in str(row["answer"])


def _is_squad(row: Row) -> bool:
    answers = row.get("answers")
    return _has("context", "question")(row) and isinstance(answers, Mapping) and "text" in answers


def _is_turns(row: Row) -> bool:
    return isinstance(row.get("conversations"), Sequence)


_QUESTIONS = ("input", "question", "problem", "prompt", "query", "instruction")
_ANSWERS = ("output", "answer", "expected_answer", "ground_truth", "solution", "completion",
            "response", "generated_solution")  # fmt: skip


def _is_answered(row: Row) -> bool:
    return any(row.get(key) is not None for key in _QUESTIONS) and any(
        row.get(key) is not None for key in _ANSWERS
    )


def _is_asked(row: Row) -> bool:
    return any(row.get(key) is not None for key in _QUESTIONS)


_PROMPTS: Sequence[str] = ("data.env_name=reward_model",)
_BEST = {"sft": "the best answer is imitated", "grpo": "the prompts are asked"}
_PREFERENCE: Mapping[Trainer, Sequence[str]] = {"rm": (), "sft": (), "grpo": _PROMPTS}
_PREFERENCE_USES: Mapping[Trainer, str] = {"sft": _BEST["sft"], "grpo": _BEST["grpo"]}

FORMATS: tuple[KnownFormat, ...] = (
    KnownFormat(
        name="JudgeBench",
        says="a question, two answers, and which of them is right",
        columns="question, response_A, response_B, label, source",
        example={"pair_id": "1", "source": "math", "question": "What is 1 + 1?",
                 "response_A": "2", "response_B": "3", "label": "A>B"},
        fits=_benchmark_is("judge-bench"), evaluation="judge-bench",
    ),
    KnownFormat(
        name="RM-Bench",
        says="three right and three wrong answers, in rising order of style",
        columns="prompt, chosen (a list of three), rejected (a list of three), domain (or the "
        "subset of its files of one domain)",
        example={"id": 1, "domain": "chat", "prompt": "What is 1 + 1?",
                 "chosen": ["2", "It is 2.", "It is **2**."],
                 "rejected": ["3", "It is 3.", "It is **3**."]},
        fits=_benchmark_is("rm-bench"), evaluation="rm-bench",
    ),
    KnownFormat(
        name="RewardBench 2",
        says="lists of right and of wrong answers, with a subset",
        columns="prompt, chosen (a list), rejected (a list), subset",
        example={"id": "1", "subset": "Math", "prompt": "What is 1 + 1?", "chosen": ["2"],
                 "rejected": ["1", "3", "11"]},
        fits=_benchmark_is("reward-bench-2"), evaluation="reward-bench-2",
    ),
    KnownFormat(
        name="best of n",
        says="completions of a prompt, and which of them are right",
        columns="prompt (or question), completions (or responses), correct (or passed), a list; "
        "or prompt, chosen (a list), rejected (a list)",
        example={"prompt": "What is 1 + 1?", "completions": ["2", "3"], "correct": [True, False]},
        fits=_benchmark_is("best-of-n"), evaluation="best-of-n",
    ),
    KnownFormat(
        name="RewardBench",
        says="a prompt, a better and a worse answer, with a subset",
        columns="prompt, chosen, rejected, subset",
        example={"id": 1, "subset": "math-prm", "prompt": "What is 1 + 1?", "chosen": "2",
                 "rejected": "3"},
        fits=_benchmark_is("reward-bench"), evaluation="reward-bench",
        trainers=_PREFERENCE, uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="HelpSteer3",
        says="a conversation, two answers, and how much people prefer which",
        columns="context, response1, response2, overall_preference",
        example={"context": [_ASKED], "response1": "By the gate.", "response2": "No.",
                 "overall_preference": -2},
        fits=_class_is("HelpSteer3"), evaluation="pairs",
        trainers=_PREFERENCE, uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="ranked answers",
        says="a conversation and any number of answers, each with its rank (0 is the best) and "
        "perhaps ratings",
        columns="context, completions (of rank and completion)",
        example={"context": [_ASKED], "completions": [
            {"rank": 0, "completion": [_SAID]},
            {"rank": 1, "completion": [{"role": "assistant", "content": "No."}]}]},
        fits=_class_is("PreferenceDataset"), evaluation="pairs",
        trainers=_PREFERENCE, uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="transcripts",
        says="two transcripts of Human and Assistant that differ in the last answer (HH-RLHF)",
        columns="chosen, rejected (texts that begin with a blank line and 'Human:')",
        example={"chosen": "\n\nHuman: Where is the laurel?\n\nAssistant: By the gate.",
                 "rejected": "\n\nHuman: Where is the laurel?\n\nAssistant: No."},
        fits=_is_transcripts, evaluation="pairs",
        trainers=_PREFERENCE, uses=_PREFERENCE_USES,
    ),
    KnownFormat(
        name="pairs of conversations",
        says="two whole conversations that differ in the answer (Tulu 3)",
        columns="chosen, rejected (lists of messages)",
        example={"chosen": [_ASKED, _SAID],
                 "rejected": [_ASKED, {"role": "assistant", "content": "No."}]},
        fits=_class_is("BinaryPreferenceDataset", whole=True), evaluation="pairs",
        trainers=_PREFERENCE, uses=_PREFERENCE_USES,
        keys={"chosen": "data.chosen_key", "rejected": "data.rejected_key"},
    ),
    KnownFormat(
        name="pairs",
        says="a prompt, a better and a worse answer",
        columns="prompt, chosen, rejected",
        example={"prompt": "Where is the laurel?", "chosen": "By the gate.", "rejected": "No."},
        fits=_class_is("BinaryPreferenceDataset", whole=False), evaluation="pairs",
        trainers=_PREFERENCE, uses=_PREFERENCE_USES,
        keys={"prompt": "data.prompt_key", "chosen": "data.chosen_key",
              "rejected": "data.rejected_key"},
    ),
    KnownFormat(
        name="HumanEval",
        says="the head of a function, and a function that checks it",
        columns="prompt, entry_point, test",
        example={"task_id": "HumanEval/0", "prompt": 'def one():\n    """Return 1."""\n',
                 "entry_point": "one", "canonical_solution": "    return 1\n",
                 "test": "def check(candidate):\n    assert candidate() == 1\n"},
        fits=lambda row: _has("prompt", "entry_point", "test")(row) and _is_python(row["prompt"]),
        trainers={"grpo": ("data.dataset_name=HumanEval", "data.env_name=code")},
    ),
    KnownFormat(
        name="MBPP",
        says="what a function is to do, and asserts",
        columns="text (or prompt), code, test_list",
        example={"task_id": 1, "text": "Write a function that returns its argument.",
                 "code": "def same(x):\n    return x", "test_list": ["assert same(1) == 1"]},
        fits=_is_mbpp,
        trainers={"grpo": ("data.dataset_name=MBPP", "data.env_name=code")},
    ),
    KnownFormat(
        name="code tasks",
        says="what a program is to do, and tests of it: our own, or those of APPS, TACO, "
        "LiveCodeBench or verl",
        columns="prompt, and one of test_list, test_code (with entry, the function's name), "
        "call_tests (with entry), stdio_tests, input_output, public_test_cases",
        example={"prompt": "Print the sum of two numbers, one a line.",
                 "stdio_tests": [{"stdin": "1\n2\n", "stdout": "3\n"}]},
        fits=_brings_tests,
        trainers={"grpo": ("data.dataset_name=CodeTasks", "data.env_name=code")},
    ),
    KnownFormat(
        name="DAPO-Math",
        says="a prompt of messages, and the known answer inside reward_model",
        columns="prompt, reward_model (with ground_truth)",
        example={"prompt": [{"role": "user", "content": "What is 6 times 7?"}],
                 "reward_model": {"ground_truth": "42"}},
        fits=_is_dapo,
        trainers={"grpo": ("data.dataset_name=DAPOMath17K", "data.env_name=math")},
    ),
    KnownFormat(
        name="GSM8K",
        says="a question, and a solution that ends with the answer after ####",
        columns="question, answer",
        example={"question": "Ann has 2 laurels and buys 3. How many has she?",
                 "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        fits=_is_gsm8k,
        trainers={"sft": ("data.dataset_name=GSM8K",), "grpo": ("data.env_name=math",)},
    ),
    KnownFormat(
        name="SQuAD",
        says="a passage, a question, and answers from the passage",
        columns="context, question, answers (with text)",
        example={"context": "The laurel stands by the gate.", "question": "Where is the laurel?",
                 "answers": {"text": ["by the gate"], "answer_start": [18]}},
        fits=_is_squad,
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
        example={"conversations": [{"from": "human", "value": "Where is the laurel?"},
                                   {"from": "gpt", "value": "By the gate."}]},
        fits=_is_turns,
        trainers={"sft": ()},
    ),
    KnownFormat(
        name="questions and answers",
        says="a question and its answer: to be imitated (sft), or to check answers by (grpo)",
        columns="input, output; also question, problem, prompt, query, instruction and answer, "
        "expected_answer, ground_truth, solution, completion, response",
        example={"input": "What is 6 times 7?", "output": "42"},
        fits=_is_answered,
        trainers={"sft": (), "grpo": ("data.env_name=math",)},
        keys={"input": "data.input_key", "output": "data.output_key"},
    ),
    KnownFormat(
        name="prompts",
        says="prompts without answers",
        columns="prompt; also input, question, problem, query, instruction",
        example={"prompt": "Write a line about laurels."},
        fits=_is_asked,
        trainers={"grpo": _PROMPTS},
        keys={"prompt": "data.input_key"},
    ),
)  # fmt: skip
"""Every form, the most specific first."""
