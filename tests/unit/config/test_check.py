"""What a wrong configuration is told: every problem, in words, at its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from laurel.config.load import LoadedConfig, load_config
from laurel.config.yaml_tree import Section
from laurel.errors import ConfigError


class Part(Section):
    foreign_keys: ClassVar[frozenset[str]] = frozenset({"env_name"})

    path: str | None = None
    rows: int | None = Field(default=None, ge=1)

    @field_validator("path")
    @classmethod
    def _is_relative(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("/"):
            raise ValueError("write the path relative to the project")
        return value


class Call(Section):
    foreign_keys: ClassVar[frozenset[str]] = frozenset({"kind"})

    name: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Steps(Section):
    milestones: list[int]


class Needy(Section):
    args: int = 0
    name: str


class Model(Section):
    foreign_keys: ClassVar[frozenset[str]] = frozenset({"megatron_cfg", "refit"})

    precision: Literal["float32", "bfloat16"] = "bfloat16"
    rate: float = Field(default=0.1, gt=0, lt=0.5)
    flag: bool = False
    size: int = Field(default=1, ge=1)
    revision: str | None = None
    weights: list[float] | None = None
    plan: str | dict[str, Any] | None = None
    scheduler: Call | list[Call | Steps] | None = None
    needy: Needy | None = None
    part: Part | list[Part] | None = None
    named: Part | dict[str, Part] | None = None
    paths: dict[str, str | Part] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Model:
        if self.size > 100 and not self.flag:
            raise ValueError("model.size above 100 needs flag")
        return self


class Run(Section):
    foreign_keys: ClassVar[frozenset[str]] = frozenset({"grpo"})

    model: Model = Model()
    left: int = 0
    right: int = 0

    @model_validator(mode="after")
    def _agree(self) -> Run:
        if self.left != self.right:
            raise ValueError("left and right must be equal")
        return self


def load(folder: Path, text: str) -> LoadedConfig[Run]:
    path = folder / "run.yaml"
    path.write_text(text)
    return load_config(Run, path)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    message = str(caught.value).replace(str(folder / "run.yaml"), "run.yaml")
    lines = [line.strip() for line in message.splitlines()]
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
    for noise in ("pydantic", "type=", "Input should", "Value error", "input_"):
        assert noise not in message
    return lines[1:] or lines


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "precision: bf16",
            "model.precision: must be one of float32, bfloat16, not 'bf16'; "
            "did you mean 'bfloat16'?",
        ),
        ("precision: 16", "model.precision: must be one of float32, bfloat16, not 16"),
        ("rate: 0.5", "model.rate: must be a number greater than 0 and below 0.5, not 0.5"),
        ("rate: fast", "model.rate: must be a number greater than 0 and below 0.5, not 'fast'"),
        ("rate: true", "model.rate: must be a number, not true"),
        ("size: 1.5", "model.size: must be a whole number of at least 1, not 1.5"),
        ("size: 0", "model.size: must be a whole number of at least 1, not 0"),
        ("size: [1]", "model.size: must be a whole number of at least 1, not [1]"),
        ("flag: maybe", "model.flag: must be true or false, not 'maybe'"),
        ("revision: [a]", "model.revision: must be text, or null, not ['a']"),
        ("revision: true", "model.revision: must be text, or null, not true"),
        ("weights: 3", "model.weights: must be a list of numbers, or null, not 3"),
        ("plan: [a]", "model.plan: must be text, or a mapping, or null, not ['a']"),
        (
            "part: 5",
            "model.part: must be a section with keys like path, rows, or a list of sections, or "
            "null, not 5",
        ),
        ("part: [{path: a}, {paht: b}]", "model.part[1].paht: unknown key; did you mean 'path'?"),
        (
            "part: {rows: 0}",
            "model.part.rows: must be a whole number of at least 1, or null, not 0",
        ),
        ("part: {path: /a}", "model.part.path: write the path relative to the project"),
        (
            "named: {a: {rows: 1}, b: {rows: x}}",
            "model.named.b.rows: must be a whole number of at least 1, or null, not 'x'",
        ),
        (
            "paths: {a: x, b: [1]}",
            "model.paths.b: must be text, or a section with keys like path, rows, not [1]",
        ),
        ("paths: {a: {rws: 1}}", "model.paths.a.rws: unknown key; did you mean 'rows'?"),
        ("needy: 5", "model.needy: must be a section with keys like name, args, or null, not 5"),
        ("scheduler: {kwargs: {}}", "model.scheduler.name: is missing; it must be text"),
        (
            "scheduler: [{name: a}, {milestones: [1, x]}]",
            "model.scheduler[1].milestones[1]: must be a whole number, not 'x'",
        ),
    ],
)
def test_a_wrong_value_is_told_in_words(tmp_path: Path, value: str, message: str) -> None:
    assert problems(tmp_path, f"model:\n  {value}\n") == [f"run.yaml:2: {message}"]


def test_of_two_sections_the_one_with_more_known_keys_is_meant(tmp_path: Path) -> None:
    text = "model:\n  scheduler:\n    - {milestones: [1], gamma: 2}\n"
    assert problems(tmp_path, text) == [
        "run.yaml:3: model.scheduler[0].gamma: unknown key; known here: milestones"
    ]


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "model:\n"
        "  size: 0\n"
        "  paths:\n"
        "    a: [1]\n"
        "    b: {rws: 3}\n"
        "  flga: true\n"
        "  part: {rows: x}\n"
        "lift: 3\n"
        "left: 3\n"
    )
    told = problems(tmp_path, text)
    assert [line.split(": ")[0] for line in told] == [f"run.yaml:{n}" for n in (2, 4, 5, 6, 7, 8)]
    # `left and right must be equal` is not said: other keys of that section are wrong.
    assert told[-1] == "run.yaml:8: lift: unknown key; did you mean 'left'?"


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    assert problems(tmp_path, "precision: float32\n") == [
        "run.yaml:1: precision: unknown key here; it belongs at model.precision"
    ]
    assert problems(tmp_path, "_hidden: 1\n") == [
        "run.yaml:1: _hidden: unknown key; known here: model, left, right"
    ]
    assert problems(tmp_path, "model: 5\n") == [
        "run.yaml:1: model: must be a section with keys like precision, rate, flag, not 5"
    ]
    assert problems(tmp_path, "model: {grpo: 1}\n")[0].startswith("run.yaml:1: model.grpo: unknown")


def test_rules_of_a_section_are_told_at_its_line(tmp_path: Path) -> None:
    assert problems(tmp_path, "\nmodel:\n  flag: false\n\n  size: 200\n") == [
        "run.yaml:5: model.size above 100 needs flag"
    ]
    assert problems(tmp_path, "\nleft: 3\n") == ["run.yaml:2: left and right must be equal"]
    (tmp_path / "run.yaml").write_text("model:\n  flag: false\n")
    with pytest.raises(ConfigError, match=r"^override 'model\.size=101': model\.size above"):
        load_config(Run, tmp_path / "run.yaml", ["model.size=101"])


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "model:\n").config == Run()


def test_numbers_for_text_keys_are_the_text_as_written(tmp_path: Path) -> None:
    for written in ("1e5", "0012", "123456789", "1_0"):
        assert load(tmp_path, f"model: {{revision: {written}}}\n").config.model.revision == written


def test_foreign_keys_are_named_in_one_warning(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "grpo: {anything: [1, {at: all}]}\n"
        "model:\n"
        "  megatron_cfg: {enabled: false}\n"
        "  part: [{path: a, env_name: x}]\n"
        "  named: {mine: {env_name: y}}\n"
        "  paths: {p: {env_name: z}}\n"
        "  scheduler: {name: s, kind: t}\n",
    )
    assert loaded.warnings == (
        "these keys mean nothing here and are ignored: grpo, model.megatron_cfg, "
        "model.part[0].env_name, model.named.mine.env_name, model.paths.p.env_name, "
        "model.scheduler.kind",
    )
    assert loaded.config.model.part == [Part(path="a")]


def test_null_leaves_a_key_that_cannot_be_null_at_its_default_and_is_named(tmp_path: Path) -> None:
    loaded = load(tmp_path, "model:\n  size: null\n  flag: null\n")
    assert loaded.config.model == load(tmp_path, "model: {}\n").config.model
    # `flag` is false by default: null loses nothing there.
    assert loaded.warnings == (
        "these keys are null, which leaves them at their defaults: model.size=1",
    )
