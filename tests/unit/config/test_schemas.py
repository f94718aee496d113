"""The schemas of the commands: what each refuses, with its cure, and what it fills in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest

from laurel.config.data import TaskDataConfig
from laurel.config.grpo import UNLIMITED_STEPS, Alarm
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.schema_info import kinds_of
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section
from laurel.errors import ConfigError

REFUSED: list[tuple[Kind, str, str]] = [
    ("rm", "policy.scratch.hidden_size=50", "is 50, which num_heads=4 does not divide"),
    ("rm", "policy.scratch.config_overrides={num_key_value_heads: 3}", "is 4, which num_key_value"),
    ("rm", "policy.scratch.config_overrides={num_key_value_heads: 0}", "_heads=0 does not divide"),
    ("rm", "policy.scratch.num_kv_heads=2", "policy.scratch.config_overrides holds it, as num_key"),
    ("rm", "policy.optimizer.kwargs.lr=-1e-5", "kwargs.lr is -1e-05, and must be a finite"),
    ("sft", "policy.optimizer.kwargs.lr=.nan", "kwargs.lr is nan, and must be a finite"),
    ("grpo", "policy.optimizer.kwargs.eps=-1", "kwargs.eps is -1, and must be a finite"),
    ("rm", "policy.optimizer={name: a.B, kwargs: {weight_decay: -1}}", "weight_decay is -1"),
    ("rm", "policy.optimizer.kwargs.lr=fast", "policy.optimizer: kwargs.lr is 'fast', and must"),
    ("sft", "policy.optimizer.kwargs.weight_decay=true", "weight_decay is True, and must be a"),
    ("grpo", "policy.optimizer.kwargs.fused=true", "add it: '+policy.optimizer.kwargs.fused=true'"),
    ("rm", "policy.reward_model_cfg.enabled=false", "must be true"),
    ("sft", "policy.reward_model_cfg.enabled=true", "laurel rm"),
    ("sft", "sft.val_perod=3", "did you mean 'val_period'"),
    ("rm", "policy.optimizer.kwargs.lr=.inf", "kwargs.lr is inf, and must be a finite number"),
    ("rm", "policy.max_grad_norm=.inf", "must be a finite number, or null, not inf"),
    ("rm", "cluster.placement.reward_model.slots=2", "only laurel grpo has such a role"),
    ("sft", "cluster.placement.policy.shares=policy", "the policy's slots are its own"),
    ("grpo", "cluster.placement.generator.slots=2", "known here: policy, generation, reward_model"),
    ("grpo", "cluster.placement={generator: {}}", "no such role; known here: policy, generation"),
    ("grpo", "policy.generation.temperature=0", "greedy decoding"),
    ("grpo", "policy.generation.temperature=-1", "temperature: must be "),
    ("grpo", "policy.generation.stop_strings=['']", "an empty stop string"),
    ("grpo", "grpo.seed=-1", "grpo.seed: must be a whole number of at least 0"),
    ("grpo", "policy.generation.max_new_tokens=513", "more than policy.max_total_sequence_length"),
    ("grpo", "policy.generation.vllm_cfg.max_model_len=500", "max_model_len=500 is less than"),
    ("grpo", "grpo.num_prompts_per_step=33", "no multiple of policy.train_global_batch_size"),
    ("grpo", "loss_fn.truncated_importance_sampling_ratio=2", "do nothing without truncated_impo"),
    ("grpo", "grpo.adv_estimator.reward_weights=[1.0,2.0]", "is read by adv_estimator.name=gdpo"),
    ("grpo", "grpo.adv_estimator.minus_baseline=false", "adv_estimator.name=reinforce_plus_plus"),
    ("grpo", "grpo.stop_at_validation_metric=accuracy", "stop_at_validation_threshold belong"),
    ("grpo", "grpo.stop_at_validation_threshold=0.5", "belong together"),
    ("grpo", "grpo.health.stop_on=[overoptimisation]", "needs grpo.health.gold_metric, or a part"),
    ("grpo", "grpo.health.stop_on=[format]", "needs format_metric"),
    ("grpo", "grpo.health.stop_on=[ensemble]", "env.reward_model.models"),
    ("grpo", "grpo.health.length_factor=1.0", "no such key any more (the threshold is a part"),
    ("grpo", "grpo.health.window=0", "at least 1"),
    ("grpo", "grpo.health.stop_on=[lengths]", f"one of {', '.join(get_args(Alarm))}"),
    ("grpo", "grpo.health.stop_on=[lengths]", "did you mean 'length'?"),
    ("grpo", "grpo.health.windows=3", "did you mean 'window'?"),
    ("grpo", "grpo.health.stop_on=[entropy]", "there is no entropy any more (it rose in no run"),
    ("grpo", "grpo.health.ignore=[kl_without_reward]", "there is no kl_without_reward any more"),
    ("grpo", "grpo.health.kl_growth=2.0", "its alarm was removed"),
    ("grpo", "grpo.health.entropy_share=0.1", "there is no such key any more"),
    ("grpo", "grpo.health.noise_floor_share=0.9", "there is no such key any more"),
]


@pytest.mark.parametrize(
    ("baseline", "said"),
    [("true", "num_generations_per_prompt must be at least 2"), ("false", "learns nothing")],
)
def test_a_group_of_one_is_refused(baseline: str, said: str) -> None:
    """Without others there is nothing to compare with; with itself, the advantage is 0."""
    one = ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"]
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(GRPORun, None, [*one, f"grpo.use_leave_one_out_baseline={baseline}"])


@pytest.mark.parametrize(("kind", "override", "said"), REFUSED)
def test_what_cannot_be_meant_is_refused(kind: Kind, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(SCHEMAS[kind], None, [override])


def float_keys(section: Section, above: str = "") -> Iterator[str]:
    """Yield the dotted keys that take a number with a fraction, alone or beside null."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{above}{name}"
        if isinstance(value, Section):
            yield from float_keys(value, f"{key}.")
        elif set(kinds_of(field.annotation)) <= {int, float, NoneType} and float in kinds_of(
            field.annotation
        ):
            yield key


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_no_number_is_infinite_or_none_at_all(kind: Kind, value: str) -> None:
    keys = list(float_keys(load_config(SCHEMAS[kind], None, []).config))
    assert len(keys) >= 4
    with pytest.raises(ConfigError) as problem:
        load_config(SCHEMAS[kind], None, [f"{key}={value}" for key in keys])
    lines = str(problem.value).splitlines()
    for key in keys:
        assert any(f" {key}: must be a finite number" in line for line in lines), key


def test_a_bound_of_rewards_may_be_none() -> None:
    clip = "env.reward_model.transform.clip"
    config = load_config(GRPORun, None, [f"{clip}=[-.inf,5]"]).config
    assert config.env.reward_model.transform.clip == (float("-inf"), 5.0)
    with pytest.raises(ConfigError, match=r"must be \[lowest, highest"):
        load_config(GRPORun, None, [f"{clip}=[.nan,5]"])


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_share_of_a_validation_set_is_said_to_hold_nothing_out(kind: Kind) -> None:
    def told(blocks: str) -> list[str]:
        loaded = load_config(SCHEMAS[kind], None, [f"data.validation={blocks}"])
        return [line for line in loaded.warnings if "no effect" in line]

    one = "{data_path: a, split_validation_size: 0.1}"
    named, listed = f"{{A: {one}, B: {{data_path: b}}}}", f"[{{data_path: b}}, {one}]"
    for blocks, name in ((named, "A"), (one, "default"), (listed, "2")):
        (line,) = told(blocks)
        assert f"others: data.validation.{name}.split_validation_size (it is the part of" in line
        assert not told(blocks.replace("0.1", "0"))
    if kind == "grpo":  # it divides the rows that have no end
        made = "{dataset_name: reasoning_gym, max_samples: 30, split_validation_size: 0.1}"
        assert not told(made)
    if kind == "rm":
        assert not told("{A: {benchmark: reward-bench}, B: {data_path: b}}")


def test_a_teacher_alone_needs_no_other_completion_to_compare_with():
    lone = ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=1"]
    taught = "loss_fn.distillation={model_name: teacher, rewards: %s}"
    config = load_config(GRPORun, None, [*lone, taught % "false"]).config
    assert config.grpo.num_generations_per_prompt == 1
    for rewards in ([], [taught % "true"]):
        with pytest.raises(ConfigError, match="num_generations_per_prompt must be at least 2"):
            load_config(GRPORun, None, [*lone, *rewards])


TRUNCATED = {
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": "2",
}
CORRECTED = TRUNCATED | {"loss_fn.use_importance_sampling_correction": "true"}
LEAVES_ONE_OUT = {"grpo.adv_estimator.leave_one_out_std": "true"}
STOPS = {"grpo.health.stop_on": "[length]"}
TEACHER_ALONE = {"loss_fn.distillation": "{model_name: teacher, rewards: false}"}
THOUGHTS = {"grpo.malformed_thinking_advantage": "-5"}
CALLS = {"grpo.invalid_tool_call_advantage": "-5", "grpo.max_rollout_turns": "2"}
SEQUENCES = {"loss_fn.token_level_loss": "false"}
GSPO = SEQUENCES | {"loss_fn.sequence_level_importance_ratios": "true"}
GMPO = SEQUENCES | {"loss_fn.loss_type": "gmpo"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (TRUNCATED, "sampling_ratio=2.0 needs use_importance_sampling_correction"),
        (
            CORRECTED | {"loss_fn.truncated_importance_sampling_ratio_min": "2.5"},
            "ratio_min=2.5 must be below truncated_importance_sampling_ratio=2.0",
        ),
        (
            LEAVES_ONE_OUT | {"grpo.use_leave_one_out_baseline": "false"},
            "leave_one_out_std=true is read where",
        ),
        (
            LEAVES_ONE_OUT | {"grpo.adv_estimator.name": "reinforce_plus_plus"},
            "leave_one_out_std=true is read where",
        ),
        ({"env.code.max_attempts": "3", "grpo.max_rollout_turns": "2"}, "set that to 3, or ask"),
        (STOPS | {"grpo.health.ignore": "[length]"}, "both name length"),
        (STOPS | {"grpo.health.enabled": "false"}, "enabled=true"),
        (
            {"grpo.health.stop_on": "[kl_jump]", "loss_fn.reference_policy_kl_penalty": "0"},
            "loss_fn.reference_policy_kl_penalty",
        ),
        (TEACHER_ALONE | {"loss_fn.use_kl_in_reward": "true"}, "use_kl_in_reward=True has no"),
        (TEACHER_ALONE | THOUGHTS, "grpo.malformed_thinking_advantage has no effect"),
        (
            TEACHER_ALONE | {"grpo.adv_estimator.per_step": "true"},
            "grpo.adv_estimator.per_step=true has no effect",
        ),
        (GSPO | CALLS, "so grpo.invalid_tool_call_advantage would have no effect"),
        (GMPO | CALLS, "loss_fn.loss_type=gmpo gives all tokens"),
        (GSPO | {"grpo.adv_estimator.per_step": "true"}, "so grpo.adv_estimator.per_step=true"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(GRPORun, None, [f"{key}={value}" for key, value in overrides.items()])


WEIGHTS = ("reward_weights=[1.0,2.0]", "name=gdpo")
ALONE = ("leave_one_out_std=true", "use_leave_one_out_baseline=true")


@pytest.mark.parametrize(
    "settings", [WEIGHTS, ALONE, ("minus_baseline=false", "name=reinforce_plus_plus")]
)
def test_what_an_estimator_reads_is_taken(settings: tuple[str, ...]) -> None:
    overrides = [f"grpo.adv_estimator.{one}" for one in settings]
    assert load_config(GRPORun, None, overrides).warnings == ()


@pytest.mark.parametrize("loss", [GSPO, GMPO])
def test_the_only_turn_of_a_completion_may_have_another_advantage(loss: dict[str, str]) -> None:
    overrides = [f"{key}={value}" for key, value in (loss | THOUGHTS).items()]
    assert load_config(GRPORun, None, overrides).warnings == ()


def test_a_part_without_weight_is_gold_enough_to_stop_on() -> None:
    parts = "[{env: math, weight: 1.0}, {env: math, weight: 0.0}]"
    overrides = [f"+env.composite.both={{parts: {parts}}}"]
    overrides += ["grpo.health.stop_on=[overoptimisation]"]
    assert load_config(GRPORun, None, overrides).config.grpo.health.gold_metric is None
    with pytest.raises(ConfigError, match=r"needs grpo\.health\.gold_metric"):
        load_config(GRPORun, None, [overrides[0].replace("0.0", "1.0"), overrides[1]])


def test_a_key_that_is_gone_is_told_unless_an_older_file_leaves_it_null(tmp_path: Path) -> None:
    older = tmp_path / "older.yaml"
    older.write_text(
        "env: {code: {sandbox: {url: null, num_workers: 8, result_kb: 256}}}\n", encoding="utf-8"
    )
    loaded = load_config(GRPORun, older)
    assert "env.code.sandbox.url" in loaded.warnings[0]
    older.write_text("env: {code: {sandbox: {url: 'http://127.0.0.1:9'}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no such key any more .*Laurel's own sandbox"):
        load_config(GRPORun, older)


@pytest.mark.parametrize("schema", [SFTRun, GRPORun])
@pytest.mark.parametrize("key", ["prompt_key", "rejected_key"])
def test_the_keys_of_pairs_are_refused_with_those_that_name_columns_here(
    schema: Any, key: str, tmp_path: Path
) -> None:
    instead = f"{key}: unknown key; for sft and grpo: data.input_key, data.output_key"
    with pytest.raises(ConfigError, match=re.escape(instead)):
        load_config(schema, None, [f"data.{key}=Frage"])
    path = tmp_path / "run.yaml"
    path.write_text(f"data: {{train: {{data_path: x, {key}: Frage}}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"data.train.{instead}")):
        load_config(schema, path, [])


@pytest.mark.parametrize("given", ["{kwargs: {lr: 1e-4}}", "{}"])
@pytest.mark.parametrize("is_file", [True, False])
def test_an_optimizer_without_a_name_changes_the_default(
    given: str, is_file: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"policy: {{optimizer: {given}}}\n" if is_file else "", encoding="utf-8")
    overrides = [] if is_file else [f"policy.optimizer={given}"]
    for kind in SCHEMAS:
        optimizer = load_config(SCHEMAS[kind], path, overrides).config.policy.optimizer
        default = SCHEMAS[kind]().policy.optimizer  # type: ignore[attr-defined]
        changed = {"lr": 1e-4} if "lr" in given else {}
        assert optimizer.name == default.name
        assert optimizer.kwargs == default.kwargs | changed


def test_a_file_may_change_what_its_parent_has_named(tmp_path: Path) -> None:
    sgd = "policy: {optimizer: {name: torch.optim.SGD, kwargs: {lr: 0.1, momentum: 0.9}}}\n"
    (tmp_path / "parent.yaml").write_text(sgd, encoding="utf-8")
    child = tmp_path / "child.yaml"
    changed = "defaults: parent.yaml\npolicy: {optimizer: {kwargs: {lr: 0.2}}}\n"
    child.write_text(changed, encoding="utf-8")
    optimizer = load_config(SCHEMAS["rm"], child).config.policy.optimizer
    assert optimizer.name == "torch.optim.SGD"
    assert optimizer.kwargs == {"lr": 0.2, "momentum": 0.9}


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_blocks_win_over_defaults_and_those_over_flat_keys(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = (
        "data:\n  prompt_file: flat.txt\n  output_key: said\n"
        "  default: {prompt_file: default.txt, input_key: question}\n"
        "  train: [{data_path: a.jsonl}, {data_path: b.jsonl, prompt_file: own.txt}]\n"
    )
    file.write_text(text)
    alone: Any = load_config(SCHEMAS[kind], file).config
    assert alone.data.validation is None
    file.write_text(f"{text}  val_data_path: c.jsonl\n")
    loaded = load_config(SCHEMAS[kind], file)
    assert loaded.warnings == ()
    blocks: Any = loaded.config.data  # type: ignore[attr-defined]
    first, second = blocks.train_sets()
    assert (first.prompt_file, first.input_key) == ("default.txt", "question")
    assert (second.prompt_file, second.output_key) == ("own.txt", "said")
    assert [one.input_key for one in blocks.validation_sets()] == ["question"]
    data: Any = type(blocks)
    flat = data(train_data_path="a.jsonl", val_data_path="b.jsonl", output_key="said")
    for one, path in ((flat.train_sets(), "a.jsonl"), (flat.validation_sets(), "b.jsonl")):
        assert [(block.data_path, block.output_key) for block in one] == [(path, "said")]


def test_generators_of_tasks_are_no_names_of_sets(tmp_path: Path) -> None:
    tasks = "{tasks: {chain_sum: {weight: 1.0}}}"
    for train in (tasks, f"[{tasks}]"):
        file = tmp_path / "run.yaml"
        file.write_text(f"data:\n  default: {{dataset_name: reasoning_gym}}\n  train: {train}\n")
        data: Any = load_config(SCHEMAS["grpo"], file).config.data  # type: ignore[attr-defined]
        assert [one.dataset_name for one in data.train_sets()] == ["reasoning_gym"]


def test_a_split_alone_is_a_validation_set() -> None:
    data = TaskDataConfig(dataset_name="GSM8K", val_split="test")
    assert [block.split for block in data.validation_sets()] == ["test"]
    assert data.train_sets()[0].split is None


@pytest.mark.parametrize(
    "name",
    ["use_reward_loop", "reward_model.use_reward_loop", "env.reward_model.use_reward_loop"],
)
def test_each_spelling_of_another_system_sets_the_one_key(tmp_path: Path, name: str) -> None:
    *blocks, key = name.split(".")
    path = tmp_path / "run.yaml"
    path.write_text(
        "".join(f"{block}: {{" for block in blocks) + f"{key}: false" + "}" * len(blocks)
    )
    for loaded in (load_config(GRPORun, path), load_config(GRPORun, None, [f"{name}=false"])):
        assert loaded.config.env.reward_model.use_reward_loop is False
        assert loaded.warnings == ()
    changed = load_config(GRPORun, path, ["use_reward_loop=true"]).config.env.reward_model
    assert changed.use_reward_loop is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "use_reward_loop: false\nenv: {reward_model: {use_reward_loop: true}}",
            r"run\.yaml:1: use_reward_loop: is another name of",
        ),
        (
            "reward_model: {use_reward_loop: false, enable: true}",
            r"run\.yaml:1: reward_model: unknown key",
        ),
        (
            "use_reward_loop: perhaps",
            r"run\.yaml:1: .*use_reward_loop: must be true or false",
        ),
    ],
)
def test_two_spellings_and_their_neighbours_are_problems(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(GRPORun, path)


@pytest.mark.parametrize(
    ("overrides", "num_epochs"),
    [
        ([], 1),
        (["grpo.max_num_steps=25"], UNLIMITED_STEPS),
        (["grpo.max_num_steps=25", "grpo.max_num_epochs=2"], 2),
    ],
)
def test_a_limit_of_steps_takes_the_passes_that_it_needs(overrides, num_epochs):
    assert load_config(GRPORun, None, overrides).config.grpo.num_epochs == num_epochs


def test_an_error_in_a_part_of_a_setting_has_the_place_of_that_part(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("policy:\n  optimizer:\n    kwargs:\n      lr: 1.0e-5\n      eps: -1\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:5: policy\.optimizer: kwargs\.eps is -1"):
        load_config(SFTRun, file)
    override = "policy.optimizer.kwargs.lr=fast"
    with pytest.raises(ConfigError, match=rf"override '{override}': .*kwargs\.lr is 'fast'"):
        load_config(SFTRun, file, [override, "policy.optimizer.kwargs.eps=1e-8"])


def test_the_loader_is_light() -> None:
    heavy = "torch transformers datasets numpy pandas pyarrow typer rich"
    program = (
        "import sys, laurel.config.load, laurel.config.reward_model\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_neither_torch_nor_data_is_needed_to_refuse_a_setting() -> None:
    program = (
        "import sys; from laurel.cli.main import main\n"
        "sys.argv = ['laurel', 'rm', 'data.train_data_path=/nowhere', 'cluster.device=cuda']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=hidden, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "error: cluster.device=cuda: this machine has no GPU, or CUDA_VISI" in done.stderr
