"""Which samples a page holds: what people look for, some by chance, and how many of how many."""

from dataclasses import replace

from laurel.extensions.report.samples import (
    Chooser,
    RunSamples,
    SampleTable,
    before_and_after,
    sample_table,
    script_json,
    shorten_text,
    visible_lines,
    within,
)
from laurel.observe.console import CompletionRow, write_completions
from report_runs import EVIL, record


def chosen(rows, **sizes):
    chooser = Chooser(**sizes)
    for row in rows:
        chooser.add(row)
    return chooser


def completion(step, reward, **changes):
    told = {
        "step": step,
        "task": "t",
        "group": "g",
        "environment": "math",
        "prompt": "p",
        "completion": f"said at {step}",
        "reward": reward,
        "advantage": 0.0,
        **changes,
    }
    return CompletionRow(**told)  # type: ignore[arg-type]


def test_of_many_rows_the_first_last_best_worst_and_some_by_chance_are_there():
    rows: list[dict[str, object]] = [
        {"prompt": f"p{i}", "completion": "c", "reward": float((i * 37) % 1000), "advantage": 0.1}
        for i in range(1000)
    ]
    rows[500]["advantage"] = -9.0
    table = sample_table("t", chosen(rows, num_of_a_kind=3, num_random=20), where="x.parquet")
    why = {str(row[0]): str(row[-1]) for row in table.rows}
    assert {"p0", "p1", "p2", "p997", "p998", "p999", "p500"} <= set(why)
    rewards = {row[0]: row[2] for row in table.rows}
    assert sorted(rewards[p] for p in why if "highest" in why[p]) == [997.0, 998.0, 999.0]
    assert sorted(rewards[p] for p in why if "lowest" in why[p]) == [0.0, 1.0, 2.0]
    assert "furthest from its group" in why["p500"]
    assert sum("random" in reason for reason in why.values()) == 20
    assert table.num_rows == 1000
    assert table.note.startswith(f"{len(table.rows)} of 1,000 samples: up to 3 of each kind")
    assert table.note.endswith("All are in x.parquet.")


def test_rows_without_a_number_are_none_of_best_and_worst():
    rows: list[dict[str, object]] = [
        {"reward": None, "failure": "timeout", "completion": "a"},
        {"reward": float("nan"), "completion": "b"},
        {"reward": 1.0, "completion": "c"},
    ]
    table = sample_table("t", chosen(rows, num_of_a_kind=1, num_random=0), where="x")
    by_text = {row[0]: row for row in table.rows}
    assert "failed" in str(by_text["a"][-1])
    assert "highest" not in str(by_text["a"][-1])
    assert by_text["a"][1] is None
    assert "b" not in by_text


def test_before_and_after_by_prompt():
    rows: list[dict[str, object]] = [
        {
            "step": step,
            "task": f"t{i}",
            "prompt": f"p{i}",
            "completion": f"{step}/{i}",
            "reward": step * 0.1 + i,
        }
        for step in (0, 5, 10)
        for i in (0, 1)
    ]
    rows += [{"step": 10, "task": "new", "prompt": "new", "completion": "x", "reward": 1.0}]
    table = before_and_after("b", rows)
    assert table is not None
    assert table.rows == [
        ["p0", "", "0/0", 0.0, "10/0", 1.0, 1.0],
        ["p1", "", "0/1", 1.0, "10/1", 2.0, 1.0],
    ]
    assert "at step 0 and at step 10; 2 prompts" in table.note
    assert before_and_after("b", rows[:2]) is None
    assert before_and_after("b", [rows[0], rows[-1]]) is None


def test_a_page_that_would_be_too_large_gives_up_rows_of_chance_first():
    rows = [["x" * 100, "random" if i % 2 else "first"] for i in range(100)]
    table = SampleTable(
        title="t",
        columns=["completion", "chosen for"],
        kinds=["text", "text"],
        rows=rows,
        num_rows=500,
        note="All.",
    )
    (small,) = within([table], 8_000)
    assert sum(row[1] == "first" for row in small.rows) == 50
    assert 20 <= sum(row[1] == "random" for row in small.rows) <= 30
    assert small.note.endswith(f"{len(small.rows)} of these 100 are here.")
    (tiny,) = within([table], 1_000)
    assert 5 <= len(tiny.rows) <= 10
    assert within([table], 100_000) == [table]


def test_completions_of_the_training_are_read_once_and_again_after_a_resume(tmp_path):
    run = replace(record({"train/reward": [0.0] * 3}), path=tmp_path)
    folder = tmp_path / "completions"
    for step in (1, 2, 4):  # the last one is beyond the run: a resume left it
        write_completions(folder / f"step_{step:06d}.parquet", [completion(step, float(step))])
    (folder / "step_000003.parquet").write_bytes(b"PAR1 cut short")
    reader = RunSamples()
    (table,) = reader.tables(run)
    assert [row[0] for row in table.rows] == [1, 2]
    assert "1 file could not be read: step_000003.parquet" in table.note
    write_completions(folder / "step_000003.parquet", [completion(3, 3.0)])
    (table,) = reader.tables(run)
    assert [row[0] for row in table.rows] == [1, 2, 3]
    write_completions(folder / "step_000002.parquet", [completion(2, 7.0), completion(2, 8.0)])
    (table,) = reader.tables(run)
    assert [row[0] for row in table.rows] == [1, 2, 2, 3]
    assert table.num_rows == 4


def test_hostile_texts_are_harmless_and_visible():
    assert visible_lines("a\x1b\u202eb\nc\u200b\U000e0041") == (
        "a\\x1b\\u202eb\nc\\u200b\\U000e0041"
    )
    assert visible_lines("\u0627\u200c\u0628 \U0001f469\u200d\U0001f52c") == (
        "\u0627\u200c\u0628 \U0001f469\u200d\U0001f52c"
    )
    text = script_json([EVIL])
    assert "<" not in text
    assert "&" not in text
    assert shorten_text("a" * 10 + "b" * 10, 10) == "aaaaa [... 10 characters ...] bbbbb"
