"""What must be the same when a run goes on: every key that is not marked as free."""

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from laurel.config.load import load_config, to_yaml
from laurel.config.plugged import all_fields
from laurel.config.resuming import changes
from laurel.config.schema_info import is_mapping, item_kinds, kinds_of, sections_of
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import MayChange, Section
from laurel.errors import CheckpointError
from laurel.run.model import check_same_settings

URL, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:9000"


@pytest.mark.parametrize("turn", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_key_is_refused_with_both_values_unless_its_field_is_marked(kind, turn):
    """No key is named here: one that is added later is walked as well. Every second one changes."""
    config, keys = whole(SCHEMAS[kind]), []
    now = dumped(other_section(config, turn, keys))

    def found(**options):
        pairs = changes(type(config), dumped(config), now, **options)
        return sorted((one.key, (one.before, one.now)) for one in pairs)

    other = sorted(keys[turn::2], key=lambda one: one[0])
    assert found() == [(key, values) for key, mark, values in other if not mark]
    in_sweep = [(key, v) for key, mark, v in other if not mark or not mark.in_sweeps]
    assert found(in_sweep=True) == in_sweep
    assert 50 < sum(mark is None for _, mark, _ in keys) < len(keys) - 50


@pytest.mark.parametrize("kind", SCHEMAS)
def test_what_an_earlier_version_did_not_know_had_its_default(kind):
    schema = SCHEMAS[kind]
    config = load_config(schema, None, []).config
    assert not list(changes(schema, {}, dumped(config)))
    older = dumped(config) | {"gone": 1, kind: dumped(config)[kind] | {"gone": {"x": 1}}}
    assert not list(changes(schema, older, dumped(config)))


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ("a.jsonl", "b.jsonl", []),
        ("a.jsonl", "{data_path: b.jsonl}", []),
        ("a.jsonl", "{data_path: b.jsonl, split: test}", ["data.validation.x.split"]),
        ("null", "b.jsonl", ["data.validation"]),
    ],
)
def test_a_validation_set_that_is_a_path_alone_may_move_as_a_block_may(before, now, changed):
    def of(block):
        value = "{}" if block == "null" else f"{{x: {block}}}"
        paths = ["data.train_data_path=t.jsonl", f"data.val_data_paths={value}"]
        return dumped(load_config(SCHEMAS["rm"], None, paths).config)

    assert [one.key for one in changes(SCHEMAS["rm"], of(before), of(now))] == changed


RM, GRPO, ENV = "rm", "grpo", "env.reward_model"


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (RM, "policy.max_grad_norm", 2.0),
        (RM, "policy.trust_remote_code", True),
        (RM, "rm.val_batches", 3),
        (GRPO, f"{ENV}.reward_model_cfg.attribute_weights", [1.0]),
        (GRPO, f"{ENV}.reward_model_cfg.step_aggregate", "mean"),
        (GRPO, f"{ENV}.precision", "float32"),
        (GRPO, f"{ENV}.url_model", "m"),
        (GRPO, f"{ENV}.models[0].url_model", "m"),
        (GRPO, f"{ENV}.models[0].reward_key", "k"),
        (GRPO, f"{ENV}.model_version", "v2"),
        (GRPO, "env.code.sandbox.cpu_seconds", 1.0),
        (GRPO, "policy.generation.val_temperature", 0.0),
    ],
)
def test_what_decides_rewards_and_metrics_is_fixed(kind, key, value):
    assert mark_of(kind, key) is None


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (RM, "rm.max_num_steps"),
        (RM, "rm.val_period"),
        (RM, "checkpointing.save_period"),
        (RM, "checkpointing.checkpoint_dir"),
        (RM, "logger.log_dir"),
        (RM, "cluster.num_nodes"),
        (RM, "policy.dtensor_cfg.tensor_parallel_size"),
        (RM, "policy.train_micro_batch_size"),
        (RM, "policy.compile"),
        (RM, "data.train[0].data_path"),  # the rows themselves are compared
        (GRPO, f"{ENV}.urls"),
        (GRPO, f"{ENV}.models[0].urls"),
        (GRPO, f"{ENV}.max_concurrent"),
        (GRPO, f"{ENV}.generation.vllm_cfg.tensor_parallel_size"),
        (GRPO, f"{ENV}.function.router"),
        (GRPO, f"{ENV}.num_workers"),
        (GRPO, f"{ENV}.use_reward_loop"),
        (GRPO, "env.openenv.x.url"),
        (GRPO, "env.code.sandbox.min_tier"),
        (GRPO, "grpo.health.stop_on"),
    ],
)
def test_where_how_fast_and_how_long_may_change(kind, key):
    assert mark_of(kind, key) is not None


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_checkpoint_of_an_older_version_tells_the_settings_that_are_gone(kind, monkeypatch):
    older = Path(__file__).parents[2] / "golden" / "older_runs" / kind
    monkeypatch.chdir(older)
    config = load_config(SCHEMAS[kind], None, Path("overrides.txt").read_text().splitlines()).config
    told = "".join(check_same_settings(Path("saves", "step_2"), config))
    gone = ["grpo.health.kl_growth", "grpo.health.kl_least"] if kind == "grpo" else []
    assert all(key in told for key in gone), told
    assert bool(told) == bool(gone)
    reasons = re.findall(r"\(([^()]*)", told)
    assert len(reasons) == len(set(reasons)), "each once, with all keys that it is of"


OLDER_DATA = {
    "data.default": {
        "default": {"dataset_name": "PreferenceDataset", "prompt_key": "q"},
        "train": {"data_path": "t.jsonl"},
        "validation": {"A": {"data_path": "v.jsonl"}, "B": {"benchmark": "rm-bench"}},
    },
    "data.val_data_paths": {
        "train_data_path": "t.jsonl",
        "val_data_paths": {"A": "a.jsonl", "B": {"data_path": "b.jsonl", "prompt_key": "q"}},
    },
}


@pytest.mark.parametrize("key", OLDER_DATA)
def test_a_run_that_began_with_a_key_that_is_translated_now_goes_on(tmp_path, key):
    """Its checkpoint has the flat keys besides, with their defaults."""
    said = OLDER_DATA[key]
    flat = {"dataset_name": None, "prompt_key": "prompt", "val_split": None, "default": None}
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text(json.dumps({"data": flat | said}), encoding="utf-8")

    def now(data):
        return load_config(SCHEMAS[RM], None, [f"data={json.dumps(data)}"]).config

    assert check_same_settings(tmp_path, now(said)) == []
    first, *_ = now(said).data.validation_sets().values()
    assert first.prompt_key == ("q" if key == "data.default" else "prompt")
    with pytest.raises(CheckpointError, match=r"data\.validation\.[AB]\.prompt_key"):
        check_same_settings(tmp_path, now(json.loads(json.dumps(said).replace('"q"', '"z"'))))


@pytest.mark.parametrize("kind", [RM, GRPO, "sft"])
@pytest.mark.parametrize("twice", [False, True], ids=["no set", "a path beside the block"])
def test_a_run_that_began_with_flat_defaults_goes_on(tmp_path, kind, twice):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    section = kinds_of(SCHEMAS[kind].model_fields["data"].annotation)[0]
    flat = {
        key: there.model_fields[name].get_default(call_default_factory=True)
        for key, (there, name) in section.short_keys().items()
    }
    data = {"train": {"data_path": "t.jsonl"}} if twice else {}
    more = {"train_data_path": "ignored.jsonl"} if twice else {}
    (tmp_path / "config.yaml").write_text(
        json.dumps({"data": flat | data | more}), encoding="utf-8"
    )

    def now(*overrides):
        given = f"data={json.dumps(data)}"
        return load_config(SCHEMAS[kind], None, [given, *overrides]).config

    assert check_same_settings(tmp_path, now()) == []
    with pytest.raises(CheckpointError, match=r"data\.train.*subset"):
        check_same_settings(tmp_path, now("data.subset=s"))


MOVED = {
    "length": ("grpo.tree.segment=16", {"grpo": {"tree": {"length": 16, "separator": None}}}),
    "separator": ("grpo.tree.segment=x", {"grpo": {"tree": {"length": 32, "separator": "x"}}}),
    "num_kv_heads": (
        "policy.scratch.config_overrides={num_key_value_heads: 2}",
        {"policy": {"scratch": {"num_kv_heads": 2, "config_overrides": {}}}},
    ),
}


@pytest.mark.parametrize(("now", "before"), MOVED.values(), ids=MOVED)
def test_values_of_keys_that_are_gone_are_compared_where_they_are_now(tmp_path, now, before):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text(json.dumps(before), encoding="utf-8")
    tree = [] if "policy" in before else ["grpo.num_generations_per_prompt=16"]
    (told,) = check_same_settings(tmp_path, load_config(SCHEMAS[GRPO], None, [now, *tree]).config)
    assert next(iter(next(iter(before.values())))) in told
    with pytest.raises(CheckpointError, match=r"segment|config_overrides"):
        check_same_settings(tmp_path, load_config(SCHEMAS[GRPO], None, tree).config)


def test_a_judge_among_reward_models_leaves_their_settings_alone(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    models = [
        {"name": "a", "model_name": "m"},
        {"name": "b", "urls": [URL], "url_model": "j", "judge": {}, "normalize": "none"},
    ]
    given = [f"{ENV}.models={json.dumps(models)}", f"{ENV}.precision=float32"]
    config = load_config(SCHEMAS[GRPO], None, given).config
    saved = yaml.safe_load(to_yaml(config))
    member = saved["env"]["reward_model"]["models"][1]
    of_judge = {"urls": member.pop("urls"), "model": member.pop("url_model")}
    member["judge"] |= of_judge | {"precision": "bfloat16", "request_timeout": 600.0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    check_same_settings(tmp_path, config)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    models = [
        {"name": "a", "model_name": "x"},
        {"name": "b", "urls": [URL], "url_protocol": "slime", "normalize": "none"},
    ]

    def run_of(*overrides):
        first = ["policy.optimizer.kwargs.lr=1e-5", f"{ENV}.models={json.dumps(models)}"]
        return load_config(SCHEMAS[GRPO], None, [*first, *overrides]).config

    (tmp_path / "config.yaml").write_text(to_yaml(run_of()), encoding="utf-8")
    check_same_settings(tmp_path, run_of("grpo.max_num_steps=7"))
    moved = json.dumps([models[0], models[1] | {"urls": [OTHER]}])
    check_same_settings(tmp_path, run_of(f"{ENV}.models={moved}"))
    other = json.dumps([models[0], models[1] | {"reward_key": "score"}])
    with pytest.raises(CheckpointError, match=r"models\[1\]\.reward_key: '' then, 'score' now"):
        check_same_settings(tmp_path, run_of(f"{ENV}.models={other}"))
    head = {"attributes": ["a", "b"], "attribute_weights": [0, -100]}
    headed = json.dumps([models[0] | {"reward_model_cfg": head}, models[1]])
    with pytest.raises(CheckpointError, match="attribute_weights: None then, "):
        check_same_settings(tmp_path, run_of(f"{ENV}.models={headed}"))
    with pytest.raises(CheckpointError, match=r"env\.custom\.mine: None then, \{"):
        check_same_settings(tmp_path, run_of("+env.custom.mine.name=m.C"))


def test_a_checkpoint_whose_models_had_settings_of_their_own_resumes_with_one_for_all(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    models = [{"name": name, "model_name": name} for name in "ab"]

    def run_of(*overrides):
        return load_config(SCHEMAS[GRPO], None, [f"{ENV}.models={json.dumps(models)}", *overrides])

    saved = yaml.safe_load(to_yaml(run_of().config))
    for one in saved["env"]["reward_model"]["models"]:
        one |= {"precision": "float32", "batch_tokens": 8192}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    (told,) = check_same_settings(tmp_path, run_of(f"{ENV}.precision=float32").config)
    assert "models[1].precision" in told
    with pytest.raises(CheckpointError, match=r"env\.reward_model\.precision: 'float32' then"):
        check_same_settings(tmp_path, run_of().config)


def test_a_checkpoint_of_which_one_model_was_served_resumes_with_that_server(tmp_path):
    """`server` of the other models was null, and the run was refused as another one."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")
    asks = {"name": "b", "function": {"path": "a:b"}, "normalize": "none"}
    models = json.dumps([{"name": "a", "model_name": "a"}, asks])

    def run_of(served):
        server = f"{ENV}.server.model_name={served}"
        return load_config(SCHEMAS[GRPO], None, [f"{ENV}.models={models}", server]).config

    saved = yaml.safe_load(to_yaml(run_of("m")))
    section = saved["env"]["reward_model"]
    section["models"][0]["server"], section["models"][1]["server"] = None, section["server"]
    section["server"] = None
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    (told,) = check_same_settings(tmp_path, run_of("m"))
    assert "models[1].server" in told
    with pytest.raises(CheckpointError, match=r"env\.reward_model\.server\.model_name: 'm' then"):
        check_same_settings(tmp_path, run_of("other"))


def test_a_checkpoint_whose_judge_had_a_model_of_its_own_resumes(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"identity": {}}', encoding="utf-8")

    def run_of(most, std=3.0):
        asked = {"urls": [URL], "url_model": "j", "judge": {"score_range": [0, most]}}
        loaded = {"model_name": "k", "tokenizer": {"chat_template": "chatml"}, "judge": {}}
        parts = [{"name": "a", **asked}, {"name": "b", **loaded}]
        models = json.dumps([part | {"normalize": [2.0, std]} for part in parts])
        return load_config(SCHEMAS[GRPO], None, [f"{ENV}.models={models}"]).config

    saved = yaml.safe_load(to_yaml(run_of(5)))
    for one in saved["env"]["reward_model"]["models"]:
        one |= {"normalize": "stored", "mean": 2.0, "std": 3.0}
        one["judge"].pop("score_range", None)
        name = one.pop("url_model", None) or one.pop("model_name")
        of_model = {key: one.pop(key, None) for key in ("urls", "tokenizer", "max_model_len")}
        of_model |= {"model": name, "precision": "bfloat16", "backend": "transformers"}
        limits = {"lowest": 0.0, "highest": 5.0 if name == "j" else 10.0, "which": "last"}
        one["judge"] |= of_model | limits
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    (told,) = check_same_settings(tmp_path, run_of(5))
    assert "models[1].judge.model" in told
    for other, key in ((run_of(6), "judge.score_range"), (run_of(5, std=4.0), "normalize")):
        with pytest.raises(CheckpointError, match=rf"models\[[01]\]\.{re.escape(key)}"):
            check_same_settings(tmp_path, other)


def dumped(config):
    return config.model_dump(mode="json", warnings=False)


def whole(section):
    """Make a section with every optional section in it, past the rules of what fits together."""
    values = {name: present(one) for name, one in all_fields(section).items()}
    return section.model_construct(**values)


def present(field):
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    kinds = kinds_of(field.annotation)
    if isinstance(default, Section):
        return whole(type(default))
    for one in sections_of(kinds):
        return whole(one)
    for kind in kinds:
        for one in sections_of(item_kinds(kind) or ()):
            return {"x": whole(one)} if is_mapping(kind) else [whole(one)]
    return "x" if field.is_required() and str in kinds else default


def other_section(section, turn, keys, *, path="", outer=None):
    """Return the section with another value for every second leaf key, from the one of `turn`.

    All leaf keys go into `keys`, each with its mark and both values.
    """
    values = {}
    for name, field in all_fields(type(section)).items():
        mark = next((one for one in field.metadata if isinstance(one, MayChange)), outer)
        value, key = getattr(section, name), f"{path}{name}"
        for behind, inner, put in parts(value):
            inside = f"{key}{behind}."
            values[name] = put(other_section(inner, turn, keys, path=inside, outer=mark))
        if name not in values:
            other, behind = another(value, kinds_of(field.annotation))
            if len(keys) % 2 == turn:
                values[name] = other
            pair = (None, other["x"]) if behind else (value, other)
            keys.append((f"{key}{behind}", mark, tuple(json.loads(json.dumps(pair)))))
    return section.model_copy(update=values)


def parts(value):
    if isinstance(value, Section):
        yield "", value, lambda changed: changed
    elif isinstance(value, dict) and isinstance(value.get("x"), Section):
        yield ".x", value["x"], lambda changed: {"x": changed}
    elif isinstance(value, list) and value and isinstance(value[0], Section):
        yield "[0]", value[0], lambda changed: [changed]


def another(value: Any, kinds: Any) -> tuple[Any, str]:
    """Return a value that differs from `value`, and what stands behind the key that differs."""
    choices = [one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    for one in choices:
        if one != value:
            return one, ""
    if isinstance(value, bool):
        return not value, ""
    if isinstance(value, int | float):
        return value + 1, ""
    if isinstance(value, str):
        return value + "x", ""
    if isinstance(value, dict):
        return {**value, "x": 1}, ".x"
    if isinstance(value, list | tuple):
        return [*value, "x"], ""
    assert value is None
    kind = next(kind for kind in kinds if kind is not NoneType)
    made = {int: 1, float: 1.0, str: "x", bool: True, dict: {"x": 1}}
    return made.get(kind, {"x": 1} if is_mapping(kind) else ["x", "y"]), ""


def mark_of(kind, key):
    keys = []
    other_section(whole(SCHEMAS[kind]), 0, keys)
    (mark,) = [mark for name, mark, _ in keys if name == key]
    return mark
