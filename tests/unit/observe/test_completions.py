"""Completions on screen and in parquet."""

from io import StringIO

from pyarrow import parquet
from rich.console import Console

from laurel.observe.console import (
    CompletionRow,
    completion_text,
    print_completions,
    write_completions,
)
from laurel.types import Message

ROW = CompletionRow(
    step=3,
    task="train:a.jsonl:1",
    group="0-2-0-1",
    environment="math",
    prompt="What is 1+1?",
    completion="It is \\boxed{2}.",
    reward=1.0,
    advantage=-0.5,
    answer="2",
    expected="2",
    num_tokens=7,
    weight_version=2,
)
FAILED = CompletionRow(
    step=3,
    task="b",
    group="g",
    environment="math",
    prompt="p",
    completion="",
    reward=None,
    failure="no verdict within 3 s",
    truncated=True,
)


def shown(*rows, title="validation, step 3"):
    stream = StringIO()
    print_completions(Console(file=stream, width=120, color_system=None), title, rows)
    return stream.getvalue()


def test_what_is_written_is_what_is_read(tmp_path):
    path = tmp_path / "completions" / "step_000003.parquet"
    write_completions(path, [ROW, FAILED])
    table = parquet.read_table(path)
    assert table.column_names == list(CompletionRow.columns())
    assert [CompletionRow(**row) for row in table.to_pylist()] == [ROW, FAILED]
    types = {name: str(table.schema.field(name).type) for name in ("reward", "step", "truncated")}
    assert types == {"reward": "double", "step": "int64", "truncated": "bool"}
    assert dict(zip(CompletionRow.columns(), ROW.cells, strict=True)) == table.to_pylist()[0]
    for rows in ([FAILED], []):  # the same types where everything is missing
        write_completions(path, rows)
        assert parquet.read_schema(path).equals(table.schema)


def test_any_text_can_be_written(tmp_path):
    odd = "a\0b \ud83d \x1b[31m é \U0001f33f"
    row = CompletionRow(
        step=0, task="t", group="g", environment="e", prompt=odd, completion=odd, reward=0.0
    )
    write_completions(tmp_path / "a.parquet", [row])
    (read,) = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert read["prompt"].startswith("a\0b ")
    assert read["prompt"].endswith(" \x1b[31m é \U0001f33f")


def test_markup_and_escapes_of_a_policy_are_shown_and_not_obeyed():
    row = CompletionRow(
        step=0,
        task="t",
        group="g",
        environment="e",
        prompt="[bold]p[/bold]",
        completion="[red]x[/nonsense] \x1b[2J",
        reward=0.25,
    )
    text = shown(row, FAILED, title="[bold]")
    assert "failed:" in text
    assert "[cut off]" in text
    assert "[bold]p[/bold]" in text
    assert "[red]x[/nonsense]" in text
    assert "\x1b" not in text


def test_the_environments_words_do_not_run_into_the_policys():
    turns = (
        Message("assistant", "5"),
        Message("environment", "higher"),
        Message("user", "!"),
        Message("assistant", "7"),
    )
    assert completion_text(turns) == "5 [environment] higher! [policy] 7"
    assert completion_text(turns[:1]) == "5"
    assert completion_text(()) == ""
