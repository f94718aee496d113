"""Configuration files of NeMo RL: every version's keys and values, and what Megatron's become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from laurel.config import other_systems
from laurel.config.grpo_run import GRPORun
from laurel.config.load import LoadedConfig, load_config, translated
from laurel.config.resuming import changes
from laurel.config.schemas import SCHEMAS, Kind, command_of_file
from laurel.config.yaml_tree import graft, plain_values
from laurel.errors import ConfigError
from laurel.extensions.importing.nemo_rl_files import MEGATRON_SENTENCE
from laurel.extensions.importing.sources import ImportRequest, import_configuration
from laurel.run.request import plan_allocation
from laurel.training.stopping import (
    Selection,
    select_by,
    select_demonstrations_by,
    select_policy_by,
)

FACTS = Path(__file__).with_name("nemo_rl_facts.txt")
"""Written by `python tools/nemo_rl_files.py CHECKOUT ... --facts FILE`, which says the form."""


@dataclass(slots=True)
class Facts:
    values: dict[str, list[Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def facts() -> dict[str, Facts]:
    """By version and run, all keys with their values, and what is refused."""
    found: dict[str, Facts] = {}
    newest: dict[str, Facts] = {}
    for line in FACTS.read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[(.+)\] (.+)", line):
            old = newest.get(header[2], Facts())
            now = Facts(dict(old.values), {})
            found[f"{header[1]} {header[2]}"] = newest[header[2]] = now
        elif line.startswith("-"):
            del now.values[line[1:]]
        elif line.startswith("!"):
            asked, feature = line[1:].rsplit(": ", 1)
            now.refused[asked] = feature
        else:
            key, _, values = line.partition(" ")
            now.values[key] = json.loads(values)
    return found


FOUND = facts()


def run_of(name: str) -> Kind:
    return cast(Kind, name.split()[1].rstrip(","))


def variants(values: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Configurations in which every value of every key occurs."""
    for at in range(max(map(len, values.values()))):
        tree: dict[str, Any] = {}
        for key in sorted(values, key=lambda key: -key.count(".")):  # deeper keys are there first
            chosen = values[key]
            put(tree, key, chosen[at] if at < len(chosen) else chosen[0], replace=at > 0)
        yield tree


def put(tree: dict[str, Any], key: str, value: Any, *, replace: bool = True) -> None:
    *blocks, last = key.split(".")
    for block in blocks:
        below = tree.get(block)
        if not isinstance(below, dict):
            below = tree[block] = {}
        tree = below
    if replace or not isinstance(tree.get(last), dict):
        tree[last] = value


def load(folder: Path, run: Kind, tree: dict[str, Any], *overrides: str) -> LoadedConfig[Any]:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_config(SCHEMAS[run], path, overrides)


SIZES = {
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 4,
    "env.reward_model.resources": {"num_nodes": None, "gpus_per_node": 1},
    "policy.generation.colocated.resources": {"num_nodes": None, "gpus_per_node": 1},
    "policy.generation.vllm_cfg.tensor_parallel_size": 1,
    "policy.dtensor_cfg.tensor_parallel_size": 1,
    "policy.megatron_cfg.tensor_model_parallel_size": 1,
    "grpo.num_prompts_per_step": 12,
    "grpo.num_generations_per_prompt": 4,
    "policy.train_global_batch_size": 48,
}


def test_the_facts_are_of_every_version_and_run() -> None:
    versions = {name.split()[0] for name in FOUND}
    assert len(versions) == 6
    assert {"2025-09-20", "v0.4.0", "v0.5.0", "v0.6.0", "v0.7.0"} < versions
    assert {name.split(" ", 1)[1] for name in FOUND} == {
        "rm",
        "grpo",
        "sft",
        "grpo, Megatron",
        "sft, Megatron",
    }


@pytest.mark.slow_parameters(*(name for name in FOUND if not name.startswith("v0.7.0")))
@pytest.mark.parametrize("name", FOUND)
def test_every_key_and_value_of_a_version_loads_and_plans(tmp_path: Path, name: str) -> None:
    for tree in variants(FOUND[name].values):
        # Sizes of different files do not fit each other.
        for key, value in SIZES.items() if "grpo" in name else ():
            put(tree, key, value)
        config = load(tmp_path, run_of(name), tree).config
        plan_allocation(config)


def test_checkpoints_are_selected_by_the_metrics_of_every_version() -> None:
    names = {
        (run_of(name), metric)
        for name, of_version in FOUND.items()
        for metric in of_version.values["checkpointing.metric_name"]
    }
    assert {("sft", "val_loss"), ("sft", "val:val_loss"), ("rm", "val_loss")} < names
    for run, metric in names:
        if run == "grpo":
            selection = select_policy_by(metric, True, has_validation=True, environments=["math"])
            assert selection == Selection(key="validation_reward_mean", higher_is_better=True)
            continue
        select = select_by if run == "rm" else select_demonstrations_by
        assert select(metric, False, sets=["default"]) == Selection(key="validation-default_loss")
        with pytest.raises(ConfigError, match="There is no validation set"):
            select(metric, False, sets=[])


def test_what_there_is_not_is_refused_by_its_name(tmp_path: Path) -> None:
    asked = {
        (run_of(name), key, feature)
        for name, of_version in FOUND.items()
        for key, feature in of_version.refused.items()
    }
    assert len(asked) > 20
    for run, key, feature in sorted(asked):
        name, _, value = key.partition("=")
        tree: dict[str, Any] = {"policy": {"model_name": "a"}, "logger": {"monitor_gpus": True}}
        if name.startswith("policy.megatron_cfg."):
            put(tree, "policy.megatron_cfg.enabled", True)
        put(tree, name, yaml.safe_load(value) if value else {"any": 1})
        with pytest.raises(ConfigError, match=rf"Laurel has no {re.escape(feature)}"):
            load(tmp_path, run, tree)


def test_an_environment_of_ones_own_may_have_the_name_of_one_of_theirs(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "data": {"dataset_name": "GSM8K", "env_name": "dapo"},
        "env": {"dapo": {"num_workers": 8}, "refcoco": {"num_workers": 8}},
    }
    with pytest.raises(ConfigError, match=r"data\.env_name=dapo: Laurel has no environment dapo"):
        load(tmp_path, "grpo", tree)
    tree["env"]["custom"] = {"dapo": {"name": "my.Environment"}}
    loaded = load(tmp_path, "grpo", tree)
    assert loaded.config.default_environment == "dapo"
    assert loaded.warnings == (
        "these keys mean nothing here and are ignored: env.dapo, env.refcoco",
    )
    del tree["env"]["refcoco"]
    tree["env"]["maht"] = {"num_workers": 8}
    with pytest.raises(ConfigError, match=r"env\.maht: unknown key; did you mean 'math'"):
        load(tmp_path, "grpo", tree)


def test_settings_of_what_is_off_are_named_and_those_of_what_is_on_are_lost(
    tmp_path: Path,
) -> None:
    loss = {"truncated_importance_sampling_type": "tis"}
    tree: dict[str, Any] = {
        "grpo": {
            "zero_variance_prompt_filtering": True,
            "penalize_invalid_tool_call": None,
            "val_period": -1,
        },
        "loss_fn": loss,
        "env": {"math": {"math_verify_impl": "dapo_math_verify"}},
        "policy": {"dtensor_cfg": {"lora_cfg": {"enabled": False, "dropout_position": "post"}}},
    }
    loaded = load(tmp_path, "grpo", tree)
    lost, ignored, no_effect = loaded.warnings
    assert lost.startswith("these settings are not carried over: ")
    assert "grpo.zero_variance_prompt_filtering (" in lost
    assert "env.math.math_verify_impl (there is one checker: math-verify)" in lost
    assert "dropout_position" not in lost
    assert "policy.dtensor_cfg.lora_cfg.dropout_position" in ignored
    assert "grpo.penalize_invalid_tool_call" in ignored
    assert no_effect == (
        "these settings have no effect beside the others: "
        "loss_fn.truncated_importance_sampling_type (weights are cut where "
        "truncated_importance_sampling_ratio says how far)"
    )
    assert loaded.config.loss_fn.truncated_importance_sampling_ratio is None
    assert loaded.config.grpo.val_period == 0

    tree["policy"]["dtensor_cfg"]["lora_cfg"] |= {"enabled": True, "dropout": 0.1}
    loss |= {"truncated_importance_sampling_ratio": 2.0, "use_importance_sampling_correction": True}
    lost, *_, last = load(tmp_path, "grpo", tree).warnings
    assert "policy.dtensor_cfg.lora_cfg.dropout_position (" in lost
    assert "no effect" not in last


def test_a_section_that_says_so_replaces_that_of_the_file_it_inherits(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "data: {train_data_path: a.jsonl, prompt_key: q}\nrm: {seed: 7, val_period: 3}\n"
    )
    child = tmp_path / "child.yaml"
    child.write_text(
        "defaults: base.yaml\ndata:\n  _override_: true\n  train: {data_path: b.jsonl}\n"
        "rm: {_override_: false, seed: 8}\n"
    )
    config = load_config(SCHEMAS["rm"], child).config
    (rows,) = config.data.train  # type: ignore[attr-defined]
    assert (rows.data_path, rows.prompt_key) == ("b.jsonl", "prompt")
    assert (config.rm.seed, config.rm.val_period) == (8, 3)  # type: ignore[attr-defined]
    child.write_text("defaults: base.yaml\nrm: {loss: {_override_: true, type: davidson}}\n")
    with pytest.raises(ConfigError, match=r"rm\.loss\._override_: replaces whole sections only"):
        load_config(SCHEMAS["rm"], child)


def test_validation_sets_by_name_stand_beside_blocks_as_in_nemos_guide(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "train": {"data_path": "train.jsonl", "prompt_key": "q"},
        "validation": {"data_path": "val.jsonl"},
        "default": {"dataset_name": "BinaryPreferenceDataset"},
        "val_data_paths": {"one": "one.jsonl", "two": "two.jsonl"},
    }
    config = load(tmp_path, "rm", {"data": data}).config
    sets = config.data.validation_sets()
    assert {name: one.data_path for name, one in sets.items()} == {
        "default": "val.jsonl",
        "one": "one.jsonl",
        "two": "two.jsonl",
    }
    assert [one.data_path for one in config.data.train_sets()] == ["train.jsonl"]
    data["val_data_paths"]["default"] = "other.jsonl"
    with pytest.raises(ConfigError, match="both have a set called default"):
        load(tmp_path, "rm", {"data": data})
    data["validation"] = [{"data_path": "val.jsonl"}]
    with pytest.raises(ConfigError, match="name its sets, beside those of"):
        load(tmp_path, "rm", {"data": data})


def megatron(**changes: Any) -> dict[str, Any]:
    """A run of fine-tuning as NeMo RL writes one with Megatron; keys are those of the section."""
    section: dict[str, Any] = {
        "enabled": True,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "sequence_parallel": True,
        "activation_checkpointing": True,
        "optimizer": {
            "optimizer": "adam",
            "lr": 5.0e-6,
            "min_lr": 5.0e-7,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.98,
            "adam_eps": 1e-5,
            "bf16": True,
            "use_distributed_optimizer": True,
            "clip_grad": "${policy.max_grad_norm}",
        },
        "scheduler": {
            "start_weight_decay": "${policy.megatron_cfg.optimizer.weight_decay}",
            "end_weight_decay": "${policy.megatron_cfg.optimizer.weight_decay}",
            "lr_decay_style": "constant",
            "lr_decay_iters": 1000,
            "lr_warmup_iters": 50,
            "lr_warmup_init": 5.0e-7,
        },
        "peft": {
            "enabled": True,
            "target_modules": [],
            "exclude_modules": [],
            "dim": 128,
            "alpha": 64,
            "dropout": 0.1,
            "dropout_position": "post",
        },
    }
    for key, value in changes.items():
        put(section, key.replace("__", "."), value)
    return {
        "sft": {"max_num_steps": 10},
        "policy": {
            "model_name": "a",
            "max_grad_norm": 0.7,
            "megatron_cfg": section,
            "dtensor_cfg": {"enabled": False, "tensor_parallel_size": 1},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3.0e-7}},
        },
        "cluster": {"gpus_per_node": 4},
    }


def test_a_megatron_policy_is_trained_with_its_own_settings(tmp_path: Path) -> None:
    loaded = load(tmp_path, "sft", megatron())
    policy = loaded.config.policy
    assert policy.optimizer.name == "torch.optim.AdamW"
    assert policy.optimizer.kwargs == {
        "lr": 5.0e-6,
        "weight_decay": 0.1,
        "betas": [0.9, 0.98],
        "eps": 1e-5,
    }
    assert policy.max_grad_norm == 0.7
    spread = policy.dtensor_cfg
    assert (spread.tensor_parallel_size, spread.context_parallel_size) == (2, 1)
    assert (spread.sequence_parallel, spread.activation_checkpointing) == (True, True)
    adapters = spread.lora_cfg
    assert (adapters.enabled, adapters.dim, adapters.alpha) == (True, 128, 64.0)
    assert adapters.target_modules == []
    translated, lost, ignored = loaded.warnings
    assert translated == MEGATRON_SENTENCE
    assert "policy.dtensor_cfg.enabled" in ignored
    for key in ("pipeline_model_parallel_size", "peft.dropout_position"):
        assert f"policy.megatron_cfg.{key} (" in lost
    assert "lr" not in re.findall(r"megatron_cfg\.optimizer\.(\w+) \(", lost)
    plan_allocation(loaded.config)


def rates(policy: Any, steps: int) -> list[float]:
    """The learning rates that the optimizer of a policy has at each step."""
    import torch

    from laurel.training.learner import build_scheduler

    optimizer = torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], lr=policy.optimizer.kwargs["lr"]
    )
    scheduler = build_scheduler(policy.scheduler, optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def megatron_rate(
    step: int, *, style: str, lr: float, least: float, warmup: int, begin: float, until: int
) -> float:
    """The rate of Megatron's schedule, from its formulas."""
    import math

    if warmup and step <= warmup:
        return begin + (lr - begin) * step / warmup
    if style == "constant":
        return lr
    if step > until:
        return least
    share = (step - warmup) / (until - warmup)
    falling = 1 - share if style == "linear" else 0.5 * (math.cos(math.pi * share) + 1)
    return least + falling * (lr - least)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "begin"), [(4, 5.0e-7), (4, 0.0), (0, 0.0), (1, 5.0e-6)])
def test_the_schedule_is_megatrons(tmp_path: Path, style: str, warmup: int, begin: float) -> None:
    said = {
        "scheduler__lr_decay_style": style,
        "scheduler__lr_decay_iters": 12,
        "scheduler__lr_warmup_iters": warmup,
        "scheduler__lr_warmup_init": begin,
    }
    policy = load(tmp_path, "sft", megatron(**said)).config.policy
    expected = [
        megatron_rate(
            step, style=style, lr=5.0e-6, least=5.0e-7, warmup=warmup, begin=begin, until=12
        )
        for step in range(16)
    ]
    # A warm-up from 0 begins at 1e-8 of the rate, as torch's cannot begin at 0.
    assert rates(policy, 16) == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"scheduler__lr_decay_style": "inverse-square-root"},
            r"lr_decay_style: inverse-square-root is none of constant, linear and cosine",
        ),
        (
            {"scheduler__lr_decay_style": "cosine", "scheduler__lr_decay_iters": None},
            r"lr_decay_iters: must be a whole number above the 50 steps of warm-up",
        ),
        ({"scheduler__end_weight_decay": 0.3}, r"the weight decay changes from 0\.1 to 0\.3"),
        ({"scheduler__lr_warmup_init": 1.0e-3}, r"is above the learning rate 5e-06"),
        ({"optimizer__optimizer": "muon"}, r"muon is neither adam nor sgd"),
        ({"optimizer__lr": "fast"}, r"optimizer\.lr: must be a number, not 'fast'"),
        ({"optimizer": None}, r"optimizer is missing, and its scheduler"),
        ({"peft__target_modules": ["linear_q"]}, r"'linear_q' is none of Megatron's layers"),
        ({"peft__dim": None}, r"peft\.dim: is missing, and adapters are enabled"),
        ({"expert_model_parallel_size": 4}, r"Laurel has no expert parallelism"),
        ({"mtp_num_layers": 1}, r"Laurel has no multi-token prediction"),
        ({"fp8_cfg__enabled": True}, r"Laurel has no FP8 training"),
    ],
)
def test_what_would_train_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, "sft", megatron(**changes))


def test_settings_beside_megatrons_are_refused_where_they_would_be_lost(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.optimizer: has no effect beside"):
        load(tmp_path, "sft", megatron(), "policy.optimizer.kwargs.lr=1e-4")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: has no effect beside"):
        load(tmp_path, "sft", megatron(), "policy.dtensor_cfg.tensor_parallel_size=4")
    changed = load(tmp_path, "sft", megatron(), "policy.megatron_cfg.optimizer.lr=1e-4").config
    assert changed.policy.optimizer.kwargs["lr"] == 1e-4
    off = load(
        tmp_path,
        "sft",
        megatron(),
        "policy.megatron_cfg.enabled=false",
        "policy.dtensor_cfg.enabled=true",
    ).config
    assert off.policy.optimizer.kwargs == {"lr": 3.0e-7}
    assert off.policy.dtensor_cfg.tensor_parallel_size == 1
    both = megatron()
    both["policy"]["dtensor_cfg"]["enabled"] = True
    with pytest.raises(ConfigError, match="are both true; which of the two sections holds"):
        load(tmp_path, "sft", both)


OWN = sorted((Path(__file__).parents[3] / "examples" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.stem)
def test_the_backend_field_alone_leaves_our_own_examples_as_they_are(file: Path) -> None:
    kind: Kind = "grpo" if "grpo" in file.stem else "rm" if "rm" in file.stem else "sft"
    plain = load_config(SCHEMAS[kind], file).config
    loaded = load_config(SCHEMAS[kind], file, ["policy.megatron_cfg.enabled=true"])
    assert loaded.config.model_dump() == plain.model_dump()
    assert any("its own backend" in sentence for sentence in loaded.warnings)
    both = [f"policy.megatron_cfg.{key}=true" for key in ("enabled", "activation_checkpointing")]
    sized = load_config(SCHEMAS[kind], file, both).config
    assert sized.policy.dtensor_cfg.activation_checkpointing
    assert sized.policy.optimizer == plain.policy.optimizer


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", [*OWN, *RECIPES], ids=lambda file: file.stem)
def test_no_importer_is_asked_about_our_own_keys(file: Path, monkeypatch) -> None:
    def asked() -> list[Any]:
        raise AssertionError("an importer is asked")

    schema = SCHEMAS[command_of_file(file)]
    with monkeypatch.context() as patched:
        patched.setattr(other_systems, "_importers", asked)
        load_config(schema, file, ["policy.precision=float32", "cluster.device=cpu"])
        with pytest.raises(AssertionError, match="is asked"):
            load_config(schema, file, ["+policy.dynamic_batching.enabled=true"])


def test_layers_of_megatron_are_those_of_the_decoder(tmp_path: Path) -> None:
    changes = {
        "peft__target_modules": ["linear_qkv", "linear_fc2"],
        "peft__exclude_modules": ["linear_proj"],
    }
    adapters = load(tmp_path, "sft", megatron(**changes)).config.policy.dtensor_cfg.lora_cfg
    assert adapters.target_modules == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert adapters.exclude_modules == ["o_proj"]


def test_an_import_writes_what_megatrons_settings_become(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(megatron()), encoding="utf-8")
    found = import_configuration(ImportRequest(path=path)).imported
    assert found.values["policy.optimizer"]["kwargs"]["lr"] == 5.0e-6
    assert not [key for key in found.values if key.startswith("policy.megatron_cfg")]
    told = {entry.key: entry for entry in found.entries}
    assert told["policy.megatron_cfg.tensor_model_parallel_size"].to == {
        "policy.dtensor_cfg.tensor_parallel_size": 2
    }
    assert told["policy.megatron_cfg.pipeline_model_parallel_size"].status == "not carried"


def test_asynchronous_training_is_carried_to_max_staleness(tmp_path: Path) -> None:
    block = {"enabled": True, "max_trajectory_age_steps": 3, "in_flight_weight_updates": True}
    tree: dict[str, Any] = {
        "grpo": {"async_grpo": block},
        "loss_fn": {"use_importance_sampling_correction": True},
    }
    loaded = load(tmp_path, "grpo", tree)
    assert loaded.config.grpo.max_staleness == 3
    assert loaded.warnings[0].startswith("grpo.async_grpo is translated: grpo.max_staleness=3")
    assert "grpo.async_grpo.in_flight_weight_updates (" in loaded.warnings[1]
    tree["grpo"]["max_staleness"] = 1
    with pytest.raises(ConfigError, match="say the same thing; keep one"):
        load(tmp_path, "grpo", tree)
    tree["grpo"]["async_grpo"] = {"enabled": False, "max_trajectory_age_steps": 3}
    assert load(tmp_path, "grpo", tree).config.grpo.max_staleness == 1


def test_rows_that_are_divided_are_packed(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "policy": {
            "dtensor_cfg": {"context_parallel_size": 2},
            "sequence_packing": {"enabled": False},
            "dynamic_batching": {"enabled": True},
        },
        "cluster": {"gpus_per_node": 2},
    }
    loaded = load(tmp_path, "grpo", tree)
    assert loaded.config.policy.sequence_packing.enabled
    assert loaded.warnings[0].startswith("policy.sequence_packing.enabled is true: ")
    plan_allocation(loaded.config)


def test_bounds_of_ratios_that_a_file_inherits_and_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("loss_fn: {ratio_clip_max: 0.27, ratio_clip_c: 10}\n")
    (tmp_path / "moe.yaml").write_text(
        "defaults: base.yaml\npolicy: {scratch: {}}\nloss_fn: {force_on_policy_ratio: true}\n"
    )
    loaded = load_config(SCHEMAS["grpo"], tmp_path / "moe.yaml")
    loss = loaded.config.loss_fn
    assert (loss.ratio_clip_max, loss.ratio_clip_c) == (0.2, None)
    for key in ("ratio_clip_max=0.27", "ratio_clip_c=10"):
        assert any(key in line and "base.yaml" in line for line in loaded.warnings)
    # Beside it they are somebody's mistake.
    with pytest.raises(ConfigError, match=r"ratio_clip_max=0\.3 has no effect"):
        load(tmp_path, "grpo", {"loss_fn": {"force_on_policy_ratio": True, "ratio_clip_max": 0.3}})


@pytest.mark.parametrize(
    ("key", "loss"), [("use_cispo", "cispo"), ("disable_ppo_ratio", "reinforce")]
)
def test_a_loss_is_named_by_one_key(tmp_path: Path, key: str, loss: str) -> None:
    loaded = load(tmp_path, "grpo", {"loss_fn": {key: True}})
    assert loaded.config.loss_fn.loss_type == loss
    assert loaded.warnings == ()
    assert load(tmp_path, "grpo", {"loss_fn": {key: False}}).config.loss_fn.loss_type == "ppo"
    with pytest.raises(ConfigError, match=f"{key}=true is loss_fn.loss_type={loss}"):
        load(tmp_path, "grpo", {"loss_fn": {key: True, "loss_type": "gspo"}})


@pytest.mark.parametrize(
    ("grpo", "scale", "leaves_one_out", "told"),
    [
        ({}, "group", True, 0),
        ({"normalize_rewards": False, "use_leave_one_out_baseline": False}, "none", False, 0),
        ({"normalize_rewards": True, "use_leave_one_out_baseline": True}, "group", True, 0),
        # What the estimator says itself holds before what grpo says, as in NeMo RL.
        (
            {"normalize_rewards": False, "adv_estimator": {"normalize_rewards": True}},
            "group",
            True,
            0,
        ),
        ({"adv_estimator": {"normalize_rewards": False}}, "none", True, 0),
        (
            {
                "use_leave_one_out_baseline": False,
                "adv_estimator": {
                    "use_leave_one_out_baseline": "${grpo.use_leave_one_out_baseline}"
                },
            },
            *("group", False, 0),
        ),
        ({"normalize_rewards": False, "adv_estimator": {"scale": "batch"}}, "batch", True, 1),
        ({"adv_estimator": {"name": "reinforce_plus_plus"}}, "batch", False, 0),
        (
            {"use_leave_one_out_baseline": True, "adv_estimator": {"name": "reinforce_plus_plus"}},
            *("batch", False, 1),
        ),
    ],
)
def test_an_estimator_is_set_by_its_own_keys(
    tmp_path: Path, grpo: dict[str, Any], scale: str, leaves_one_out: bool, told: int
) -> None:
    loaded = load(tmp_path, "grpo", {"grpo": grpo})
    found: Any = loaded.config.grpo  # type: ignore[attr-defined]
    assert (found.scale, found.leaves_one_out) == (scale, leaves_one_out)
    assert len(loaded.warnings) == told
    # A checkpoint of an older version has all keys, and null where the estimator said nothing.
    both = {"normalize_rewards": True, "use_leave_one_out_baseline": True}
    said = grpo.get("adv_estimator", {})
    said = {key: False if "$" in str(one) else one for key, one in said.items()}
    own = {**dict.fromkeys(both), "scale": None, **said}
    tree = {"grpo": both | grpo | {"adv_estimator": own}}
    saved = plain_values(translated(GRPORun, graft(tree, "saved")))
    assert not list(changes(GRPORun, saved, loaded.config.model_dump(mode="json")))


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("grpo", {"grpo": {"normalize_rewards": 1}}, "normalize_rewards: must be true or false"),
        ("grpo", {"loss_fn": {"use_cispo": "true"}}, "loss_fn.use_cispo: must be true or false"),
        ("rm", {"data": {"val_data_paths": "v.jsonl"}}, "val_data_paths: must be a section"),
        ("rm", {"data": {"val_data_paths": ["v.jsonl"]}}, "val_data_paths: must be a section"),
        ("sft", {"data": {"default": 3}}, "data.default: must be a section"),
        ("rm", {"data": {"default": {"promt_key": "q"}}}, "did you mean 'prompt_key'"),
    ],
)
def test_what_is_translated_is_checked(
    tmp_path: Path, kind: Kind, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, kind, values)


def test_a_set_that_a_reference_names_stands_beside_others(tmp_path: Path) -> None:
    data = {
        "train": {"data_path": "t.jsonl"},
        "validation": "${data.train}",
        "val_data_paths": {"one": "one.jsonl"},
    }
    sets = load(tmp_path, "rm", {"data": data}).config.data.validation_sets()
    found = {name: one.data_path for name, one in sets.items()}
    assert found == {"default": "t.jsonl", "one": "one.jsonl"}


def test_sections_of_other_commands_are_not_translated(tmp_path: Path) -> None:
    other = {
        "loss_fn": {"use_cispo": True, "loss_type": "gspo"},
        "env": {"reward_model": {"reward_model_cfg": {"enabled": False}}},
    }
    for kind in ("rm", "sft"):
        loaded = load(tmp_path, kind, other)
        assert loaded.moves == ()
        assert loaded.warnings == ("these keys mean nothing here and are ignored: env, loss_fn",)


def test_the_budget_of_dynamic_batches_is_that_of_padded_rows(tmp_path: Path) -> None:
    policy = {
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 64,
        "logprob_batch_size": 8,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": "${mul:${policy.max_total_sequence_length}, 4}",
        },
    }
    loaded = load(tmp_path, "grpo", {"policy": policy})
    assert loaded.config.policy.batch_limits.padded_tokens == 256
    (ignored,) = loaded.warnings
    assert ignored.endswith(": policy.logprob_batch_size")
    policy["sequence_packing"] = {"enabled": True, "train_mb_tokens": 100}
    assert load(tmp_path, "grpo", {"policy": policy}).config.policy.token_budget == 100
    for packing, enabled, budget in (({}, True, 128), ({"train_mb_tokens": 90}, True, 90)):
        policy["sequence_packing"] = {"enabled": False, **packing}
        policy["dynamic_batching"] = {"enabled": enabled}
        config = load(tmp_path, "grpo", {"policy": policy}).config
        assert config.policy.batch_limits.padded_tokens == budget
    policy["sequence_packing"]["train_mb_tokens"] = "auto"
    config = load(tmp_path, "grpo", {"policy": policy}).config
    assert config.policy.sequence_packing.train_mb_tokens == "auto"
    policy["dynamic_batching"]["train_mb_tokens"] = 0
    with pytest.raises(ConfigError, match="train_mb_tokens: must be"):
        load(tmp_path, "grpo", {"policy": policy})
    # Where NeMo RL counts rows, no budget holds that its file says beside.
    policy["dynamic_batching"] = {"enabled": False}
    limits = load(tmp_path, "grpo", {"policy": policy}).config.policy.batch_limits
    assert (limits.padded_tokens, limits.padded_groups) == (None, 2)


def test_an_import_names_what_there_is_not_also_where_laurel_has_each_key(tmp_path: Path) -> None:
    tree = {
        "policy": {"optimizer": {"name": "transformer_engine.pytorch.optimizers.FusedAdam"}},
        "grpo": {"max_num_steps": 5},
        "data": {"train": {"dataset_name": "clevr-cogent"}, "env_name": "nemo_gym"},
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_config(SCHEMAS["grpo"], path, is_foreign=True)
    for feature in ("Transformer Engine optimizer", "multimodal data", "NeMo Gym"):
        assert feature in str(refusal.value)


def test_a_reward_model_that_scores_has_no_adapters(tmp_path: Path) -> None:
    for parallel, told in (
        ({"lora_cfg": {"enabled": True}}, "merged weights"),
        ({"context_parallel_size": 2}, "tensor_parallel_size"),
    ):
        with pytest.raises(ConfigError, match=told):
            load(tmp_path, "grpo", {"env": {"reward_model": {"dtensor_cfg": parallel}}})
    off = {"lora_cfg": {"enabled": False}, "context_parallel_size": 1, "cpu_offload": True}
    load(tmp_path, "grpo", {"env": {"reward_model": {"dtensor_cfg": off}}})
