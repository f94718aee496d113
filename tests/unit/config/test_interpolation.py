"""References to other keys, arithmetic and the environment."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import Field

from laurel.config.interpolation import Interpolations
from laurel.config.load import load_config
from laurel.config.yaml_tree import Section, escaped, read_text
from laurel.errors import ConfigError


class Inner(Section):
    foreign_keys: ClassVar[frozenset[str]] = frozenset({"megatron"})

    size: int = 4
    ratio: float = 0.5
    label: str | None = None
    free: dict[str, Any] = Field(default_factory=dict)


class Run(Section):
    inner: Inner = Inner()
    other: Inner = Inner()


def load(folder: Path, text: str) -> Run:
    path = folder / "run.yaml"
    path.write_text(text)
    return load_config(Run, path).config


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return str(caught.value).replace(str(folder / "run.yaml"), "run.yaml")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${mul:6,7}", 42),
        ("${mul:2,3,4}", 24),
        ("${add:1,2.5}", 3.5),
        ("${sub:1,3}", -2),
        ("${div:8,2}", 4),
        ("${div:9,2}", 4.5),
        ("${max:3,9,4}", 9),
        ("${min:3,9,4}", 3),
        ("${mul:1e-5,2}", 2e-5),
        ("${mul:'6',7}", 42),
        ("${mul:${add:1,2},${div:9,3}}", 9),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    tree = read_text(f'key: "{expression}"', "here")
    found = Interpolations(tree).value(("key",), expression)
    assert found == value
    assert type(found) is type(value)


def test_references(tmp_path: Path) -> None:
    run = load(
        tmp_path,
        "inner:\n"
        "  size: ${other.size}\n"
        "  label: run-${.size}-${other.label}\n"
        "  free: {deep: [1, '${inner.ratio}'], all: '${other.free}'}\n"
        "other:\n"
        "  size: 9\n"
        "  label: x\n"
        "  free: {a: {b: '${inner.size}'}}\n",
    )
    assert run.inner.size == 9
    assert run.inner.label == "run-9-x"
    assert run.inner.free == {"deep": [1, 0.5], "all": {"a": {"b": 9}}}


def test_an_escaped_reference_is_text_and_stays_text_through_a_reference(tmp_path: Path) -> None:
    run = load(tmp_path, "inner: {label: '\\${not.a.key}'}\nother: {label: '${inner.label}'}\n")
    assert run.inner.label == "${not.a.key}"
    assert run.other.label == "${not.a.key}"


@given(st.text(alphabet=st.sampled_from("\\${}ab.: '\"")))
def test_escaped_text_reads_back(text: str) -> None:
    assert OmegaConf.create({"key": escaped(text)})["key"] == text


def test_sections_defaults_and_texts_may_be_references(tmp_path: Path) -> None:
    run = load(tmp_path, "inner: ${other}\nother: {ratio: '${mul:${.size},2}'}\n")
    assert run.inner == Inner(ratio=8.0)
    assert load(tmp_path, "inner: {label: '${other.size}'}\n").inner.label == "4"


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUREL_A", "given")
    text = "inner: {label: '${oc.env:LAUREL_A,fallback}', size: '${oc.env:LAUREL_B,7}'}\n"
    assert load(tmp_path, text).inner == Inner(label="given", size=7)


def test_keys_that_are_ignored_may_refer_to_nothing_and_be_referred_to(tmp_path: Path) -> None:
    text = "inner: {megatron: {x: '${no.such.key}', y: '${broken', z: 5}, size: '${.megatron.z}'}\n"
    assert load(tmp_path, text).inner.size == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "inner:\n  label: ${other.lable}\n",
            "run.yaml:2: inner.label: '${other.lable}': Interpolation key 'other.lable' not found; "
            "did you mean 'other.label'?",
        ),
        (
            "inner:\n  free:\n    deep: [1, '${nope:1}']\n",
            "run.yaml:3: inner.free.deep[1]: '${nope:1}': Unsupported interpolation type nope",
        ),
        (
            "inner: {label: '${other.label}'}\nother: {label: '${inner.label}'}\n",
            "Recursive interpolation detected",
        ),
        (
            "inner:\n  label: ${oc.env:LAUREL_SURELY_NOT_SET}\n",
            "Environment variable 'LAUREL_SURELY_NOT_SET' not found",
        ),
        ("inner: {size: '${mul:a,2}'}\n", "could not convert string to float: 'a'"),
        ("inner: {size: '${mul:true,2}'}\n", "True is not a number"),
        ("inner: {size: '${div:1,0}'}\n", "division by zero"),
        (
            "inner: {label: '${other.label'}\n",
            "run.yaml:1: inner.label: '${other.label' is not a well-formed interpolation",
        ),
        ("inner:\n  size: ???\n", "run.yaml:2: inner.size: must be given: the file says ???"),
        ("inner:\n  size: ???\nother: {size: '${inner.size}'}\n", "Missing mandatory value"),
    ],
)
def test_what_cannot_be_looked_up_says_where(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_one_malformed_reference_does_not_hide_another_problem(tmp_path: Path) -> None:
    text = "inner:\n  label: ${a\n  size: x\nother:\n  label: ${b.c}\n"
    lines = refused(tmp_path, text).splitlines()
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        "run.yaml:2",
        "run.yaml:3",
        "run.yaml:5",
    ]


def test_a_value_that_does_not_fit_names_the_key_that_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("inner:\n  ratio: 2\nother:\n  size: ${inner.ratio}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:4: other\.size: ") as caught:
        load_config(Run, path, ["inner.ratio=0.5"])
    assert "${inner.ratio}, and inner.ratio=0.5 (override 'inner.ratio=0.5')" in str(caught.value)


def nested(item: str, reference: str) -> str:
    """Seven lists of nine, each of the one before: 4.8 million values in some hundred bytes."""
    lines = [f"a: [{', '.join(['x'] * 9)}]"]
    lines += [f"{b}: [{', '.join([reference.format(a)] * 9)}]" for a, b in pairwise("abcdefg")]
    return "".join(f"    {item.format(line[0])}{line[3:]}\n" for line in lines)


def test_what_anchors_and_references_repeat_is_bounded(tmp_path: Path) -> None:
    anchors = "inner:\n  free:\n" + nested("{0}: &{0} ", "*{}")
    assert re.match(
        r"run\.yaml:\d+: the file has more than 100000 values", refused(tmp_path, anchors)
    )
    references = "inner:\n  free:\n" + nested("{0}: ", "'${{inner.free.{}}}'")
    assert "repeat more than 10000 values" in refused(tmp_path, references)
    relative = "inner:\n  free:\n" + nested("{0}: ", "'${{..{}}}'")
    assert "repeat more than 10000 values" in refused(tmp_path, relative)


def test_a_number_that_is_too_large_for_a_count_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, "inner: {size: 1e23}\n").inner.size == int(1e23)
    assert "must be a whole number" in refused(tmp_path, "inner: {size: 1.5}\n")
