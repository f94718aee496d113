"""Reads the rows of reward-model benchmarks: a prompt, its answers, and which are correct."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from laurel.config.data import BenchmarkName, DatasetConfig
from laurel.data.columns import ColumnNotes, find_question, question_of, refuse_tools, with_system
from laurel.data.preferences import DATASET_CLASSES, infer_class
from laurel.data.sources import (
    Row,
    UnusableRow,
    integer,
    is_list,
    locate,
    messages,
    read_rows,
    required,
    text,
    unlike,
)
from laurel.data.steps import SEPARATOR
from laurel.errors import DataError
from laurel.types import Completion, Conversation, Group, Preference

LABELS_STEPS = "These label each step: laurel rm trains and validates with them"
"""Said of rows that no benchmark and no comparison of answers reads."""

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


ANSWER_LISTS = ("completions", "responses")
"""The columns that may hold a list of several answers to one prompt."""
VERDICTS = ("correct", "passed", "is_correct")
"""The columns that may hold a list with one entry per answer: whether that answer is correct."""
_VERDICTS = frozenset({*VERDICTS, "label", "total_completions"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRow:
    """A row of a benchmark: a prompt and its answers, whose correct ranking is known."""

    id: str
    """The row's id, which is unique among the rows read together and stable between reads."""
    group: Group
    ranks_G: tuple[int, ...]
    """The rank of each answer, where lower is better; 0 or 1 if rows only say what is correct."""
    subset: str | None = None
    margin: float | None = None
    steps: tuple[str, ...] = ()
    """The steps of the answer, where the benchmark is about steps."""
    first_error: int | None = None
    """The index of the first wrong step; None if there is none, or the rows do not say."""
    source: str
    """The row's place: `file:line`, or `name[index]` if the format has no lines."""


class HubPart(NamedTuple):
    """One split of a data set on the Hugging Face hub, from which a benchmark's rows are read."""

    name: str
    split: str
    subset: str | None = None
    """The benchmark subset that its rows belong to, if the rows do not name one themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkForm:
    """Describes how a benchmark's rows are written, and where they are read from by default."""

    name: BenchmarkName
    title: str
    written: str
    """An example of a row, which error messages show."""
    read: Callable[[Row], BenchmarkRow]
    hub: tuple[HubPart, ...] = ()
    subset_of_file: Callable[[str], str | None] = lambda name: None
    """Returns the subset that a file's name stands for; None if the name stands for none."""


def read_benchmark(
    form: BenchmarkForm,
    paths: Sequence[str],
    *,
    split: str | None = None,
    limit: int | None = None,
    say: Callable[[str], object] = lambda note: None,
) -> list[BenchmarkRow]:
    """Read all rows of a benchmark from files, directories or hub data sets.

    Args:
        paths: Files (.jsonl, .json, .csv, .parquet, .arrow; also .gz), directories written by
            `datasets.save_to_disk`, or names on the hub. If empty, the benchmark's own place on
            the hub is read.
        split: The split of a directory or a hub data set; None is the benchmark's own, or `train`.
        limit: The largest number of rows to read from each path.

    Raises:
        DataError: A file or a row cannot be used; the message names the place and what is expected.
    """
    if not paths and not form.hub:
        raise DataError(f"no data is named; add --data with a file whose rows are {form.written}")
    parts: list[HubPart] = []
    for path in paths:
        own = [part for part in form.hub if part.name == path and split in (None, part.split)]
        subset = form.subset_of_file(os.path.basename(os.path.normpath(path)))
        parts += own or [HubPart(path, split or "train", subset)]
    rows: list[BenchmarkRow] = []
    seen: set[str] = set()
    for part in parts or form.hub:
        notes = ColumnNotes()
        for row in islice(_rows(form, part, notes), limit):
            # Different subsets, and even one file, may repeat ids.
            own_id, number = row.id, 1
            if own_id in seen and (row.subset or "").lower() == _TIES:
                raise DataError(
                    f"{row.source}: there is a row with the id {own_id} already, and rows of Ties "
                    "find their partners by it. Is a file given twice?"
                )
            if own_id in seen and row.subset:
                own_id = f"{row.subset}/{row.id}"
            first = own_id
            while own_id in seen:
                number += 1
                own_id = f"{first}#{number}"
            seen.add(own_id)
            rows.append(replace(row, id=own_id))
        for note in notes.notes():
            say(f"{part.name}: {note}")
    return rows


def rows_of_preferences(
    preferences: Sequence[Preference], *, subset: str | None
) -> list[BenchmarkRow]:
    """Convert preferences to benchmark rows.

    Args:
        subset: The subset of all these rows, which also prefixes their ids; None is no subset.
    """
    return [
        BenchmarkRow(
            id=preference.source if subset is None else f"{subset}/{preference.source}",
            group=preference.group,
            ranks_G=preference.ranks_G,
            subset=subset,
            margin=preference.margin,
            source=preference.source,
        )
        for preference in preferences
    ]


def _rows(form: BenchmarkForm, part: HubPart, notes: ColumnNotes) -> Iterator[BenchmarkRow]:
    def refuse(source: str, problem: UnusableRow, row: Row | None = None) -> NoReturn:
        found = None if row is None else benchmark_of(row)
        hint = (
            "" if found in (None, form.name) else f". These look like rows for laurel eval {found}"
        )
        if row is not None and found is None and labels_steps(row):
            hint = f". {LABELS_STEPS}"
        raise DataError(
            f"{locate(part.name, source)}: {problem.message}. A row of {form.title} is "
            f"{form.written}{hint}"
        ) from problem

    for source, row in read_rows(part.name, split=part.split, on_bad_row=refuse):
        try:
            read = form.read(row)
        except UnusableRow as problem:
            refuse(source, problem, row)
        turns = (turn for one in read.group.completions_G for turn in one.messages)
        notes.look(source, row, (*read.group.prompt, *turns), others=read.steps, read=_VERDICTS)
        where = locate(part.name, source)
        yield replace(
            read,
            id=read.id or source,
            group=replace(read.group, id=where),
            source=where,
            subset=read.subset if part.subset is None else part.subset,
        )


def benchmark_of(row: Row) -> BenchmarkName | None:
    """Recognize the benchmark whose form a row has; None if the row is no preference at all."""
    if {"problem", "steps", "label"} <= row.keys():
        return "process-bench"
    if {"question", "response_A", "response_B", "label"} <= row.keys():
        return "judge-bench"
    if any(is_list(row.get(k)) for k in ANSWER_LISTS) and any(
        is_list(row.get(k)) for k in VERDICTS
    ):
        return "best-of-n"
    if {"prompt", "chosen", "rejected"} <= row.keys():
        if _are_answers(row["chosen"]) and _are_answers(row["rejected"]):
            if "domain" in row or _is_of_rm_bench(row):
                return "rm-bench"
            return "reward-bench-2" if "subset" in row else "best-of-n"
        if "subset" in row:
            return "reward-bench"
    is_preference = infer_class(row, DatasetConfig()) is not None and not labels_steps(row)
    return "pairs" if is_preference else None


def labels_steps(row: Row) -> bool:
    """Report whether a row labels the steps of its answers."""
    found = infer_class(row, DatasetConfig())
    return found is not None and DATASET_CLASSES[found[0]].read_steps is not None


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
    return _row(
        row,
        prompt=_said(row, "prompt", role="user"),
        answers=[*right, *wrong],
        ranks=(0,) * len(right) + (1,) * len(wrong),
        subset=subset,
    )


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
