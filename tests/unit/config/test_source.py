"""YAML files as trees: what a scalar means, where it was written, what a file inherits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from laurel.config.yaml_tree import MISSING, find_node, plain_values, read_file, read_text
from laurel.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1f", 31),
        ("true", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("'5'", "5"),
        ("2024-05-01", "2024-05-01"),
        ("val:loss", "val:loss"),
        ("[1, {a: 1e-5}]", [1, {"a": 1e-5}]),
        (".inf", float("inf")),
    ],
)
def test_a_scalar_means_what_omegaconf_says_it_means(text: str, value: object) -> None:
    read = plain_values(read_text(text, "here"))
    assert read == value
    assert type(read) is type(value)
    assert OmegaConf.to_container(OmegaConf.create(f"key: {text}")) == {"key": value}


@pytest.mark.parametrize("text", ["1:12:30:00", "0123456"])
def test_time_budgets_and_commits_stay_text(text: str) -> None:
    assert plain_values(read_text(text, "here")) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_as_python_prints_it_is_that_float(number: float) -> None:
    read = plain_values(read_text(repr(number), "here"))
    assert isinstance(read, float)
    assert read == number


def test_the_child_overrides_deeply_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "a: {x: 1, y: 2, list: [1, 2, 3]}\nkept: 5\ngone: {deep: 1}\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na: {y: 3, list: [9]}\ngone: null\n")
    tree = read_file(child)
    assert plain_values(tree) == {"a": {"x": 1, "y": 3, "list": [9]}, "kept": 5, "gone": None}
    inherited = find_node(tree, ["a", "x"])
    assert inherited is not None
    assert inherited.place == f"{tmp_path / 'base.yaml'}:1"


def test_of_several_parents_the_later_wins_and_paths_are_relative_to_each_file(
    tmp_path: Path,
) -> None:
    write(tmp_path, "top.yaml", "a: 0\nb: 0\nc: 0\nd: 0\n")
    write(tmp_path, "inner/one.yaml", "defaults: ../top.yaml\na: 1\nb: 1\nc: 1\n")
    write(tmp_path, "inner/two.yaml", "a: 2\nb: 2\n")
    write(tmp_path, "three.yaml", "defaults: top.yaml\n")  # two parents may share a parent
    parents = "[inner/one.yaml, three.yaml, inner/two.yaml]"
    child = write(tmp_path, "child.yaml", f"defaults: {parents}\na: 3\n")
    assert plain_values(read_file(child)) == {"a": 3, "b": 2, "c": 0, "d": 0}


def test_a_circle_of_defaults_shows_the_chain(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "defaults: two.yaml\n")
    two = write(tmp_path, "two.yaml", "\ndefaults: [one.yaml]\n")
    assert refused(one) == (
        f"{two}:2: defaults: the files inherit in a circle: {one} -> {two} -> {one}"
    )


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    text = "base: &b {x: 1, y: 2}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, {x: 9, z: 9}], z: 4}\n"
    tree = plain_values(read_file(write(tmp_path, "a.yaml", text)))
    assert tree["one"] == {"x": 1, "y": 3}
    assert tree["two"] == {"x": 1, "y": 2, "z": 4}


def test_three_question_marks_are_a_hole_unless_quoted(tmp_path: Path) -> None:
    tree = plain_values(read_file(write(tmp_path, "a.yaml", "hole: ???\ntext: '???'\n")))
    assert tree["hole"] is MISSING
    assert tree["text"] == "???"


def test_a_missing_file_names_those_nearby_and_the_line_that_asks_for_it(tmp_path: Path) -> None:
    lost = tmp_path / "nowhere" / "a.yaml"
    assert refused(lost) == f"{lost} does not exist: there is no directory {tmp_path / 'nowhere'}"
    child = write(tmp_path, "child.yaml", "a: 1\ndefaults: bsae.yaml\n")
    write(tmp_path, "base.yaml", "")
    assert refused(child) == (
        f"{child}:2: defaults: {tmp_path / 'bsae.yaml'} does not exist; there are: base.yaml"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", ":2:2: not YAML: expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1\n", ":2:1: not YAML: found character '\\t' that cannot start any token"),
        (
            "a: {b: ${c}}\n",
            ":1:9: not YAML: expected ',' or '}', but got '{'; inside [ ] and { } put",
        ),
        ("a: 1\n---\nb: 2\n", ":2:1: not YAML: but found another document"),
        ("- a\n- b\n", ":1: a configuration is a mapping of keys, this file is not"),
        ("hello", ":1: a configuration is a mapping of keys, this file is not"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ":4: the key 'c' is given twice, first in "),
        ("a: !!python/name:os.system\n", ":1: the tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("a: !!int xyz\n", ":1: 'xyz' is not of the type 'int'"),
        ("{a: 1}: 2\n", ":1: a key must be a word"),
        ("a: &a {b: *a}\n", ":1: an anchor that contains itself"),
        ("a: {<<: 5}\n", ":1: '<<' merges mappings, this is not one"),
        ("defaults: {a: b}\n", ":1: defaults: give a file or a list of files"),
        ("defaults: [_self_, a.yaml]\n", ":1: defaults: give a file or a list of files"),
    ],
)
def test_what_cannot_be_read_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    assert refused(path).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("name", "text"),
    [("pairs.csv", "prompt,chosen\n"), ("pairs.txt", '{"prompt": "a"}\n{"prompt": "b"}\n')],
)
def test_a_file_of_data_is_told_where_data_goes(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, name, text)
    said = refused(path)
    assert said.startswith(f"{path} looks like a file of data, not a configuration. Data to train")
    assert f"data.train_data_path={path}" in said
    parent = write(tmp_path, "a.yaml", f"defaults: {name}\n")
    assert refused(parent).startswith(f"{parent}:1: defaults: {path} looks like a file of data")


def test_a_configuration_may_be_json(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", '{"a": 1,\n "b": {"c": 2}}\n')
    assert read_file(path).value["a"].value == 1


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: \xff\xff\n")
    assert refused(path).startswith(f"{path}: not YAML text: ")
    assert "cannot be read" in refused(tmp_path)  # a directory


def test_nesting_without_end(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "a: " + "[" * 3000)
    assert refused(path) == f"{path}: nested too deeply"
