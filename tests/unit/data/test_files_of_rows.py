"""Files in the forms that people have: which rows they hold, and that none is lost in silence."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from chat_rows import assistant, user
from laurel.config.data import DatasetConfig, TaskSetConfig
from laurel.config.load import load_config
from laurel.config.schemas import SCHEMAS
from laurel.config.sft import DemonstrationSetConfig
from laurel.data.conversations import load_demonstrations
from laurel.data.preferences import load_preferences
from laurel.data.reading import read_prompt_frame
from laurel.data.sources import READERS, read_rows
from laurel.data.tasks import load_tasks
from laurel.errors import ConfigError, DataError, ModelError
from laurel.extensions.data_check.formats import suggestions
from laurel.observe.hub import check_not_missing

ROWS = [{"prompt": f"Question {i}?", "chosen": f"Answer {i}.", "rejected": "No."} for i in range(3)]
COLUMNS = {key: [row[key] for row in ROWS] for key in ROWS[0]}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
@pytest.mark.parametrize(
    "held",
    [
        ROWS,
        {"data": ROWS},
        {"version": "1.0", "train": ROWS},
        COLUMNS,
        {key: {str(i): value for i, value in enumerate(held)} for key, held in COLUMNS.items()},
    ],
    ids=["array", "data", "train", "columns", "columns by number"],
)
@pytest.mark.parametrize("indent", [None, 1], ids=["one line", "many lines"])
def test_a_json_text_holds_rows_whatever_the_file_is_called(tmp_path, held, suffix, indent):
    path = tmp_path / f"rows{suffix}"
    written = b"\n" + json.dumps(held, indent=indent).encode()
    path.write_bytes(gzip.compress(written) if suffix.endswith(".gz") else written)
    assert list(read_rows(str(path))) == [(f"{path.name}[{i}]", row) for i, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Where?"), assistant("Here.")]},
        {"messages": [user("Where?"), assistant("Here.")], "tools": [{}, {}]},
        {"prompt": "x", "chosen": ["a"], "rejected": ["b"]},
        {"prompt": "x", "data": [{"a": 1}], "labels": [True]},
        {"tags": ["a", "b"]},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_is_one_row(tmp_path, row, indent):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(row, indent=indent))
    assert [found for _, found in read_rows(str(path))] == [row]


def test_lines_stay_lines_with_their_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = ["", '{"a": 1', json.dumps({"data": [{"b": 1}]}), "[1, 2]", json.dumps({"c": 1})]
    path.write_text("\n".join(lines))
    bad: list[str] = []
    rows = list(read_rows(str(path), on_bad_row=lambda source, _: bad.append(source)))
    assert rows == [("rows.jsonl:3", {"data": [{"b": 1}]}), ("rows.jsonl:5", {"c": 1})]
    assert bad == ["rows.jsonl:2", "rows.jsonl:4"]
    # An object of rows with another line behind it is itself a line.
    path.write_text("\n".join([lines[2], lines[4]]))
    assert [source for source, _ in read_rows(str(path))] == ["rows.jsonl:1", "rows.jsonl:2"]


def test_a_broken_array_is_told_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n[\n{"a": 1},\n{"a": }\n]')
    with pytest.raises(DataError, match=r"rows\.jsonl:4: column 7: not JSON"):
        list(read_rows(str(path)))


def test_the_index_that_pandas_writes_is_no_reason_to_refuse_a_table(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(",prompt,chosen\n0,a,b\n1,c,d\n")
    assert [row for _, row in read_rows(str(path))] == [
        {"Unnamed: 0": "0", "prompt": "a", "chosen": "b"},
        {"Unnamed: 0": "1", "prompt": "c", "chosen": "d"},
    ]
    path.write_text("prompt,,chosen\na,b,c\n")
    with pytest.raises(DataError, match="must name each column once"):
        list(read_rows(str(path)))


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ('{"prompt": "a", "prompt": "b"}', "a key twice", "column 17: the key 'prompt' is twice"),
        ('{"chosen": [{"role": "x", "role": "y"}]}', "a key twice", "'role' is twice"),
        ('{"prompt": "a\\u0000b", "chosen": "x", "rejected": "y"}', "NUL", "character 2"),
        ('{"prompt": "a"}\0\0\0', "NUL bytes", "byte 16 of the line is NUL"),
    ],
)
def test_a_row_that_would_be_read_by_halves_says_so(write_rows, load, line, kind, said):
    path = write_rows(ROWS)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:4: .*{said}"):
        load(path)
    _, report = load(path, on_bad_row="skip")
    (found,) = report.dropped["malformed"].kinds
    assert kind in found


def test_a_key_twice_in_an_array_is_told_with_its_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n{"a": 1},\n{"a": 1, "a": 2}\n]')
    with pytest.raises(DataError, match=r"rows\.json:.*the key 'a' is twice in one object"):
        list(read_rows(str(path)))


def parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), stream)
    return stream.getvalue()


def test_gzip_is_known_by_its_content(tmp_path):
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    for name in ("rows.jsonl", "rows.csv"):
        (tmp_path / name).write_bytes(gzip.compress(text))
    assert [row for _, row in read_rows(str(tmp_path / "rows.jsonl"))] == ROWS
    (tmp_path / "rows.parquet").write_bytes(gzip.compress(parquet()))
    assert [row for _, row in read_rows(str(tmp_path / "rows.parquet"))] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", parquet(), "is a Parquet file, .* ends in \\.parquet"),
        ("rows.csv", b"ARROW1\0\0....", "is an Arrow file, .* ends in \\.arrow"),
        ("rows.csv", b"PK\x03\x04....", "is a zip archive"),
        ("rows.jsonl", b"\x28\xb5\x2f\xfd....", "is compressed by zstd"),
        ("rows.json", b"BZh91AY", "is compressed by bzip2"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        list(read_rows(str(tmp_path / name)))


def dangling(path):
    path.symlink_to("nowhere")


def pipe(path):
    os.mkfifo(path)


def bound(path):
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)  # such a path may have 107 characters
        one.bind(path.name)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (dangling, "is a link to nowhere, which leads to no file"),
        (pipe, "is a named pipe"),
        (bound, "is a socket"),
    ],
)
def test_what_is_no_file_is_called_what_it_is_wherever_it_is_named(
    tmp_path, monkeypatch, make, said
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.jsonl"
    make(path)
    with pytest.raises(DataError, match=said):
        list(read_rows(str(path)))
    with pytest.raises(DataError, match=f"data.prompt_file: .*{said}"):
        read_prompt_frame(str(path), None)
    with pytest.raises(ConfigError, match=said):
        load_config(SCHEMAS["rm"], path, [])
    with pytest.raises(ModelError, match=said):
        check_not_missing(str(path), key="policy.model_name")


def test_a_pipe_of_the_shell_is_read(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"rm: {seed: 7}\n")
    os.close(writing)
    with os.fdopen(reading):
        loaded = load_config(SCHEMAS["rm"], Path(f"/proc/self/fd/{reading}"), [])
    assert loaded.config.rm.seed == 7


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        ({"prompt": "?", "response_0": "a", "response_1": "b", "better_response_id": 0}, (0, 1)),
        ({"prompt": "?", "response_0": "a", "response_1": "b", "better_response_id": 1}, (1, 0)),
        ({"history": "?", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}, (0, 1)),
        ({"history": "?", "human_ref_A": "a", "human_ref_B": "b", "labels": 0}, (1, 0)),
        (
            {"question": "?", "answer_0": "a", "answer_1": "b", "score_0": -1, "score_1": 1},
            (1, 0),
        ),
        ({"question": "?", "answer_0": "a", "answer_1": "b", "score_0": 0, "score_1": 0}, (0, 0)),
    ],
)
def test_the_verdict_of_a_published_row_ranks_its_answers(load, row, ranks):
    (one,), _ = load([row], ties="keep")
    assert [answer.messages[0].content for answer in one.group.completions_G] == ["a", "b"]
    assert one.ranks_G == ranks


@pytest.mark.parametrize("key", ["better_response_id", "labels"])
def test_a_verdict_that_names_no_answer_is_refused(load, key):
    row = {"prompt": "?", "response_0": "a", "response_1": "b", "better_response_id": 2}
    if key == "labels":
        row = {"history": "?", "human_ref_A": "a", "human_ref_B": "b", "labels": 2}
    with pytest.raises(DataError, match=f"'{key}' is 2 where"):
        load([row])


def test_ratings_of_helpsteer_2_are_learned_and_its_turns_are_read(load):
    prompt = "Hello?\n<extra_id_1>Assistant\nYes?\n<extra_id_1>User\nWhere?"
    row = {"prompt": prompt, "response": "Here.", "helpfulness": 4, "verbosity": 1}
    (one,), report = load([row], attributes=["helpfulness"])
    assert not any("'prompt'" in note for note in report.notes)
    assert one.attributes_GK == ((4.0,),)
    assert [(turn.role, turn.content) for turn in one.group.prompt] == [
        ("user", "Hello?"),
        ("assistant", "Yes?"),
        ("user", "Where?"),
    ]
    assert any("'verbosity'" in note and "helpfulness" not in note for note in report.notes)


def run_program(said: str, directory, rows) -> None:
    """Run the two lines of Python that a message ends with on a file of rows."""
    program = said[said.index("import json") :]
    assert len(program.splitlines()) == 2
    path = directory / "FILE"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run([sys.executable, "-c", program], cwd=directory, check=True, timeout=60)


def test_the_two_lines_for_oasst_make_ranked_answers(load, tmp_path):
    said = [(None, "prompter", "Tree?", None), ("0", "assistant", "Oak.", 1)]
    said += [("0", "assistant", "Elm.", 0), ("2", "prompter", "Why?", None)]
    said += [("3", "assistant", "It is.", 0), ("3", "assistant", "No.", 1)]
    rows = [
        {"message_id": str(i), "parent_id": parent, "role": role, "text": text, "rank": rank}
        for i, (parent, role, text, rank) in enumerate(said)
    ]
    with pytest.raises(DataError, match="message of a tree") as problem:
        load(rows)
    run_program(str(problem.value), tmp_path, rows)
    first, second = load(tmp_path / "ranked.jsonl")[0]
    assert first.ranks_G == (1, 0)
    assert [(turn.role, turn.content) for turn in second.group.prompt] == [
        ("user", "Tree?"),
        ("assistant", "Elm."),
        ("user", "Why?"),
    ]
    assert suggestions(rows[0])[0].program in str(problem.value)


def test_the_two_lines_for_helpsteer_2_make_pairs(load, tmp_path):
    rows = [
        {"prompt": "Tree?", "response": "Oak.", "helpfulness": 4},
        {"prompt": "Tree?", "response": "Table.", "helpfulness": 1, "verbosity": 4},
        {"prompt": "Alone?", "response": "Yes.", "helpfulness": 1},
    ]
    with pytest.raises(DataError, match="has one answer") as problem:
        load(rows)
    run_program(str(problem.value), tmp_path, rows)
    (one,) = load(tmp_path / "pairs.jsonl")[0]
    assert one.ranks_G == (-4, -1)


KINDS = [
    {"prompt": "Where is {0}?", "chosen": "At {0}.", "rejected": "No."},
    {"chosen": [user("{0}?"), assistant("Yes.")], "rejected": [user("{0}?"), assistant("No.")]},
    {"prompt": "{0}", "completion": "It is {0}."},
    {"messages": [user("What is {0}?"), assistant("This.")]},
    {"question": "{0}?", "answer": "{0}"},
    {"prompt": "Same {0}?", "chosen": "No.", "rejected": "No."},
    {"prompt": "", "chosen": "a", "rejected": "b"},
    {"prompt": "A twin?", "chosen": "a", "rejected": "b"},
    {"prompt": "{0}", "chosen": 5, "rejected": "b"},
    {"prompt": "{0}", "response_0": "a", "response_1": "b", "better_response_id": 7},
    {"history": "{0}", "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
    {"prompt": "{0}\0", "chosen": "a", "rejected": "b"},
    {"nothing": "{0}"},
    {},
]
BROKEN = ["{", "[1, 2]", "nothing", '{"prompt": "a", "prompt": "b"}', "\0\0", "5"]


def sample(chance: random.Random, number: int) -> object:
    row = json.dumps(chance.choice(KINDS))
    return json.loads(row.replace("{0}", str(number)))


def as_file(directory, rows, form, chance) -> tuple[str, int]:
    """Write rows in a form; return the path and the number of rows in the file."""
    path = directory / f"rows{form}"
    if form == ".jsonl":
        lines = [json.dumps(row) for row in rows]
        lines[1:1] = chance.sample(BROKEN, 3)
        path.write_text("\n".join([lines[0], "", *lines[1:]]))
        return str(path), len(lines)
    if form == ".json":
        path.write_text(json.dumps([*rows, 5, None]))
        return str(path), len(rows) + 2
    names = sorted({key for row in rows for key in row})
    texts = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
        for row in rows
    ]
    if form == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(texts)
            file.write("one,cell\n")
        return str(path), len(rows) + 1
    table = pa.Table.from_pylist([dict.fromkeys(names) | row for row in texts])
    pyarrow.parquet.write_table(table, path)
    return str(path), len(rows)


@pytest.mark.parametrize("form", sorted(READERS.keys() - {".arrow"}))
@pytest.mark.parametrize("seed", range(5))
def test_every_row_of_a_file_is_kept_or_counted_with_a_reason(tmp_path, form, seed):
    chance = random.Random(seed)
    rows = [KINDS[0], *(sample(chance, i) for i in range(40))]
    path, number = as_file(tmp_path, rows, form, chance)
    settings = {"name": "d", "on_bad_row": "skip"}

    def rm():
        kept, report = load_preferences(
            DatasetConfig(data_path=path), ties="drop", duplicates="drop", **settings
        )
        return kept, report

    def sft():
        return load_demonstrations([DemonstrationSetConfig(data_path=path)], **settings)

    def grpo():
        sets = [TaskSetConfig(data_path=path, env_name="reward_model")]
        names = {"default_environment": "math", "environments": ["math", "reward_model"]}
        return load_tasks(sets, **settings, **names)

    for read in (rm, sft, grpo):
        kept, report = read()
        assert report.num_read == number
        assert report.num_kept == len(kept)
        left_out = [
            source
            for each in report.dropped.values()
            for sources in each.sources.values()
            for source in sources
        ]
        places = [*left_out, *(one.source for one in kept)]
        assert len(set(places)) == len(places) == number
