"""Rows of benchmarks, as they lie on disk."""

import gzip
import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from laurel.data.benchmarks import HubPart, read_benchmark
from laurel.errors import DataError
from laurel.extensions.evaluation.benchmark_rows import (
    BEST_OF_N,
    JUDGE_BENCH,
    PROCESS_BENCH,
    REWARD_BENCH,
    REWARD_BENCH_2,
    RM_BENCH,
)

PAIR = {"id": 1, "subset": "hep-go", "prompt": "q", "chosen": "a", "rejected": "b"}


def write(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_a_pair_from_any_format(tmp_path, name):
    (row,) = read_benchmark(REWARD_BENCH, [write(tmp_path / name, [PAIR])])
    assert (row.id, row.subset, row.ranks_G) == ("1", "hep-go", (0, 1))
    assert [one.messages[0].content for one in row.group.completions_G] == ["a", "b"]
    assert row.group.prompt[0].role == "user"
    assert row.source == str(tmp_path / name) + (":1" if "jsonl" in name else "[0]")


def test_ids_are_unique_and_the_same_the_next_time(tmp_path):
    rows = [PAIR, {**PAIR, "subset": "hep-js"}, {**PAIR, "subset": "hep-js"}, {**PAIR, "id": None}]
    path = write(tmp_path / "rows.jsonl", rows)
    ids = [row.id for row in read_benchmark(REWARD_BENCH, [path])]
    assert ids == ["1", "hep-js/1", "hep-js/1#2", "rows.jsonl:4"]
    assert ids == [row.id for row in read_benchmark(REWARD_BENCH, [path])]


def test_a_limit_takes_a_share_of_each_subset(tmp_path):
    subsets = ["hep-go"] * 8 + ["hep-js"] * 4
    rows = [{**PAIR, "id": str(i), "subset": name} for i, name in enumerate(subsets)]
    path = write(tmp_path / "rows.jsonl", rows)
    kept = [row.subset for row in read_benchmark(REWARD_BENCH, [path], limit=6)]
    assert kept == ["hep-go"] * 4 + ["hep-js"] * 2
    assert len(read_benchmark(REWARD_BENCH, [path], limit=99)) == 12


def test_partners_stay_together_and_a_limit_that_leaves_none_is_refused(tmp_path):
    ties = {"subset": "Ties", "prompt": "q", "chosen": ["a"], "rejected": ["b"]}
    names = ("ref:1", "tied:1", "ref:2", "tied:2")
    path = write(tmp_path / "rows.jsonl", [{**ties, "id": name} for name in names])
    kept = [row.id for row in read_benchmark(REWARD_BENCH_2, [path], limit=3)]
    assert kept in (["ref:1", "tied:1"], ["ref:2", "tied:2"])
    with pytest.raises(DataError, match="at most 1 are none"):
        read_benchmark(REWARD_BENCH_2, [path], limit=1)


def test_the_right_answer_of_judge_bench_comes_first(tmp_path):
    row = {
        "pair_id": "p",
        "source": "livecodebench",
        "question": "q",
        "response_A": "a",
        "response_B": "b",
        "label": "B>A",
    }
    (read,) = read_benchmark(JUDGE_BENCH, [write(tmp_path / "rows.jsonl", [row])])
    assert [one.messages[0].content for one in read.group.completions_G] == ["b", "a"]
    assert (read.id, read.subset) == ("p", "livecodebench")


def test_rm_bench_and_best_of_n(tmp_path):
    styles = {
        "id": 1,
        "domain": "chat",
        "prompt": "q",
        "chosen": list("abc"),
        "rejected": list("def"),
    }
    (row,) = read_benchmark(RM_BENCH, [write(tmp_path / "rm.jsonl", [styles])])
    assert (row.subset, row.ranks_G) == ("chat", (0, 0, 0, 1, 1, 1))
    groups = [{"prompt": "q", "completions": ["a", "b", "c"], "passed": [False, True, False]}]
    (row,) = read_benchmark(BEST_OF_N, [write(tmp_path / "n.jsonl", groups)])
    assert row.ranks_G == (1, 0, 1)
    groups = [{"problem": "q", "answer": "420", "responses": ["a", "b"], "is_correct": [1, 0]}]
    (row,) = read_benchmark(BEST_OF_N, [write(tmp_path / "r.jsonl", groups)])
    assert row.ranks_G == (0, 1)
    assert row.group.prompt[0].content == "q"


def test_the_files_of_rm_bench_with_one_domain_each(tmp_path):
    styles = {"id": 1, "prompt": "q", "chosen": list("abc"), "rejected": list("def")}
    sources = ["alpacaeval", "refusals-offensive", "xstest-should-respond", "nobody's"]
    every = [{**styles, "id": at, "subset": one} for at, one in enumerate(sources)]
    read = read_benchmark(RM_BENCH, [write(tmp_path / "rows.jsonl", every)])
    assert [row.subset for row in read] == ["chat", "safety-refuse", "safety-response", "nobody's"]
    by_name = write(tmp_path / "math_filtered.jsonl.gz", every[3:])
    assert [row.subset for row in read_benchmark(RM_BENCH, [by_name])] == ["math"]
    with pytest.raises(
        DataError, match=r"'alpacaeval' with three .* is of RM-Bench.*eval rm-bench"
    ):
        read_benchmark(REWARD_BENCH_2, [str(tmp_path / "rows.jsonl")])


@pytest.mark.parametrize(
    ("form", "row", "other"),
    [
        (JUDGE_BENCH, {"prompt": "q", "chosen": "a", "rejected": "b"}, "pairs"),
        (JUDGE_BENCH, PAIR, "reward-bench"),
        (RM_BENCH, {"question": "q", "responses": ["a"], "correct": [True]}, "best-of-n"),
    ],
)
def test_a_row_of_something_else_is_refused_with_its_name(tmp_path, form, row, other):
    with pytest.raises(DataError, match=rf"These look like rows for laurel eval {other}$"):
        read_benchmark(form, [write(tmp_path / "rows.jsonl", [row])])


def test_rows_that_label_steps_are_no_preferences(tmp_path):
    rows = [{"prompt": "q", "completions": ["a"], "labels": [True]}]
    with pytest.raises(DataError, match="label each step: laurel rm trains and validates with"):
        read_benchmark(PROCESS_BENCH, [write(tmp_path / "rows.jsonl", rows)])


def test_answers_with_verdicts_are_best_of_n_whatever_their_labels(tmp_path):
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [True, True], "correct": [1, 0]}
    with pytest.raises(DataError, match=r"These look like rows for laurel eval best-of-n$"):
        read_benchmark(REWARD_BENCH, [write(tmp_path / "rows.jsonl", [row])])


def test_splits_of_a_saved_data_set_and_the_benchmarks_own_parts(tmp_path, monkeypatch):
    other = {**PAIR, "id": 2, "prompt": "r"}
    monkeypatch.chdir(tmp_path)
    DatasetDict(filtered=Dataset.from_list([PAIR]), raw=Dataset.from_list([other])).save_to_disk(
        "saved"
    )
    (row,) = read_benchmark(REWARD_BENCH, ["saved"], split="raw")
    assert row.id == "2"
    with pytest.raises(DataError, match="no split 'train'; it has: filtered, raw"):
        read_benchmark(REWARD_BENCH, ["saved"])
    own = replace(REWARD_BENCH, hub=(HubPart("saved", "filtered", "shp"), HubPart("saved", "raw")))
    both = [(row.id, row.subset) for row in read_benchmark(own, [])]
    assert both == [("1", "shp"), ("2", "hep-go")]
    assert [row.id for row in read_benchmark(own, ["saved"])] == ["1", "2"]
    assert [row.id for row in read_benchmark(own, ["saved"], split="raw")] == ["2"]


def test_an_id_of_ties_stands_once(tmp_path):
    ties = {"id": "ref:1", "subset": "Ties", "prompt": "q", "chosen": ["a"], "rejected": ["b"]}
    path = write(tmp_path / "rows.jsonl", [ties, {**ties, "id": "tied:1"}, ties])
    with pytest.raises(DataError, match=r"rows.jsonl:3: there is a row with the id ref:1 already"):
        read_benchmark(REWARD_BENCH_2, [path])


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        (REWARD_BENCH, {**PAIR, "rejected": None}, r":1: 'rejected' is null\. A row of Reward"),
        (REWARD_BENCH, {**PAIR, "prompt": []}, ":1: 'prompt' is an empty list"),
        (REWARD_BENCH, {**PAIR, "subset": 3}, ":1: 'subset' is a number where text is expected"),
        (REWARD_BENCH_2, PAIR, ":1: 'chosen' is a string where a list is expected"),
        (REWARD_BENCH_2, {**PAIR, "chosen": [], "rejected": ["b"]}, "'chosen' is an empty list"),
        (
            REWARD_BENCH_2,
            {**PAIR, "subset": "Ties", "chosen": ["a"], "rejected": ["b"]},
            ":1: the id of a row of Ties is ref:<n> or tied:<n>, not 1",
        ),
        (
            BEST_OF_N,
            {"prompt": "q", "completions": ["a"], "correct": ["yes"]},
            "'correct' must hold true or false for each of the 1 completions",
        ),
        (REWARD_BENCH, {**PAIR, "chosen": ["a"]}, ":1: 'chosen' holds something that is no"),
        (
            REWARD_BENCH_2,
            {**PAIR, "chosen": ["a"], "rejected": ["b"] * 3, "num_correct": 2},
            ":1: 'num_correct' is 2, and the row has 1 right and 3 wrong answers",
        ),
        (
            RM_BENCH,
            {**PAIR, "domain": "chat", "chosen": ["a", "b"], "rejected": ["c"] * 3},
            ":1: 'chosen' holds 2 answers where 3 are expected, one of each style",
        ),
        (
            JUDGE_BENCH,
            {"source": "x", "question": "q", "response_A": "a", "response_B": "b", "label": "A"},
            ":1: 'label' is 'A' where A>B or B>A is meant",
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, form, row, message):
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=message) as caught:
        read_benchmark(form, [path])
    assert str(caught.value).startswith(path)
    assert f"A row of {form.title} is {form.written}" in str(caught.value)


def test_columns_that_an_evaluation_does_not_read_are_named(tmp_path):
    notes = []
    row = {**PAIR, "system": "Be brief.", "remark": "One of the better pairs.", "chosen_model": "m"}
    (read,) = read_benchmark(
        REWARD_BENCH, [write(tmp_path / "rows.jsonl", [row])], say=notes.append
    )
    assert (read.group.prompt[0].role, read.group.prompt[0].content) == ("system", "Be brief.")
    assert [("'system'" in note, "'remark'" in note) for note in notes] == [
        (True, False),
        (False, True),
    ]
    assert not any("chosen_model" in note for note in notes)
