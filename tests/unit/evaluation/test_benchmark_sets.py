"""A benchmark as a run is measured on it: its rows, its figures, and what cannot be one."""

import json
from collections import Counter
from typing import Any

import pytest

from laurel.config.data import BenchmarkSetConfig
from laurel.data.benchmarks import limit_rows
from laurel.errors import DataError
from laurel.evaluation.benchmarks import BenchmarkSet, selectable
from laurel.extensions.evaluation import reward_bench
from laurel.extensions.evaluation.benchmarks import BENCHMARKS
from laurel.types import Score


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def loaded(path, rows, **settings):
    settings.setdefault("benchmark", "reward-bench")
    return BenchmarkSet.load("Mine", BenchmarkSetConfig(data_path=write(path, rows), **settings))


def pair(number, subset):
    """The right answer of an even row is longer."""
    chosen = f"right {number}" + " indeed" * (number % 2 == 0)
    return {
        "id": number,
        "subset": subset,
        "prompt": f"{number}?",
        "chosen": chosen,
        "rejected": f"wrong {number}",
    }


def scored(chosen, scores):
    """Scores by the text of an answer; None fails, and what is not named has 0."""

    def one(text):
        value = scores.get(text, 0.0)
        return Score(value=value, failure="too long" if value is None else None)

    return [
        tuple(one(completion.messages[-1].content) for completion in group.completions_G)
        for group in chosen.groups
    ]


def test_reward_bench_by_hand(tmp_path):
    subsets = (
        "alpacaeval-easy",
        "mt-bench-easy",
        "llmbar-natural",
        "llmbar-natural",
        "donotanswer",
        "math-prm",
        "hep-go",
        "hep-go",
    )
    chosen = loaded(tmp_path / "rows.jsonl", [pair(i, s) for i, s in enumerate(subsets)])
    scores = {
        "right 0 indeed": 1.0,
        "right 1": -1.0,
        "right 2 indeed": 1.0,
        "right 3": 0.0,
        "right 4 indeed": 1.0,
        "right 5": 2.0,
        "right 6 indeed": 1.0,
        "wrong 7": None,
    }
    found = chosen.figures(scored(chosen, scores))
    chat, chat_hard, safety, reasoning = 100 / 128, 1 / 2, 1.0, 1.0
    assert found == {
        "final_score": pytest.approx((chat + chat_hard + safety + reasoning) / 4),
        "longer_wins_final_score": pytest.approx((100 / 128 + 0.5 + 1 + 164 / (984 + 164)) / 4),
        "accuracy": 5 / 7,
        # Rows 0, 2, 4 and 6; row 7, which failed, is in neither.
        "longer_wins_baseline": 4 / 7,
        "chat": pytest.approx(chat),
        "chat_hard": chat_hard,
        "safety": safety,
        "reasoning": reasoning,
        "num_rows": 7.0,
        "num_failures": 1.0,
    }


def test_without_a_section_there_is_no_final_score(tmp_path):
    chosen = loaded(tmp_path / "rows.jsonl", [pair(i, "hep-go") for i in range(3)])
    found = chosen.figures(scored(chosen, {}))
    assert "final_score" not in found
    assert "longer_wins_final_score" not in found
    assert found["accuracy"] == found["reasoning"] == 0.0
    assert chosen.possible() == ["accuracy", "reasoning"]
    assert "absent section: Chat" in chosen.notes()
    nothing = chosen.figures(scored(chosen, {f"wrong {i}": None for i in range(3)}))
    assert nothing == {"num_rows": 0.0, "num_failures": 3.0}


def test_best_of_n_by_hand(tmp_path):
    rows = [
        {
            "prompt": "a?",
            "completions": ["a1", "a2", "a3 is long"],
            "correct": [True, False, False],
        },
        {"prompt": "b?", "completions": ["b1", "b2"], "correct": [False, True]},
    ]
    chosen = loaded(tmp_path / "rows.jsonl", rows, benchmark="best-of-n")
    found = chosen.figures(scored(chosen, {"a1": 3.0, "b1": 1.0}))
    assert found == {
        "final_score": 0.5,
        "accuracy": 0.5,
        "random": pytest.approx((1 / 3 + 1 / 2) / 2),
        "oracle": 1.0,
        "longer_wins_baseline": 0.25,
        "longer_wins_final_score": 0.25,
        "num_rows": 2.0,
        "num_failures": 0.0,
    }
    assert selectable("best-of-n") == ["final_score", "accuracy"]


def test_pairs_say_how_many_are_ties(tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(4)]
    chosen = loaded(tmp_path / "rows.jsonl", rows, benchmark="pairs")
    found = chosen.figures(scored(chosen, {"c0": 1.0, "r1": 1.0}))
    assert (found["final_score"], found["accuracy"], found["tie_share"]) == (0.25, 0.25, 0.5)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_parts_by_distinct_names(name):
    keys = list(BENCHMARKS[name].parts.values())
    assert len(set(keys)) == len(keys)
    assert all(key.isidentifier() and key == key.lower() for key in keys)
    assert not {"final_score", "accuracy", "num_rows", "num_failures"} & set(keys)


def test_a_cut_benchmark_says_so_and_has_no_final_score(tmp_path):
    subsets = [name for names in reward_bench.SECTIONS.values() for name in names]
    rows = [pair(i, subset) for i, subset in enumerate(s for s in subsets for _ in range(4))]
    whole = loaded(tmp_path / "rows.jsonl", rows)
    cut = loaded(tmp_path / "rows.jsonl", rows, max_samples=len(subsets))
    assert (len(cut.rows), cut.num_read) == (len(subsets), len(rows))
    # Even, so that each subset has its share.
    assert Counter(row.subset for row in cut.rows) == dict.fromkeys(subsets, 1)
    assert "final_score" in whole.figures(scored(whole, {}))
    assert "final_score" not in cut.figures(scored(cut, {}))
    assert set(cut.possible()) == set(whole.possible()) - {"final_score"}
    assert cut.notes()[0].startswith("cut to 23 of 92 rows (max_samples)")
    assert cut.described().endswith("rows.jsonl: 23 of 92 rows")
    again = loaded(tmp_path / "rows.jsonl", rows, max_samples=len(subsets))
    assert [row.id for row in again.rows] == [row.id for row in cut.rows]
    enough = loaded(tmp_path / "rows.jsonl", rows, max_samples=len(rows))
    assert "final_score" in enough.possible()


def test_the_rows_of_a_prompt_of_ties_stay_together(tmp_path):
    rows: list[dict[str, Any]] = []
    for n in range(6):
        for kind, right in (("ref", ["a"]), ("tied", ["a", "b"])):
            rows.append(
                {
                    "id": f"{kind}:{n}",
                    "subset": "Ties",
                    "prompt": f"{n}?",
                    "chosen": right,
                    "rejected": ["c"],
                }
            )
    # All of one kind, then all of the other.
    rows.sort(key=lambda row: row["id"])
    whole = loaded(tmp_path / "rows.jsonl", rows, benchmark="reward-bench-2")
    for limit in range(2, 13):
        kept = [row.id for row in limit_rows(whole.rows, limit)]
        assert len(kept) == limit - limit % 2
        numbers = Counter(name.partition(":")[2] for name in kept)
        assert set(numbers.values()) == {2}
    with pytest.raises(DataError, match=r"Mine \(benchmark reward-bench-2\): max_samples=1 leaves"):
        loaded(tmp_path / "rows.jsonl", rows, benchmark="reward-bench-2", max_samples=1)


def test_what_cannot_be_a_benchmark_is_told_with_its_name(tmp_path):
    def refusal(**settings):
        with pytest.raises(DataError) as told:
            BenchmarkSet.load("Mine", BenchmarkSetConfig(**settings))
        return str(told.value)

    missing = refusal(benchmark="rm-bench", data_path=str(tmp_path / "none.jsonl"))
    assert missing.startswith("Mine (benchmark rm-bench): ")
    assert "none.jsonl" in missing
    other = write(tmp_path / "pairs.jsonl", [pair(0, "hep-go")])
    wrong = refusal(benchmark="judge-bench", data_path=other)
    assert "pairs.jsonl:1" in wrong
    assert "A row of JudgeBench is" in wrong
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    empty = refusal(benchmark="reward-bench", data_path=str(tmp_path / "empty.jsonl"))
    assert "empty.jsonl" in empty
    steps = write(tmp_path / "steps.jsonl", [{"prompt": "q", "completions": ["a"], "labels": [1]}])
    unranked = refusal(benchmark="pairs", data_path=steps)
    assert "steps.jsonl:1: These label each step: laurel rm trains" in unranked
