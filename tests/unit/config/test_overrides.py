"""Changes from the command line, on a small schema that has every kind of key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from laurel.config.load import column_overrides, load_config, overrides_of, parse_override
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section, plain_values
from laurel.errors import ConfigError


class Call(Section):
    name: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Block(Section):
    path: str | None = None
    split: str = "train"


class Inner(Section):
    foreign_keys: ClassVar[frozenset[str]] = frozenset({"megatron"})

    size: int = 1
    label: str | None = None
    kind: Literal["one", "two"] = "one"
    nested: Block = Block()
    optional: Block | None = None
    call: Call = Call(name="adam", kwargs={"lr": 1e-3, "eps": 1e-8, "betas": [0.9, 0.99]})
    sets: dict[str, str | Block] = Field(default_factory=dict)
    blocks: list[Block] = Field(default_factory=list)


class Run(Section):
    inner: Inner = Inner(size=7, nested=Block(split="run"))
    other: Inner = Inner()


def load(*overrides: str, text: str | None = None, folder: Path | None = None) -> Run:
    if text is None:
        return load_config(Run, None, overrides).config
    assert folder is not None
    path = folder / "run.yaml"
    path.write_text(text)
    return load_config(Run, path, overrides).config


def refused(*overrides: str, text: str | None = None, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, text=text, folder=folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("1e-5", 1e-5),
        ("true", True),
        ("null", None),
        ("", ""),
        ("'5'", "5"),
        ('"a\\nb"', "a\nb"),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
    ],
)
def test_values(text: str, value: object) -> None:
    override = parse_override(f"a.b={text}")
    assert override.keys == ("a", "b")
    assert override.value is not None
    assert plain_values(override.value) == value
    assert type(plain_values(override.value)) is type(value)


@pytest.mark.parametrize(
    "text", ["a=b=c", "a: b", "- a", "a #1", "#a", "5 # five", "@a", "*.json", "!x y", "C:\\data"]
)
def test_text_that_yaml_would_read_otherwise_is_itself(text: str) -> None:
    value = parse_override(f"a.b={text}").value
    assert value is not None
    assert plain_values(value) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_is_a_value_or_a_clear_error(text: str) -> None:
    problem = ""
    try:
        override = parse_override(f"a={text}")
    except ConfigError as error:
        problem = str(error)
    if problem:
        assert text.strip()[0] in "[{'\""
        assert "put quotes around" in problem
    else:
        assert override.value is not None


@pytest.mark.parametrize("word", ["rows.jsonl", "directory", "data.jsonl"])
def test_rows_where_columns_are_named_are_told_where_they_belong(word):
    with pytest.raises(ConfigError, match=rf"on_bad_row=skip\). Rows are --data {word}$"):
        column_overrides([word], or_bad_rows=True, remedy="Rows are --data {word}")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.prompt_key", "a value is missing: data.prompt_key=value"),
        ("--foo", "a value is missing: --foo=value"),
        ("~data.prompt_key", "only the columns of rows can be named"),
    ],
)
def test_a_key_where_columns_are_named_is_no_file(word, message):
    with pytest.raises(ConfigError, match=message):
        column_overrides([word], remedy="Rows are --data {word}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("small.yaml", "given as --config small.yaml"),
        ("pairs.jsonl.gz", "given as data.train_data_path=pairs.jsonl.gz; "),
        ("inner.size", "a value is missing: inner.size=value"),
        ("~inner.size=3", "'~' deletes a key, it takes no value: ~inner.size"),
        ("=3", "write it as section.key=value"),
        ("inner..size=3", "write it as section.key=value"),
        ("inner. size=3", "write it as section.key=value"),
        ("inner.sets={a: 1", "put quotes around what is meant as text"),
        ("+inner.sise=4", "inner.sise: unknown key; did you mean 'size'?"),
        ("iner.size=3", "iner: unknown key; did you mean 'inner'?"),
        ("size=3", "size: unknown key here; it belongs at inner.size or other.size"),
        ("inner.size.x=3", "inner.size: is 7, it has no keys"),
    ],
)
def test_what_is_no_override(override: str, message: str) -> None:
    assert refused(override).startswith(f"override '{override}': ")
    assert message in refused(override)


def test_a_declared_key_may_be_set_although_no_file_has_it() -> None:
    for sign in ("", "+", "++"):
        assert load(f"{sign}inner.size=3").inner.size == 3
    assert load("inner.size=3", "inner.size=4").inner.size == 4
    assert load().inner.size == 7


def test_siblings_that_the_schema_sets_stay(tmp_path: Path) -> None:
    betas = [0.9, 0.99]
    assert load("inner.call.kwargs.lr=5").inner.call.kwargs == {
        "lr": 5,
        "eps": 1e-8,
        "betas": betas,
    }
    assert load("inner.label=x").inner.size == 7
    assert load("inner.call.kwargs.betas.1=0.5").inner.call.kwargs["betas"] == [0.9, 0.5]
    run = load("inner.call.kwargs.lr=5", text="inner: {label: x}\n", folder=tmp_path)
    assert run.inner.call.kwargs == {"lr": 5, "eps": 1e-8, "betas": betas}
    assert run.inner.nested == Block(split="run")
    given = "inner: {call: {name: sgd, kwargs: {lr: 1, momentum: 2}}}\n"
    run = load("inner.call.kwargs.lr=5", text=given, folder=tmp_path)
    assert run.inner.call == Call(name="sgd", kwargs={"lr": 5, "momentum": 2})


def test_a_file_keeps_what_the_schema_sets_in_a_section_of_which_it_writes_a_part(
    tmp_path: Path,
) -> None:
    expected = Inner(size=7, label="x", nested=Block(split="run"))
    assert load(text="inner: {label: x}\n", folder=tmp_path).inner == expected
    nested = load(text="inner: {nested: {path: p}}\n", folder=tmp_path).inner.nested
    assert nested == Block(path="p", split="run")
    assert load(text="other: {}\n", folder=tmp_path) == Run()


def test_a_section_that_is_null_is_begun(tmp_path: Path) -> None:
    assert load("inner.optional.path=x").inner.optional == Block(path="x")
    run = load("inner.optional.path=x", text="inner: {optional: null}\n", folder=tmp_path)
    assert run.inner.optional == Block(path="x")


def test_a_mapping_is_laid_over_what_files_say_and_replaces_a_call_of_the_schema(
    tmp_path: Path,
) -> None:
    text = "inner: {call: {name: sgd, kwargs: {lr: 1}}}\n"
    run = load("inner.call={kwargs: {eps: 2}}", text=text, folder=tmp_path)
    assert run.inner.call == Call(name="sgd", kwargs={"lr": 1, "eps": 2})
    assert load("inner.call={name: sgd}").inner.call == Call(name="sgd")
    assert load("inner.call.kwargs={lr: 1}").inner.call.kwargs == {"lr": 1}
    assert load("inner={label: x}").inner.size == 7


def test_names_that_the_user_makes_up_need_a_plus(tmp_path: Path) -> None:
    assert refused("inner.sets.mine=a.jsonl") == (
        "override 'inner.sets.mine=a.jsonl': inner.sets.mine: is not there to be changed; "
        "to add it: '+inner.sets.mine=a.jsonl'"
    )
    assert "+inner.call.kwargs.lrr=1" in refused("inner.call.kwargs.lrr=1")
    assert load("+inner.sets.mine=a.jsonl").inner.sets == {"mine": "a.jsonl"}
    assert load("++inner.sets.mine.path=a").inner.sets == {"mine": Block(path="a")}
    assert load("+inner.sets.a=x", "inner.sets.a=y").inner.sets == {"a": "y"}
    text = "inner: {sets: {mine: {path: a}}}\n"
    run = load("inner.sets.mine.split=test", text=text, folder=tmp_path)
    assert run.inner.sets == {"mine": Block(path="a", split="test")}


def test_plus_refuses_what_is_already_set(tmp_path: Path) -> None:
    text = "inner:\n  size: 3\n"
    assert refused("+inner.size=4", text=text, folder=tmp_path) == (
        f"override '+inner.size=4': inner.size: is already set in {tmp_path / 'run.yaml'}:2; "
        "to change it leave out '+'"
    )
    assert load("++inner.size=4", text=text, folder=tmp_path).inner.size == 4
    assert "already set in override '+inner.size=4'" in refused("+inner.size=4", "+inner.size=5")


def test_delete(tmp_path: Path) -> None:
    text = "inner: {label: x, blocks: [{path: a}, {path: b}]}\n"
    assert load("~inner.label", text=text, folder=tmp_path).inner.label is None
    blocks = load("~inner.blocks.0", text=text, folder=tmp_path).inner.blocks
    assert blocks == [Block(path="b")]
    assert "eps" not in load("~inner.call.kwargs.eps").inner.call.kwargs
    for key in ("inner.label", "inner.call.kwargs.nope", "inner.optional.path", "nope"):
        assert (
            refused(f"~{key}") == f"override '~{key}': {key}: is not set, so it cannot be deleted"
        )


def test_lists_are_changed_by_position(tmp_path: Path) -> None:
    text = "inner: {blocks: [{path: a}, {path: b}]}\n"
    run = load("inner.blocks.1.path=c", text=text, folder=tmp_path)
    assert run.inner.blocks == [Block(path="a"), Block(path="c")]
    # As errors write it.
    assert load("inner.blocks[1].path=c", text=text, folder=tmp_path) == run
    assert "inner.blocks: is a list of 2; it has no '2'" in refused(
        "inner.blocks.2.path=c", text=text, folder=tmp_path
    )
    told = refused("inner.blocks.path=c", text=text, folder=tmp_path)
    assert told.endswith("it has no 'path'; its first is inner.blocks[0]")


def test_a_key_of_a_set_is_none_of_sets_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {validation: {V: {data_path: v}}}\n")
    with pytest.raises(
        ConfigError, match=r"data\.validation\.data_path: is not there to be changed"
    ):
        load_config(SFTRun, path, ["data.validation.data_path=x"])
    data = load_config(SFTRun, path, ["+data.validation.W={data_path: w}"]).config.data
    assert [one.data_path for one in data.validation_sets()] == ["v", "w"]
    path.write_text("data: {validation: {data_path: v}}\n")
    data = load_config(SFTRun, path, ["data.validation.data_path=x"]).config.data
    assert [one.data_path for one in data.validation_sets()] == ["x"]


def test_a_reference_has_no_keys(tmp_path: Path) -> None:
    text = "inner: {sets: {a: path, b: '${inner.sets.a}'}}\n"
    assert "inner.sets.b: is '${inner.sets.a}'; set the key it names" in refused(
        "inner.sets.b.path=3", text=text, folder=tmp_path
    )


def test_settings_of_a_program_are_changes() -> None:
    settings = {
        "inner.size": 3,
        "inner.label": "a: b # c",
        "inner.nested.path": Path("some where") / "x.jsonl",
        "inner.optional": None,
        "inner.call.kwargs.lr": 1e-05,
        "inner.sets.new": {"path": "p"},
        "inner.blocks": [{"split": "test"}],
    }
    inner = load_config(Run, None, overrides_of(settings)).config.inner
    assert (inner.size, inner.label, inner.optional) == (3, "a: b # c", None)
    assert inner.nested.path == str(Path("some where") / "x.jsonl")
    assert inner.call.kwargs == {"lr": 1e-05, "eps": 1e-8, "betas": [0.9, 0.99]}
    assert inner.sets == {"new": Block(path="p")}
    assert inner.blocks == [Block(split="test")]


@given(st.text(st.characters(exclude_characters="$", exclude_categories=("C",))))
def test_a_text_of_a_program_arrives_as_it_is(text: str) -> None:
    assert load_config(Run, None, overrides_of({"inner.label": text})).config.inner.label == text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("+inner.size", 1, "without a sign"),
        ("inner=size", 1, "write it as 'section.key'"),
        ("", 1, "write it as 'section.key'"),
        ("inner.size", object(), "'inner.size': object cannot be written"),
        ("inner.size", float("nan"), "a finite number"),
        ("inner.siz", 1, "setting 'inner.siz': inner.siz: unknown key; did you"),
    ],
)
def test_settings_that_have_no_form_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(Run, None, overrides_of({key: value}))
