"""A configuration written out reads back as the same configuration."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.data import DataConfig, DatasetConfig
from laurel.config.load import entry, load_config, sections_below, to_yaml
from laurel.config.policy import (
    DTensorConfig,
    LoraConfig,
    Milestones,
    NamedCall,
    RewardPolicyConfig,
    ScratchConfig,
    TokenizerConfig,
)
from laurel.config.resuming import changes
from laurel.config.reward_model import RewardTrainingConfig, RewardTrainingRun
from laurel.config.schema_info import item_kinds, kinds_of, sections_of
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import Section, plain_values, read_text

texts = st.text(max_size=20) | st.sampled_from(
    [
        "1e-5",
        "5",
        "true",
        "off",
        "null",
        "~",
        "",
        "???",
        "<<",
        "0123",
        "1:30:00",
        "a: b",
        "${x}",
        "\\${x}",
        "\\\\${",
        "# a",
        " a ",
        "\n",
        "\n\n",
        " \n",
        "a\n",
        "a\n \n",
        "a\n\n",
        "\na\n\n  b",
        "a\r\nb",
        "\tx",
        "\x85",
        "\u2028",
        "é",
        "{% for m in messages %}\n{{ m['content'] }}\n{% endfor %}",
        "2024-01-01",
        "- a",
        "=",
        "'",
    ]
)
numbers = st.integers() | st.floats(allow_nan=False)
free = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(texts, free, max_size=3)


def some(section: type[Section], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The section with any part of these keys given."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: section(**given))


data_sets = some(
    DatasetConfig,
    dataset_name=texts | st.none(),
    data_path=texts,
    split=texts,
    prompt_key=texts,
    max_samples=st.integers(1, 10**12) | st.none(),
)
calls = st.builds(NamedCall, name=texts, kwargs=mappings)
blocks = some(
    DataConfig,
    train=data_sets | st.lists(data_sets, max_size=3),
    # Nothing given at all is indistinguishable from no named set at all: `validation: {}`.
    validation=st.dictionaries(
        texts, data_sets.filter(lambda b: b.model_fields_set), min_size=1, max_size=2
    ),
    prompt_file=texts,
)
flat = some(
    DataConfig,
    dataset_name=texts,
    train_data_path=texts,
    shuffle=st.booleans(),
    split_validation_size=st.floats(0, 0.999),
)
policies = some(
    RewardPolicyConfig,
    model_name=texts,
    revision=texts | st.none(),
    hf_config_overrides=mappings,
    tokenizer=some(TokenizerConfig, chat_template=texts | st.none(), chat_template_kwargs=mappings),
    scratch=some(ScratchConfig, architecture=texts, config_overrides=mappings) | st.none(),
    optimizer=calls,
    scheduler=calls
    | st.lists(calls | st.builds(Milestones, milestones=st.lists(st.integers())), max_size=3),
    dtensor_cfg=some(
        DTensorConfig,
        custom_parallel_plan=texts | mappings | st.none(),
        lora_cfg=some(LoraConfig, target_modules=st.lists(texts, max_size=3)),
    ),
)
runs = some(
    RewardTrainingRun,
    policy=policies,
    data=blocks | flat,
    rm=some(RewardTrainingConfig, seed=st.integers(0), max_num_steps=st.integers(-1)),
)


def read_back(text: str) -> RewardTrainingRun:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
        loaded = load_config(RewardTrainingRun, path)
    assert loaded.warnings == ()
    return loaded.config


@settings(max_examples=60, deadline=None)
@given(run=runs, describe=st.booleans())
def test_what_is_written_reads_back_equal(run: RewardTrainingRun, describe: bool) -> None:
    again = read_back(to_yaml(run, describe=describe))
    # Described, it has the keys of all plug-ins with their defaults.
    dumped = [one.model_dump(mode="json") for one in (again, run)]
    assert not list(changes(RewardTrainingRun, *dumped))
    assert describe or again == run
    assert again.data.train_sets() == run.data.train_sets()
    assert again.data.validation_sets() == run.data.validation_sets()


def test_described_every_key_has_its_docstring_above_it() -> None:
    lines = to_yaml(RewardTrainingRun(), describe=True).splitlines()
    at = lines.index("  val_period: 16")
    assert lines[at - 1].startswith("  # Steps between validations; 0: only at the start")
    at = lines.index("  wandb_enabled: false")
    assert lines[at - 1] == "  # Log to Weights & Biases (extra `wandb`)."
    keys = [i for i, line in enumerate(lines) if line and not line.lstrip().startswith("#")]
    undescribed = [lines[i].strip() for i in keys if i and "# " not in lines[i - 1]]
    # Only what is inside a value of its own has no docstring: the optimizer's arguments.
    assert undescribed == ["lr: auto", "weight_decay: 0.1", "betas: [0.9, 0.98]", "eps: 1.0e-05"]
    assert max(map(len, lines)) <= 100


def test_a_reason_for_the_default_names_it_where_another_value_is_written() -> None:
    config = load_config(RewardTrainingRun, None, ["policy.precision=float32"]).config
    of_another = to_yaml(config, describe=True, keys=["policy.precision"])
    assert "(bfloat16): half the memory" in of_another
    of_itself = to_yaml(RewardTrainingRun(), describe=True, keys=["policy.precision"])
    assert "(bfloat16)" not in of_itself


SAMPLES = {
    str: "2026-07-26",
    int: 3,
    float: 1e-5,
    bool: True,
    NoneType: None,
    datetime.date: datetime.date(2026, 7, 26),
}
"""A value of each type that a key may have, beside sections, lists and mappings of these."""


def scalar_types(kinds: tuple[Any, ...]) -> Iterator[Any]:
    for kind in kinds:
        inside = item_kinds(kind)
        if inside is not None:
            yield from scalar_types(inside)
        elif not sections_of((kind,)) and kind is not Any and get_origin(kind) is not Literal:
            yield kind


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_value_of_every_type_that_a_key_has_is_written_as_it_is_read(kind: Any) -> None:
    kinds = {
        one: f"{section.__name__}.{key}"
        for section, _ in sections_below(SCHEMAS[kind], plugged_in=True)
        for key, field in section.model_fields.items()
        for one in scalar_types(kinds_of(field.annotation))
    }
    for one, key in kinds.items():
        assert one in SAMPLES, f"{key}: no value of {one} is tried"
        text = entry("key", SAMPLES[one])
        read = plain_values(read_text(text, "file"))["key"]
        said = SAMPLES[one]
        assert read == (said.isoformat() if isinstance(said, datetime.date) else said), text


def test_a_date_with_the_tag_of_earlier_versions_is_read() -> None:
    assert plain_values(read_text("!!timestamp '2026-07-26'", "file")) == "2026-07-26"
