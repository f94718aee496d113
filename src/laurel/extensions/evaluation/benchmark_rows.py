"""Reads the rows of the benchmarks: a prompt, its answers, and which are correct."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from laurel.data.benchmarks import (
    ANSWER_LISTS,
    VERDICTS,
    BenchmarkForm,
    BenchmarkRow,
    HubPart,
)
from laurel.data.columns import find_question, question_of, refuse_tools, with_system
from laurel.data.sources import Row, UnusableRow, integer, is_list, messages, required, text, unlike
from laurel.data.steps import SEPARATOR
from laurel.types import Completion, Conversation, Group

_TIES = "ties"
_STYLES = 3
RM_BENCH_SOURCES = {
    "alpacaeval": "chat",
    "bigcode/humanevalpack": "code",
    "refusals-dangerous": "safety-refuse",
    "refusals-offensive": "safety-refuse",
    "xstest-should-refuse": "safety-refuse",
    "xstest-should-respond": "safety-response",
}
"""Maps the `subset` of a row in one of RM-Bench's single-domain files to the row's domain."""
REWARD_BENCH_2_SUBSETS = ("factuality", "precise if", "math", "safety", "focus", "ties")
_RM_BENCH_FILE = re.compile(r"(?P<domain>chat|code|math|safety-re(fuse|sponse))_filtered\b.*")


def is_best_of_n(row: Row) -> bool:
    """Report whether a row has the form of best of n, and of no other benchmark."""
    if is_process_bench(row) or is_judge_bench(row):
        return False
    if any(is_list(row.get(k)) for k in ANSWER_LISTS) and any(
        is_list(row.get(k)) for k in VERDICTS
    ):
        return True
    return _has_lists(row) and "subset" not in row and not is_rm_bench(row)


def is_judge_bench(row: Row) -> bool:
    """Report whether a row has the form of JudgeBench."""
    return {"question", "response_A", "response_B", "label"} <= row.keys()


def is_process_bench(row: Row) -> bool:
    """Report whether a row has the form of ProcessBench."""
    return {"problem", "steps", "label"} <= row.keys()


def is_reward_bench(row: Row) -> bool:
    """Report whether a row has the form of RewardBench."""
    return {"prompt", "chosen", "rejected", "subset"} <= row.keys() and not _has_lists(row)


def is_reward_bench_2(row: Row) -> bool:
    """Report whether a row has the form of RewardBench 2."""
    return _has_lists(row) and "subset" in row and not is_rm_bench(row)


def is_rm_bench(row: Row) -> bool:
    """Report whether a row has the form of RM-Bench."""
    return _has_lists(row) and ("domain" in row or _is_of_rm_bench(row))


def _has_lists(row: Row) -> bool:
    is_pair = {"prompt", "chosen", "rejected"} <= row.keys()
    return is_pair and _are_answers(row["chosen"]) and _are_answers(row["rejected"])


def _are_answers(value: Any) -> bool:
    # One answer may be a list, too: of messages.
    return is_list(value) and (not value or not isinstance(value[0], Mapping))


def _is_of_rm_bench(row: Row) -> bool:
    # RewardBench 2 also has lists of answers and a `subset`. Its rows have one right answer, or
    # count them.
    subset = str(row.get("subset"))
    if subset in RM_BENCH_SOURCES:
        return True
    has_styles = len(row["chosen"]) == len(row["rejected"]) == _STYLES
    is_other = row.get("num_correct") is not None or subset.lower() in REWARD_BENCH_2_SUBSETS
    return "subset" in row and has_styles and not is_other


def reward_bench_row(row: Row) -> BenchmarkRow:
    """Read a row of RewardBench: a chosen and a rejected answer, with the row's subset."""
    return _row(
        row,
        prompt=_said(row, "prompt", role="user"),
        answers=[_said(row, key, role="assistant") for key in ("chosen", "rejected")],
        ranks=(0, 1),
        subset=_optional_text(row, "subset"),
    )


def reward_bench_2_row(row: Row) -> BenchmarkRow:
    """Read a row of RewardBench 2: a list of correct and a list of wrong answers."""
    right, wrong = _answers(row, "chosen"), _answers(row, "rejected")
    for key, expected in (("num_correct", len(right)), ("total_completions", None)):
        total = len(right) + len(wrong) if expected is None else expected
        if row.get(key) is not None and integer(row[key], what=f"'{key}'") != total:
            raise UnusableRow(
                f"'{key}' does not fit",
                f"'{key}' is {row[key]}, and the row has {len(right)} right and {len(wrong)} wrong "
                "answers",
            )
    subset = text(required(row, "subset"), what="'subset'")
    if _is_of_rm_bench(row):
        raise UnusableRow(
            "a row of RM-Bench",
            f"the subset '{subset}' with three right and three wrong answers is of RM-Bench",
        )
    if subset.lower() == _TIES and not str(row.get("id")).startswith(("ref:", "tied:")):
        raise UnusableRow(
            "no partner", f"the id of a row of Ties is ref:<n> or tied:<n>, not {row.get('id')!r}"
        )
    read = _row(
        row,
        prompt=_said(row, "prompt", role="user"),
        answers=[*right, *wrong],
        ranks=(0,) * len(right) + (1,) * len(wrong),
        subset=subset,
    )
    is_ties = subset.lower() == _TIES
    return replace(read, partner=read.id.partition(":")[2] if is_ties else None)


def rm_bench_row(row: Row) -> BenchmarkRow:
    """Read a row of RM-Bench: three correct and three wrong answers, each list in style order."""
    right, wrong = _answers(row, "chosen"), _answers(row, "rejected")
    for key, answers in (("chosen", right), ("rejected", wrong)):
        if len(answers) != _STYLES:
            raise UnusableRow(
                f"'{key}' has not three answers",
                f"'{key}' holds {len(answers)} answers where {_STYLES} are expected, one of each "
                "style",
            )
    return _row(
        row,
        prompt=_said(row, "prompt", role="user"),
        answers=[*right, *wrong],
        ranks=(0,) * _STYLES + (1,) * _STYLES,
        subset=_domain_of(row),
    )


def _domain_of(row: Row) -> str:
    """Return a row's domain; the rows of single-domain files name only their source."""
    if row.get("domain") is not None:
        return text(row["domain"], what="'domain'")
    source = _optional_text(row, "subset")
    if source is None:
        required(row, "domain")
    assert source is not None
    return RM_BENCH_SOURCES.get(source, source)


def judge_bench_row(row: Row) -> BenchmarkRow:
    """Read a row of JudgeBench: two answers and a label; the correct answer is put first."""
    label = text(required(row, "label"), what="'label'").strip()
    keys = {"A>B": ("response_A", "response_B"), "B>A": ("response_B", "response_A")}
    if label not in keys:
        raise UnusableRow("an unknown label", f"'label' is {label!r:.40} where A>B or B>A is meant")
    return _row(
        row,
        prompt=_said(row, "question", role="user"),
        answers=[_said(row, key, role="assistant") for key in keys[label]],
        ranks=(0, 1),
        subset=text(required(row, "source"), what="'source'"),
        id_key="pair_id",
    )


def best_of_n_row(row: Row) -> BenchmarkRow:
    """Read a row of best-of-n: answers with verdicts, or lists of correct and of wrong answers."""
    listed = next((key for key in ANSWER_LISTS if row.get(key) is not None), None)
    if listed is None:
        right, wrong = _answers(row, "chosen"), _answers(row, "rejected")
        answers, ranks = [*right, *wrong], (0,) * len(right) + (1,) * len(wrong)
    else:
        key = next((key for key in VERDICTS if row.get(key) is not None), VERDICTS[0])
        answers, verdicts = _answers(row, listed), _listed(row, key)
        if len(verdicts) != len(answers) or not all(
            isinstance(verdict, bool) or verdict in (0, 1) for verdict in verdicts
        ):
            raise UnusableRow(
                f"'{key}' does not fit",
                f"'{key}' must hold true or false for each of the {len(answers)} completions",
            )
        ranks = tuple(0 if verdict else 1 for verdict in verdicts)
    asked = find_question(row, but=(*ANSWER_LISTS, "chosen", "rejected")) or "prompt"
    return _row(
        row,
        prompt=_said(row, asked, role="user"),
        answers=answers,
        ranks=ranks,
        subset=_optional_text(row, "subset"),
    )


def process_bench_row(row: Row) -> BenchmarkRow:
    """Read a row of ProcessBench: a solution in steps, and the index of the first wrong one or -1.

    A separator inside of a step, which would make two of it, becomes a line break.
    """
    steps = tuple(
        re.sub(r"\n{2,}", "\n", text(step, what="a step").strip()) for step in _listed(row, "steps")
    )
    label = integer(required(row, "label"), what="'label'")
    if not -1 <= label < len(steps):
        raise UnusableRow(
            "'label' does not fit",
            f"'label' is {label}, and must be the index of one of the {len(steps)} steps, or -1",
        )
    if not all(steps):
        raise UnusableRow("an empty step", "a step in 'steps' is empty")
    found = _row(
        row,
        prompt=_said(row, "problem", role="user"),
        answers=[messages(SEPARATOR.join(steps), role="assistant", what="'steps'")],
        ranks=(0,),
        subset=_optional_text(row, "subset"),
    )
    return replace(found, steps=steps, first_error=None if label < 0 else label)


def _row(
    row: Row,
    *,
    prompt: Conversation,
    answers: Sequence[Conversation],
    ranks: tuple[int, ...],
    subset: str | None,
    id_key: str = "id",
) -> BenchmarkRow:
    own_id = row.get(id_key)
    refuse_tools(row)
    prompt = with_system(row, prompt, None)
    return BenchmarkRow(
        id="" if own_id is None else str(own_id),
        group=Group(
            id="", prompt=prompt, completions_G=tuple(Completion(messages=one) for one in answers)
        ),
        ranks_G=ranks,
        subset=subset,
        source="",
    )


def _said(row: Row, key: str, *, role: str) -> Conversation:
    if role == "user":
        said = question_of(row, key)
    else:
        said = messages(required(row, key), role=role, what=f"'{key}'")
    if not said:
        raise UnusableRow(f"'{key}' is empty", f"'{key}' is an empty list")
    return said


def _optional_text(row: Row, key: str) -> str | None:
    value = row.get(key)
    return None if value is None else text(value, what=f"'{key}'")


def _listed(row: Row, key: str) -> Sequence[Any]:
    values = required(row, key)
    if not is_list(values):
        raise unlike(values, "a list", what=f"'{key}'")
    if not values:
        raise UnusableRow(f"'{key}' is empty", f"'{key}' is an empty list")
    return values


def _answers(row: Row, key: str) -> list[Conversation]:
    what = f"an answer in '{key}'"
    return [messages(value, role="assistant", what=what) for value in _listed(row, key)]


_PRIOR_SETS = ("anthropic_helpful", "anthropic_hhh", "shp", "summarize")

REWARD_BENCH = BenchmarkForm(
    name="reward-bench",
    title="RewardBench",
    written='{"id", "subset", "prompt", "chosen", "rejected"}',
    read=reward_bench_row,
    hub=(HubPart("allenai/reward-bench", "filtered"),),
)
PRIOR_SETS = replace(
    REWARD_BENCH,
    hub=tuple(HubPart("allenai/pref-test-sets", name, name) for name in _PRIOR_SETS),
)
REWARD_BENCH_2 = BenchmarkForm(
    name="reward-bench-2",
    title="RewardBench 2",
    written='{"id", "subset", "prompt", "chosen": [right answers], "rejected": [wrong ones]}',
    read=reward_bench_2_row,
    hub=(HubPart("allenai/reward-bench-2", "test"),),
)
RM_BENCH = BenchmarkForm(
    name="rm-bench",
    title="RM-Bench",
    written='{"id", "domain", "prompt", "chosen": [three answers], "rejected": [three]}',
    read=rm_bench_row,
    hub=(HubPart("THU-KEG/RM-Bench", "train"),),
    subset_of_file=lambda name: (
        found["domain"] if (found := _RM_BENCH_FILE.fullmatch(name)) is not None else None
    ),
)
JUDGE_BENCH = BenchmarkForm(
    name="judge-bench",
    title="JudgeBench",
    written='{"pair_id", "source", "question", "response_A", "response_B", "label": "A>B" or '
    '"B>A"}',
    read=judge_bench_row,
    hub=(HubPart("ScalerLab/JudgeBench", "gpt"), HubPart("ScalerLab/JudgeBench", "claude")),
)
PROCESS_BENCH = BenchmarkForm(
    name="process-bench",
    title="ProcessBench",
    written='{"id", "problem", "steps": [texts], "label": index of the first wrong step, or -1}',
    read=process_bench_row,
    hub=tuple(
        HubPart("Qwen/ProcessBench", name, name)
        for name in ("gsm8k", "math", "olympiadbench", "omnimath")
    ),
)
BEST_OF_N = BenchmarkForm(
    name="best-of-n",
    title="best of n",
    written='{"prompt", "completions" (or "responses"): [answers], "correct" (or "passed"): '
    "[true or false for each]}, or "
    '{"prompt", "chosen": [right answers], "rejected": [wrong ones]}',
    read=best_of_n_row,
)
