import csv
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from laurel.data.sources import read_rows
from laurel.errors import DataError

ROWS = [{"prompt": "p1", "n": 1}, {"prompt": "p2", "n": 2}, {"prompt": "ü3", "n": 3}]


def rows_of(path, **options):
    return list(read_rows(str(path), **options))


def failure(path, **options):
    with pytest.raises(DataError) as caught:
        rows_of(path, **options)
    return str(caught.value)


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_parquet(rows):
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def as_arrow(rows, *, form):
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    make = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


FORMATS: dict[str, tuple[str, Callable[[list[Any]], bytes], list[str]]] = {
    "lines": ("r.jsonl", as_lines, [":1", ":2", ":3"]),
    "lines called json": ("r.json", as_lines, [":1", ":2", ":3"]),
    "array": ("r.json", lambda rows: json.dumps(rows, indent=1).encode(), ["[0]", "[1]", "[2]"]),
    "parquet": ("r.parquet", as_parquet, ["[0]", "[1]", "[2]"]),
    "arrow stream": ("r.arrow", lambda rows: as_arrow(rows, form="stream"), ["[0]", "[1]", "[2]"]),
    "arrow file": ("r.arrow", lambda rows: as_arrow(rows, form="file"), ["[0]", "[1]", "[2]"]),
}


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, form, is_compressed):
    name, write, places = FORMATS[form]
    content = write(ROWS)
    if is_compressed:
        name, content = name + ".gz", gzip.compress(content)
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == [
        (name + place, row) for place, row in zip(places, ROWS, strict=True)
    ]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_csv_rows_are_text_and_their_source_is_their_first_line(tmp_path, is_compressed):
    text = 'prompt,chosen\np1,"two\nlines, ""quoted"""\np2,ü\n'
    path = tmp_path / ("r.csv.gz" if is_compressed else "r.csv")
    path.write_bytes(gzip.compress(text.encode()) if is_compressed else text.encode())
    assert rows_of(path) == [
        (f"{path.name}:2", {"prompt": "p1", "chosen": 'two\nlines, "quoted"'}),
        (f"{path.name}:4", {"prompt": "p2", "chosen": "ü"}),
    ]


def test_a_csv_cell_may_be_longer_than_pythons_limit_and_may_hold_messages(tmp_path):
    said = [{"role": "user", "content": "x" * 200_000}]
    with open(tmp_path / "r.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([["context", "note"], [json.dumps(said), "[{not json"]])
        writer.writerow([json.dumps([{"a": 1}]), ""])
    assert [row for _, row in rows_of(tmp_path / "r.csv")] == [
        {"context": said, "note": "[{not json"},
        {"context": '[{"a": 1}]', "note": ""},
    ]


def test_blank_lines_are_passed_over_and_a_byte_order_mark_is_no_part_of_a_row(tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b'\xef\xbb\xbf\n{"a": 1}\n  \n{"a": 2}')
    assert rows_of(tmp_path / "r.jsonl") == [("r.jsonl:2", {"a": 1}), ("r.jsonl:4", {"a": 2})]
    (tmp_path / "r.json").write_bytes(b'\xef\xbb\xbf [{"a": 1}]')
    assert rows_of(tmp_path / "r.json") == [("r.json[0]", {"a": 1})]
    (tmp_path / "r.csv").write_bytes(b"\xef\xbb\xbfa\n1\n")
    assert rows_of(tmp_path / "r.csv") == [("r.csv:2", {"a": "1"})]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"a": 1,, "b": 2}', "column 9: not JSON (Expecting"),
        (b"[1, 2]", "the row is a list where an object"),
        (b"null", "the row is null"),
        (b'{"text": "NaN, Infinity", "n": NaN}', "column 32: not JSON (NaN is no JSON value)"),
        (b'{"n": -Infinity}', "column 7: not JSON (-Infinity is no"),
        (b'{"n": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": "caf\xe9"}', "byte 11 of the line (0xe9) is not UTF-8"),
    ],
)
def test_a_bad_line_is_named_with_its_place_and_can_be_left_out(tmp_path, line, part):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    message = failure(path)
    assert message.startswith(f"{path}:2: ")
    assert part in message
    assert "data.on_bad_row=skip" in message
    assert [source for source, _ in rows_of(path, on_bad_row=lambda *_: None)] == [
        "r.jsonl:1",
        "r.jsonl:3",
    ]


def test_an_array_may_hold_bad_rows(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('[{"a": 1}, 7, {"a": 2}]')
    assert f"{path}[1]: the row is a number" in failure(path)
    assert rows_of(path, on_bad_row=lambda *_: None) == [
        ("r.json[0]", {"a": 1}),
        ("r.json[2]", {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("r.json", b'[{"a": 1},\n {"a": }]', ":2: column 8"),
        ("r.json", b'[{"a": 1},\n {"a": }]', "one object per line"),
        ("r.json", b'[{"a": 1},\n {"a": NaN}]', ":2: column 8"),
        ("r.json", b'[{"a": 1},\n {"a": "\xe9"}]', ":2: byte 20"),
        ("r.json", b"[]", "holds no rows"),
        ("r.json", b"[" * 100_000, "nested too deeply"),
        ("r.csv", b"a,b\n1,2,3\n4,5\n", ":2: the row has 3 cells where the header names 2 columns"),
        ("r.csv", b'a,b\n1,"\n', ":2: not CSV"),
        ("r.csv", b"a,b\n1,\xe9\n", ":2: 'b' is not UTF-8"),
        ("r.csv", b"a,a\n1,2\n", ":1: the header must name each column once"),
        ("r.csv", b"a,b\n", "holds no rows"),
        ("r.csv", b'"a,b\n', ":1: the header is not CSV"),
        (
            "r.csv",
            b"prompt;chosen\nWhy, then?;So.\n",
            ":1: the columns are separated by semicolons",
        ),
        ("r.csv", b"prompt\tchosen\nWhy, then?\tSo.\n", "separated by tabs, where CSV has commas"),
        ("r.csv.gz", b"", " is empty (0 bytes). Write it again"),
        ("r.parquet", b"", " is empty (0 bytes). Write it again"),
        ("r.parquet", b"not a table at all, whatever its name says", " is no "),
        ("r.arrow", b"not a table at all, whatever its name says", " is no "),
        ("r.txt", b"hello", ".jsonl, .json, .csv, .parquet, .arrow, each also with .gz"),
    ],
)
def test_what_is_broken_is_named_with_its_line(tmp_path, name, content, part):
    path = tmp_path / name
    path.write_bytes(content)
    message = failure(path)
    assert message.startswith(str(path))
    assert part in message


def test_a_gzip_file_that_breaks_off_is_named_with_its_last_row(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    whole = gzip.compress(
        as_lines([{"n": index, "t": os.urandom(99).hex()} for index in range(99)])
    )
    path.write_bytes(whole[: len(whole) // 2])
    message = failure(path, on_bad_row=lambda *_: None)
    assert message.startswith(f"{path}: the gzip stream breaks off after r.jsonl.gz:")
    path.write_bytes(b"plain text\n")
    assert "no gzip file" in failure(path)
    (tmp_path / "r.parquet.gz").write_bytes(whole[:50])
    assert "breaks off after the start" in failure(tmp_path / "r.parquet.gz")


def test_an_absent_file_names_its_neighbours(tmp_path):
    (tmp_path / "train.jsonl.gz").write_bytes(b"")
    (tmp_path / "notes.md").write_bytes(b"")
    message = failure(tmp_path / "trian.jsonl.gz")
    assert "trian.jsonl.gz does not exist" in message
    assert "there is train.jsonl.gz" in message
    (tmp_path / "test.jsonl").write_bytes(b"")
    assert "there are test.jsonl, train.jsonl.gz" in failure(tmp_path / "zzz")
    assert "neither does the directory" in failure(tmp_path / "nowhere" / "train.jsonl")
    (tmp_path / "empty").mkdir()
    assert "nothing there looks like data" in failure(tmp_path / "empty" / "train.jsonl")


def test_what_looks_like_a_path_is_never_taken_for_a_hub_name(tmp_path):
    for name in ("train.jsonl", "./train", "../train", "/train", "data.csv.gz", f"{tmp_path}/x"):
        assert "does not exist" in failure(name)


# The library reads its cache directory and whether it is offline when it is imported, so these run
# in a process of their own.
HUB_PROGRAM = """
import json, sys
from laurel.data.sources import read_rows
from laurel.errors import DataError
answers = []
for name, options in json.loads(sys.argv[1]):
    try:
        answers.append([row for row in read_rows(name, **options)])
    except DataError as problem:
        answers.append(str(problem))
print(json.dumps(answers))
"""


def test_saved_sets_directories_and_an_unreachable_hub(tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    save = (
        "import datasets, sys\n"
        "one = datasets.Dataset.from_list([{'a': 1}, {'a': 2}, {'a': 3}])\n"
        "one.select([2, 0]).save_to_disk(sys.argv[1] + '/one')\n"
        "datasets.DatasetDict(train=one, test=one.select([1])).save_to_disk(sys.argv[1] + '/two')\n"
    )
    subprocess.run(
        [sys.executable, "-c", save, str(tmp_path)],
        env=environment,
        check=True,
        capture_output=True,
    )
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"a": 7}\n')
    (tmp_path / "bare").mkdir()
    checkpoint = tmp_path / "results" / "rm" / "step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "training_info.json").write_text("no rows")
    (checkpoint / "manifest.json").write_text('[{"files": 1}]')
    asked: list[tuple[str, dict[str, str]]] = [
        (str(tmp_path / "one"), {}),
        (str(tmp_path / "two"), {}),
        (str(tmp_path / "two"), {"split": "test"}),
        (str(tmp_path / "two"), {"split": "dev"}),
        (str(tmp_path / "files"), {}),
        (str(tmp_path / "files"), {"split": "dev"}),
        (str(tmp_path / "files"), {"subset": "other"}),
        (str(tmp_path / "bare"), {}),
        (str(tmp_path / "results"), {}),
        (str(checkpoint), {}),
        ("owner/name", {}),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", HUB_PROGRAM, json.dumps(asked)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == ""  # no bars, no notices
    one, two, two_test, two_dev, files, files_dev, files_other, *rest = json.loads(ran.stdout)
    bare, results, step, hub = rest
    assert one == [["one[0]", {"a": 3}], ["one[1]", {"a": 1}]]
    assert [source for source, _ in two] == ["two[0]", "two[1]", "two[2]"]
    assert two_test == [["two[0]", {"a": 2}]]
    assert two_dev.endswith("has no split 'dev'; it has: train, test")
    assert files == [["files[0]", {"a": 7}]]
    assert "split 'dev'" in files_dev
    assert "train" in files_dev.split("cannot be loaded")[1]  # the splits there are
    assert "subset 'other'" in files_other
    assert "default" in files_other  # the subsets there are
    assert "bare is a directory with no data file in it. Name a file of rows" in bare
    assert "results is the directory of a checkpoint (it holds rm/step_3/training_info.json)" in (
        results
    )
    assert "step_3 is the directory of a checkpoint (it holds training_info.json)" in step
    assert "'owner/name' is no file or directory here" in hub
    assert "cannot be reached" in hub
