"""Configurations of TRL, OpenRLHF, verl and NeMo RL in ours: nothing lost, nothing else meant."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from imported_sources import (
    OPENRLHF_PPO_OLD,
    OPENRLHF_RM,
    SOURCES,
    TRL_GRPO,
    TRL_REWARD_JSON,
    VERL,
    imported,
)
from laurel.config import nemo_rl
from laurel.config.importing.commands import _filled
from laurel.config.importing.engine import Imported
from laurel.config.importing.optimizing import FIRST_FACTOR
from laurel.config.importing.sources import TABLES, TITLES, ImportRequest, import_configuration
from laurel.config.importing.tables import Expression, Names
from laurel.config.importing.text import to_text
from laurel.config.load import load_config
from laurel.config.schema_info import kinds_of, sections_of, step_into
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import Section
from laurel.errors import ConfigError

EVERY_TABLE = [(system, run) for system, runs in TABLES.items() for run in runs]
SCHEDULERS = "torch.optim.lr_scheduler."


def said_by(directory: Path, name: str) -> Imported:
    text, file, said = SOURCES[name]
    return imported(directory, text, file, **said).imported


def fates(found: Imported) -> dict[str, str]:
    return {entry.key: entry.status for entry in found.entries}


# ------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(("system", "run"), EVERY_TABLE)
def test_every_target_is_a_key_of_ours_and_every_key_has_one_rule(system: Any, run: Any) -> None:
    table = TABLES[system][run]
    for rule in table.rules:
        for to in rule.to:
            step = None
            kinds: Any = (SCHEMAS[run],)
            for part in to.format(run=run).split("."):
                step = step_into(kinds, part)
                assert step.standing in ("field", "name"), f"{to}: {part} is {step.standing}"
                kinds = step.kinds
    keys = list(table.known())
    assert sorted(keys) == sorted(set(keys))
    known = set(keys)
    names = table.other_names or {}
    # A name may be of a key that only another run of the system has.
    for name in names.values():
        assert any(one.rule_of(name) for one in TABLES[system].values()), name
    assert not set(names) & known
    assert set(table.defaults) <= known, sorted(set(table.defaults) - known)
    assert table.own_keys <= known


def test_trl_knows_every_argument_that_it_inherits_and_has_its_default() -> None:
    from transformers import TrainingArguments

    overridden = {"learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "output_dir"}
    for run, table in TABLES["trl"].items():
        names = table.other_names or {}
        for field in dataclasses.fields(TrainingArguments):
            key = names.get(field.name, field.name)
            assert table.rule_of(key) is not None, f"{run}: {field.name}"
            if key in table.defaults and key not in overridden | {"lr_scheduler_type"}:
                ours, theirs = table.defaults[key], field.default
                assert ours == getattr(theirs, "value", theirs), f"{run}: {field.name}"


def test_nemo_rl_has_a_reason_for_every_key_that_is_ignored() -> None:
    def walk(section: type[Section], seen: tuple[type[Section], ...] = ()) -> None:
        for key in section.foreign_keys:
            assert nemo_rl.reason(key) is not None, f"{section.__name__}: {key}"
        for field in section.model_fields.values():
            for inner in sections_of(kinds_of(field.annotation)):
                if inner not in seen:
                    walk(inner, (*seen, inner))

    for schema in SCHEMAS.values():
        walk(schema)


# -------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_is_the_configuration_that_was_checked(tmp_path: Path, name: str) -> None:
    found = said_by(tmp_path, name)
    text = to_text(found, source="source", output="ours.yaml")
    assert text.startswith(f"# From {found.system} (source)")
    (tmp_path / "ours.yaml").write_text(text, encoding="utf-8")
    loaded = load_config(SCHEMAS[found.run], tmp_path / "ours.yaml")
    assert loaded.config == found.config
    assert loaded.warnings == ()
    for entry in found.with_status("not carried"):
        assert entry.key in text.split("\n\n")[0], f"{entry.key} is not told in the file"


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "nemo-rl"])
def test_every_key_is_in_one_list(tmp_path: Path, name: str) -> None:
    found = said_by(tmp_path, name)
    keys = [entry.key for entry in found.entries]
    assert len(keys) == len(set(keys))
    table = TABLES[next(s for s in TITLES if TITLES[s] == found.system)][found.run]
    for entry in found.entries:
        assert entry.status in ("carried", "default", "not needed", "not carried")
        assert entry.is_said == (entry.status != "default") or entry.status == "not carried"
        assert entry.status != "carried" or entry.to
        assert entry.status in ("carried", "default") or entry.why
        assert entry.why != "it has no effect beside the other keys of this file"
        assert table.rule_of(entry.key) is not None


def test_no_secret_is_shown_or_written(tmp_path: Path) -> None:
    for name in ("trl-grpo", "openrlhf-rm"):
        found = said_by(tmp_path, name)
        assert "not_to_be_seen" not in to_text(found, source="s", output="o")
        secret = next(e for e in found.entries if e.key in ("hub_token", "logger.wandb.key"))
        assert secret.status != "carried"


# ------------------------------------------------------------------------------------- TRL, by hand


def test_trl_grpo(tmp_path: Path) -> None:
    found = said_by(tmp_path, "trl-grpo")
    config: Any = found.config
    assert found.run == "grpo"
    # 8 x 4 processes x 4 accumulation = 128 completions, 8 for each of 16 prompts
    assert config.policy.train_global_batch_size == 128
    assert config.grpo.num_prompts_per_step == 16
    assert config.grpo.num_generations_per_prompt == 8
    assert config.policy.max_total_sequence_length == 512 + 1024
    assert config.policy.generation.max_new_tokens == 1024
    assert config.data.max_input_seq_length == 512
    assert config.loss_fn.reference_policy_kl_penalty == 0.04
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.1, 0.28)
    assert (config.loss_fn.normalizer, config.loss_fn.token_level_loss) == ("max_length", False)
    assert config.grpo.adv_estimator.scale == "none"
    assert config.grpo.adv_estimator.std_eps == 1e-4
    assert config.grpo.leaves_one_out is False
    assert config.grpo.max_num_steps == 200
    assert config.policy.optimizer.kwargs == {
        "lr": 2e-6,
        "weight_decay": 0.0,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    }
    warm_up, decay, milestones = config.policy.scheduler
    assert warm_up.kwargs == {"start_factor": FIRST_FACTOR, "total_iters": 20}  # 0.1 x 200
    assert decay.name == SCHEDULERS + "CosineAnnealingLR"
    assert decay.kwargs == {"T_max": 180, "eta_min": 0.0}
    assert milestones.milestones == [20]
    assert config.default_environment == "math"
    assert config.policy.generation.backend == "vllm"
    assert (config.logger.wandb_enabled, config.logger.tensorboard_enabled) == (True, False)
    told = fates(found)
    assert told["remove_unused_columns"] == told["attn_implementation"] == "not needed"
    assert told["report_to"] == "not carried"  # trackio
    # vLLM's mode is left out, its default cannot be had, and that is told, too
    assert told["vllm_importance_sampling_mode"] == "not carried"


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        (
            "",
            {
                "beta": 0.0,
                "low": 0.2,
                "high": 0.2,
                "tokens": "tokens",
                "G": 8,
                "lr": 1e-6,
                "epochs": 3,
                "temperature": 1.0,
            },
        ),
        ("loss_type: bnpo", {"tokens": "tokens"}),
        ("loss_type: grpo", {"tokens": "sequences"}),
        ("loss_type: grpo\nimportance_sampling_level: sequence", {"gspo": True, "level": False}),
        ("importance_sampling_level: sequence", {"gspo": True, "level": False, "tokens": "tokens"}),
        ("loss_type: cispo\nepsilon_high: 5.0", {"kind": "cispo", "low": 1.0, "high": 4.0}),
        ("delta: 4.0", {"c": 4.0}),
        ("delta: 1.1", {"c": None}),  # below 1 + epsilon it is another loss
        ("scale_rewards: batch", {"scale": "batch"}),
        ("scale_rewards: true", {"scale": "group"}),
        ("top_k: 20", {"top_k": 20}),
        (
            "steps_per_generation: 16\ngradient_accumulation_steps: 4\nmax_steps: 100",
            {"batch": 32, "prompts": 16, "steps": 25},
        ),  # 128 completions a step, 4 updates each
        ("num_iterations: 2\nmax_steps: 100", {"iterations": 2, "steps": 50}),
        ("gradient_accumulation_steps: 4\ngeneration_batch_size: 8", {"batch": 32, "prompts": 4}),
        (
            "use_peft: true\nlora_r: 16\nlora_alpha: 32\nuse_rslora: true",
            {"alpha": 128.0, "modules": ["q_proj", "v_proj"]},
        ),
        (
            "use_vllm: true\nvllm_importance_sampling_mode: token_truncate",
            {"tis": "tis", "cap": 3.0},
        ),
        ("use_vllm: true\nvllm_importance_sampling_mode: token_mask", {"tis": "icepop"}),
        ("use_vllm: true\nvllm_importance_sampling_cap: 2.0", {"tis": "seq-tis", "cap": 2.0}),
        ("fp16: false\nbf16: false", {"precision": "float32"}),
        ("eval_strategy: steps\nlogging_steps: 7", {"val": 7}),
        ("warmup_steps: 5\nlr_scheduler_type: constant_with_warmup", {"warm_up": 5}),
    ],
)
def test_trl_grpo_one_key_at_a_time(tmp_path: Path, lines: str, values: dict[str, Any]) -> None:
    text = f"model_name_or_path: a\ndataset_name: b\nreward_funcs: accuracy_reward\n{lines}\n"
    config: Any = imported(tmp_path, text, run="grpo").imported.config
    loss, grpo, policy = config.loss_fn, config.grpo, config.policy
    lora = policy.dtensor_cfg.lora_cfg
    found = {
        "beta": loss.reference_policy_kl_penalty,
        "low": loss.ratio_clip_min,
        "high": loss.ratio_clip_max,
        "tokens": loss.normalizer,
        "c": loss.ratio_clip_c,
        "gspo": loss.sequence_level_importance_ratios,
        "level": loss.token_level_loss,
        "kind": loss.kind,
        "G": grpo.num_generations_per_prompt,
        "scale": grpo.adv_estimator.scale,
        "lr": policy.optimizer.kwargs["lr"],
        "epochs": grpo.max_num_epochs,
        "temperature": policy.generation.temperature,
        "top_k": policy.generation.top_k,
        "batch": policy.train_global_batch_size,
        "prompts": grpo.num_prompts_per_step,
        "steps": grpo.max_num_steps,
        "iterations": grpo.num_iterations,
        "alpha": lora.alpha,
        "modules": lora.target_modules,
        "precision": policy.precision,
        "val": grpo.val_period,
        "tis": loss.truncated_importance_sampling_type,
        "cap": loss.truncated_importance_sampling_ratio,
        "warm_up": isinstance(policy.scheduler, list) and policy.scheduler[-1].milestones[0],
    }
    assert {key: found[key] for key in values} == values


def test_trl_rewards_that_are_several_are_a_composite(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: a\ndataset_name: b\nreward_model_name_or_path: my/rm\n"
        "reward_funcs: [accuracy_reward, get_soft_overlong_punishment, mine.score]\n"
        "reward_weights: [0.5, 2.0, 1.0, 1.0]\n"
    )
    found = imported(tmp_path, text).imported
    config: Any = found.config
    parts = config.env.composite["imported"].parts
    assert [(part.env, part.weight) for part in parts] == [("reward_model", 0.5), ("math", 2.0)]
    assert config.data.env_name == "imported"
    assert config.env.reward_model.model_name == "my/rm"
    assert config.grpo.reward_shaping.max_response_length == 1280
    assert fates(found)["reward_funcs"] == "not carried"
    both = imported(
        tmp_path,
        text + "multi_objective_aggregation: normalize_then_sum\n".replace("reward_funcs", "x"),
    ).imported
    estimator = both.config.grpo.adv_estimator  # type: ignore[attr-defined]
    # in alphabetical order: math, reward_model
    assert (estimator.name, estimator.reward_weights) == ("gdpo", [2.0, 0.5])


def test_trl_reward_model(tmp_path: Path) -> None:
    found = said_by(tmp_path, "trl-reward")
    config: Any = found.config
    assert found.run == "rm"
    assert config.rm.loss.center_rewards_coefficient == 0.01
    assert (config.policy.max_total_sequence_length, config.data.overlong) == (2048, "drop")
    assert config.policy.optimizer.kwargs["lr"] == 1e-4
    # linear to 0 over the 100 steps that were told
    assert config.policy.scheduler.kwargs == {
        "start_factor": 1.0,
        "end_factor": 0.0,
        "total_iters": 100,
    }
    told = fates(found)
    # what the arguments alone do not say has to be said
    assert told["model_name_or_path"] == told["dataset_name"] == "not carried"
    assert told["eval_strategy"] == "not carried"  # epochs


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant_with_warmup", {}),
        ("constant", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
@pytest.mark.parametrize("warm_up", [0, 3])
def test_the_learning_rate_of_every_step_is_that_of_the_trainer(
    tmp_path: Path, name: str, kwargs: dict[str, float], warm_up: int
) -> None:
    import torch
    from transformers import get_scheduler

    from laurel.training.optimizers import build_scheduler

    steps, rate = 10, 1e-3
    text = (
        f"model_name_or_path: a\ndataset_name: b\nmax_steps: {steps}\nlearning_rate: {rate}\n"
        f"lr_scheduler_type: {name}\nwarmup_steps: {warm_up}\n"
        f"lr_scheduler_kwargs: {kwargs}\n"
    )
    found = imported(tmp_path, text, run="rm").imported
    config: Any = found.config

    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
        scheduler = make(optimizer)
        told = []
        for _ in range(steps):
            told.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return told

    ours = rates(lambda optimizer: build_scheduler(config.policy.scheduler, optimizer))
    theirs = rates(
        lambda optimizer: get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warm_up,
            num_training_steps=steps,
            scheduler_specific_kwargs=kwargs,
        )
    )
    assert ours == pytest.approx(theirs, rel=1e-6, abs=2e-11)


def test_a_schedule_without_a_length_is_not_carried(tmp_path: Path) -> None:
    found = imported(tmp_path, TRL_REWARD_JSON, "a.json").imported
    assert fates(found)["lr_scheduler_type"] == "not carried"
    assert found.config.policy.scheduler is None  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ OpenRLHF, by hand


def test_openrlhf_reward_model(tmp_path: Path) -> None:
    found = said_by(tmp_path, "openrlhf-rm")
    config: Any = found.config
    assert found.run == "rm"
    assert config.policy.train_global_batch_size == 256
    assert config.policy.optimizer.kwargs == {
        "lr": 9e-6,
        "weight_decay": 0.0,
        "betas": [0.9, 0.98],
        "eps": 1e-8,
    }
    warm_up, decay, milestones = config.policy.scheduler
    # 0.03 x 400 = 12 steps of warm-up; the cosine ends at a tenth of the rate
    assert (warm_up.kwargs["total_iters"], milestones.milestones) == (12, [12])
    assert decay.kwargs == {"T_max": 388, "eta_min": pytest.approx(9e-7)}
    assert config.data.truncation_side == "right"
    assert config.policy.tokenizer.chat_template == "default"
    assert config.logger.wandb_enabled is True
    assert config.rm.val_period == 0
    assert fates(found)["logger.wandb.key"] == "not carried"


def test_openrlhf_ppo_with_the_names_of_before(tmp_path: Path) -> None:
    found = said_by(tmp_path, "openrlhf-ppo")
    config: Any = found.config
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (128, 8)
    assert config.policy.train_global_batch_size == 512
    assert config.updates_per_rollout == 2  # 128 x 8 / 512
    assert config.policy.max_total_sequence_length == 1024 + 2048
    assert config.env.reward_model.urls == ["http://10.0.0.1:5000", "http://10.0.0.2:5000"]
    assert config.env.reward_model.url_protocol == "openrlhf"
    assert config.env.reward_model.model_name == "my-org/sft-8b"
    assert config.loss_fn.reference_policy_kl_type == "k3"
    assert config.loss_fn.use_kl_in_reward is False
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.2, 0.27)
    assert (config.grpo.advantage_clip_low, config.grpo.advantage_clip_high) == (-10, 10)
    assert config.grpo.adv_estimator.std_eps == 1e-9
    assert config.cluster.gpus_per_node == 8


@pytest.mark.parametrize(
    ("flags", "name", "scale", "leaves_one_out"),
    [
        ("--algo.advantage.estimator dr_grpo", "grpo", "none", False),
        ("--algo.advantage.estimator rloo", "grpo", "none", True),
        ("--algo.advantage.estimator reinforce_baseline", "reinforce_plus_plus", None, False),
        (
            "--algo.advantage.estimator reinforce_baseline --algo.advantage.no_std_norm",
            "grpo",
            "none",
            False,
        ),
        ("", "grpo", "group", False),  # gae, which is told not to be carried
    ],
)
def test_openrlhf_estimators(
    tmp_path: Path, flags: str, name: str, scale: str | None, leaves_one_out: bool
) -> None:
    command = (
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a "
        "--reward.model_name_or_path b --data.prompt_dataset c "
        f"--rollout.n_samples_per_prompt 4 {flags}"
    )
    found = imported(tmp_path, command, "run.sh").imported
    grpo: Any = found.config.grpo  # type: ignore[attr-defined]
    assert (grpo.adv_estimator.name, grpo.adv_estimator.scale) == (name, scale)
    assert grpo.leaves_one_out is leaves_one_out
    if not flags:
        assert fates(found)["algo.advantage.estimator"] == "not carried"
    # without use_loss, the divergence is in the reward, k1
    assert found.config.loss_fn.use_kl_in_reward  # type: ignore[attr-defined]
    assert found.config.loss_fn.reference_policy_kl_type == "k1"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "fate"),
    [
        ("", "not carried"),
        ("--algo.advantage.estimator group_norm", "not carried"),
        ("--algo.advantage.estimator reinforce --algo.advantage.no_std_norm", "not carried"),
        ("--algo.advantage.estimator reinforce", "carried"),
    ],
)
def test_openrlhf_with_lone_completions_compares_over_the_batch(
    tmp_path: Path, flags: str, fate: str
) -> None:
    command = (
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a "
        "--reward.model_name_or_path b --data.prompt_dataset c "
        f"--rollout.n_samples_per_prompt 1 {flags}"
    )
    found = imported(tmp_path, command, "run.sh").imported
    grpo: Any = found.config.grpo  # type: ignore[attr-defined]
    assert not grpo.compares_within_groups
    assert fates(found)["algo.advantage.estimator"] == fate


# ---------------------------------------------------------------------------------- verl, by hand


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("algorithm.adv_estimator=gae", "Laurel learns without a critic, and actor_rollout"),
        ("", "Laurel learns without a critic, and actor_rollout"),
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1 makes no group"),
        (
            "algorithm.adv_estimator=gae actor_rollout_ref.rollout.n=4",
            "Laurel learns without a critic: grpo is written instead",
        ),
    ],
)
def test_verl_without_groups_or_with_a_critic_says_what_is_chosen(
    tmp_path: Path, flags: str, said: str
) -> None:
    command = (
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet "
        "data.train_batch_size=64 actor_rollout_ref.model.path=a "
        f"actor_rollout_ref.actor.ppo_mini_batch_size=64 {flags}"
    )
    found = imported(tmp_path, command, "run.sh").imported
    grpo: Any = found.config.grpo  # type: ignore[attr-defined]
    (entry,) = [one for one in found.entries if one.key == "algorithm.adv_estimator"]
    assert entry.status == "not carried"
    assert entry.why.startswith(said)
    assert grpo.compares_within_groups == ("n=4" in flags)


def test_verl(tmp_path: Path) -> None:
    found = said_by(tmp_path, "verl")
    config: Any = found.config
    # mini-batches count prompts there: 256 x 5 completions
    assert config.policy.train_global_batch_size == 1280
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (1024, 5)
    assert config.policy.model_name == "Qwen/Qwen2-7B-Instruct"
    assert config.policy.max_total_sequence_length == 512 + 1024
    assert config.loss_fn.ratio_clip_c == 3.0
    assert config.loss_fn.reference_policy_kl_penalty == 0.001
    assert config.loss_fn.reference_policy_kl_type == "k3"
    assert config.env.reward_model.function.path == "rewards/mine.py:compute_score"
    assert config.default_environment == "reward_model"
    assert [one.data_path for one in config.data.validation] == [
        "data/gsm8k/test.parquet",
        "data/math/test.parquet",
    ]
    assert config.grpo.max_num_epochs == 15
    told = fates(found)
    assert told["trainer.experiment_name"] == "not carried"  # of a variable that nobody set
    assert told["$@"] == "not carried"


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", {"n": "max_length"}),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            {"n": "sequences", "gspo": True, "c": None},
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gpg", {"kind": "reinforce", "c": None}),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", {"high": 0.28, "low": 0.2}),
        ("actor_rollout_ref.actor.clip_ratio=0.5", {"high": 0.2, "low": 0.2}),  # no effect in verl
        ("algorithm.norm_adv_by_std_in_grpo=False", {"scale": "none"}),
        ("algorithm.filter_groups.enable=True", {"dynamic": True, "batches": 1_000_000}),
        ("algorithm.rollout_correction.rollout_is=token", {"tis": "tis", "cap": 2.0}),
        ("algorithm.use_kl_in_reward=True", {"in_reward": True, "kl": "k1", "beta": 0.001}),
        (
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True "
            "actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
            {"val": 0.6},
        ),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0.6", {"val": 0}),  # greedy all the same
        (
            "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=100 "
            "reward_model.overlong_buffer.penalty_factor=0.5",
            {"buffer": 100, "penalty": 0.5},
        ),
    ],
)
def test_verl_one_key_at_a_time(tmp_path: Path, override: str, values: dict[str, Any]) -> None:
    command = (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.model.path=a data.train_files=b actor_rollout_ref.rollout.n=4 "
        f"{override}"
    )
    config: Any = imported(tmp_path, command, "run.sh").imported.config
    loss, grpo = config.loss_fn, config.grpo
    found = {
        "n": loss.normalizer,
        "gspo": loss.sequence_level_importance_ratios,
        "c": loss.ratio_clip_c,
        "kind": loss.kind,
        "low": loss.ratio_clip_min,
        "high": loss.ratio_clip_max,
        "scale": grpo.adv_estimator.scale,
        "dynamic": grpo.use_dynamic_sampling,
        "batches": grpo.dynamic_sampling_max_gen_batches,
        "tis": loss.truncated_importance_sampling_type,
        "cap": loss.truncated_importance_sampling_ratio,
        "in_reward": loss.use_kl_in_reward,
        "kl": loss.reference_policy_kl_type,
        "beta": loss.reference_policy_kl_penalty,
        "val": config.policy.generation.val_temperature,
        "buffer": grpo.reward_shaping.overlong_buffer_length,
        "penalty": grpo.reward_shaping.overlong_buffer_penalty,
    }
    assert {key: found[key] for key in values} == values


def test_verl_fine_tuning(tmp_path: Path) -> None:
    found = said_by(tmp_path, "verl-sft")
    config: Any = found.config
    assert found.run == "sft"
    assert config.policy.model_name == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.policy.train_global_batch_size, config.sft.val_global_batch_size) == (64, 64)
    assert config.policy.max_total_sequence_length == 2048
    assert config.policy.sequence_packing.train_mb_tokens == 8192  # dynamic batches by default
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}
    assert (config.policy.dtensor_cfg.lora_cfg.dim, config.policy.dtensor_cfg.lora_cfg.alpha) == (
        16,
        16.0,
    )
    assert config.policy.optimizer.kwargs == {
        "lr": 1e-5,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    }
    warmup, decay, milestones = config.policy.scheduler
    assert warmup.kwargs == {"start_factor": FIRST_FACTOR, "total_iters": 10}
    assert decay.kwargs == {"T_max": 90, "eta_min": 0.0}
    assert milestones.milestones == [10]
    assert config.policy.max_grad_norm == 0.5
    assert (config.sft.max_num_epochs, config.sft.max_num_steps) == (2, 100)
    assert config.data.chat_key == "messages"
    assert config.data.split_validation_size == 0
    assert not config.sft.only_unmask_final
    assert not config.sft.val_at_start
    assert config.sft.val_at_end  # after the last step, whatever the period
    assert config.cluster.gpus_per_node == 4  # of torchrun: the file's own is not read there
    told = fates(found)
    assert told["trainer.test_freq"] == "not carried"  # a word that has no number here
    assert told["trainer.default_local_dir"] == "not carried"  # an argument of the script


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("", {"micro": 1, "tokens": 8192, "lr": 1e-3, "norm": 1.0, "batch": 256, "epochs": 4}),
        ("data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", {"micro": 2}),
        ("optim.clip_grad=0", {"norm": None}),
        ("data.messages_key=turns", {"chat": "turns"}),
        ("data.apply_chat_template_kwargs='{a: 1}'", {"template": {"a": 1}}),
        ("trainer.save_freq=5 trainer.max_ckpt_to_keep=2", {"save": 5, "keep": 2}),
        ("engine.param_offload=True engine.optimizer_offload=True", {"offload": True}),
        ("optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=59", {"warmup": 5}),
        (
            "optim.lr_warmup_steps=0 optim.lr_warmup_steps_ratio=0.1 "
            "trainer.total_training_steps=50",
            {"warmup": 5},
        ),
    ],
)
def test_verl_fine_tuning_one_key_at_a_time(
    tmp_path: Path, override: str, values: dict[str, Any]
) -> None:
    command = f"python -m verl.trainer.sft_trainer_ray model.path=a data.train_files=b {override}"
    found = imported(tmp_path, command, "run.sh").imported
    config: Any = found.config
    scheduler = config.policy.scheduler
    there = {
        "micro": config.policy.train_micro_batch_size,
        "tokens": config.policy.sequence_packing.train_mb_tokens,
        "lr": config.policy.optimizer.kwargs["lr"],
        "norm": config.policy.max_grad_norm,
        "batch": config.policy.train_global_batch_size,
        "epochs": config.sft.max_num_epochs,
        "chat": config.data.chat_key,
        "template": config.policy.tokenizer.chat_template_kwargs,
        "save": config.checkpointing.save_period,
        "keep": config.checkpointing.keep_top_k,
        "offload": config.policy.dtensor_cfg.cpu_offload,
        "warmup": scheduler[0].kwargs["total_iters"] if scheduler else None,
    }
    assert {key: there[key] for key in values} == values
    assert not [e.key for e in found.entries if e.status == "not carried"]


@pytest.mark.parametrize(
    "override",
    [
        "engine=megatron",
        "engine.strategy=veomni",
        "data.pad_mode=right data.truncation=left",
        "data.val_max_samples=9",
        "optim.optimizer=Adam",
        "model.override_config.a=1",
        "data.custom_cls.path=mine.py",
        "trainer.resume_mode=resume_path",
    ],
)
def test_what_verl_fine_tuning_has_and_laurel_does_not_is_told(
    tmp_path: Path, override: str
) -> None:
    command = f"python -m verl.trainer.sft_trainer model.path=a data.train_files=b {override}"
    told = fates(imported(tmp_path, command, "run.sh").imported)
    assert "not carried" in told.values()


def test_a_verl_yaml_is_told_to_be_of_its_run(tmp_path: Path) -> None:
    tuning = "model: {path: a}\ndata: {train_files: b, max_length: 64}\noptim: {lr: 1.0e-5}\n"
    assert imported(tmp_path, tuning, system="verl").imported.run == "sft"
    policy = "algorithm: {adv_estimator: grpo}\ndata: {train_files: b}\n"
    assert imported(tmp_path, policy).imported.run == "grpo"


def test_what_runs_verls_reward_model_is_carried(tmp_path: Path) -> None:
    said = {
        "reward_model.enable": "True",
        "reward_model.model.path": "my/rm",
        "reward_model.model.trust_remote_code": "True",
        "reward_model.num_workers": 4,
        "reward_model.use_reward_loop": "False",
        "reward_model.enable_resource_pool": "True",
        "reward_model.n_gpus_per_node": 2,
        "reward_model.nnodes": 1,
        "reward_model.rollout.tensor_model_parallel_size": 2,
        "reward_model.rollout.dtype": "fp16",
    }
    command = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=a " + " ".join(
        f"{key}={value}" for key, value in said.items()
    )
    found = imported(tmp_path, command, "run.sh").imported
    judge = found.config.env.reward_model  # type: ignore[attr-defined]
    assert (judge.model_name, judge.trust_remote_code, judge.precision) == (
        "my/rm",
        True,
        "float16",
    )
    assert (judge.resources.gpus_per_node, judge.resources.num_nodes) == (2, 1)
    assert judge.dtensor_cfg.tensor_parallel_size == 2
    assert (judge.num_workers, judge.use_reward_loop) == (4, False)
    told = fates(found)
    names = TABLES["verl"]["grpo"].other_names or {}
    assert {told[names[key]] for key in said} == {"carried"}


def test_a_value_that_a_row_cannot_read_is_told_with_its_key(tmp_path: Path) -> None:
    command = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=a data.train_files=5"
    with pytest.raises(ConfigError, match=r"verl's data.train_files=5: it is not of the kind"):
        imported(tmp_path, command, "run.sh")


@pytest.mark.parametrize("wrong", ["whole(data.nothing)", "unheard + 1", "open('x')", "1 +"])
def test_a_row_that_names_what_no_row_has_is_refused(wrong: str) -> None:
    names = Names(keys=frozenset({"data.known"}))
    assert Expression("whole(data.known) * 2", names, {}).keys == ("data.known",)
    with pytest.raises((ValueError, SyntaxError)):
        Expression(wrong, names, {})


def test_verl_yaml_with_references(tmp_path: Path) -> None:
    text = """
algorithm: {adv_estimator: grpo}
data: {train_files: a.parquet, max_response_length: 64}
actor_rollout_ref:
  model: {path: my/model}
  actor: {ppo_mini_batch_size: 8}
  rollout: {name: vllm, n: 2, prompt_length: "${oc.select:data.max_prompt_length,512}"}
trainer: {project_name: p, experiment_name: e,
  default_local_dir: "ckpt/${trainer.project_name}/${trainer.experiment_name}",
  logger: "${nowhere.to_be.found}"}
"""
    found = imported(tmp_path, text)
    assert found.system == "verl"
    config: Any = found.imported.config
    assert config.checkpointing.checkpoint_dir == "ckpt/p/e"
    assert fates(found.imported)["trainer.logger"] == "not carried"


def test_nemo_rl_loads_unchanged_and_says_what_it_ignores(tmp_path: Path) -> None:
    found = said_by(tmp_path, "nemo-rl")
    told = {entry.key: (entry.status, entry.why) for entry in found.entries}
    assert told["grpo.async_grpo.max_trajectory_age_steps"] == ("carried", "translated")
    assert found.values["grpo.max_staleness"] == 2
    assert told["grpo.async_grpo.in_flight_weight_updates"][0] == "not carried"
    assert told["policy.megatron_cfg"] == ("not needed", "of other backends")
    assert told["grpo.val_start_at"][0] == "not needed"
    assert told["policy.tokenizer.name"][0] == "carried"
    assert found.values["policy.tokenizer.name"] == "${policy.model_name}"


# ------------------------------------------------------------------------ unknown, wrong, elsewhere


def test_an_unknown_key_is_not_carried_and_the_one_meant_is_named(tmp_path: Path) -> None:
    found = imported(tmp_path, TRL_GRPO + "num_generationz: 4\nquite_different: 1\n").imported
    told = {entry.key: entry for entry in found.with_status("not carried")}
    assert "not known" in told["num_generationz"].why
    assert "did you mean num_generations?" in told["num_generationz"].why
    assert "not known" in told["quite_different"].why


@pytest.mark.parametrize(
    ("text", "name", "said", "message"),
    [
        (TRL_GRPO + "beta: 0.1\n", "a.yaml", {}, r"the key 'beta' is given twice"),
        (
            TRL_GRPO + "generation_batch_size: 8\nsteps_per_generation: 2\n",
            "a.yaml",
            {},
            r"TRL's generation_batch_size=8: steps_per_generation is set, too",
        ),
        (
            TRL_GRPO + "epsilon_high: high\n".replace("epsilon_high", "delta"),
            "a.yaml",
            {},
            r"TRL's delta=high: it must be a number",
        ),
        (
            TRL_GRPO + "temperature: -1\n",
            "a.yaml",
            {},
            r"TRL's temperature: policy.generation.temperature: must be a number of at least 0",
        ),
        (TRL_GRPO, "a.yaml", {"devices": 3, "system": "trl"}, None),
        (
            TRL_GRPO.replace("num_generations: 8", "num_generations: 7"),
            "a.yaml",
            {},
            r"TRL's num_generations=7: 32 completions are sampled at a time",
        ),
        (
            TRL_GRPO + "max_seq_length: 5\nmax_length: 6\n",
            "a.yaml",
            {"run": "rm"},
            r"max_length is another name of max_seq_length, and they differ",
        ),
        (
            OPENRLHF_RM.replace("--ds.zero_stage 3", "--adam.lr 1e-5"),
            "a.sh",
            {},
            r"--adam.lr is given twice, as 1e-05 and 9e-06",
        ),
        (
            OPENRLHF_PPO_OLD.replace("--train_batch_size 512", "--train_batch_size 500"),
            "a.sh",
            {},
            r"OpenRLHF's train.batch_size=500: .* 128 x 8 = 1024 is no multiple",
        ),
        (
            VERL.replace("ppo_mini_batch_size=256", "ppo_mini_batch_size=2000"),
            "a.sh",
            {},
            r"verl's actor_rollout_ref.actor.ppo_mini_batch_size=2000: it is more than",
        ),
        ("a: [1", "a.yaml", {}, r"a\.yaml:1:\d+: not YAML"),
        ("{'a': 1}", "a.json", {}, r"a\.json:1: not JSON"),
        ("just words", "a.yaml", {}, r"neither a mapping of keys \(YAML, JSON\) nor a"),
        ("python train.py --lr 1e-5", "a.sh", {}, r"neither a mapping of keys|nor YAML"),
        ("python -m openrlhf.cli.train_dpo --lr 1", "a.sh", {}, r"another program of openrlhf"),
        (
            "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=a",
            "a.sh",
            {},
            r"fsdp_sft_trainer is another program of verl; .*verl.trainer.main_ppo\|sft_trainer",
        ),
        ("python -m openrlhf.cli.train_rm --data.dataset 'a", "a.sh", {}, r"not a command line"),
        ("colour: blue", "a.yaml", {}, r"none of its keys tells where it is from .*--from"),
        (TRL_GRPO, "a.yaml", {"system": "verl"}, r"is not of verl: .* of TRL; --from trl"),
        (VERL, "a.sh", {"system": "trl"}, r"is not of TRL: the program verl.trainer.main_ppo is"),
        (VERL, "a.sh", {"run": "rm"}, r"is laurel grpo, not rm; leave --for out"),
        (
            "algorithm: {adv_estimator: grpo}",
            "a.yaml",
            {"run": "rm", "system": "verl"},
            r"verl has no rm that is imported; --for grpo\|sft",
        ),
        (
            "learning_rate: 1.0e-5\nnum_train_epochs: 1",
            "a.yaml",
            {},
            r"which run is it for\? nothing in it tells; --for rm\|grpo\|sft",
        ),
        (
            "beta: 0.1\npacking: true\nlearning_rate: 1.0e-5",
            "a.yaml",
            {},
            r"it has keys of several: grpo \(beta\), sft \(packing\)",
        ),
        ("", "a.yaml", {}, r"neither a mapping"),
        (VERL, "a.sh", {"devices": 8}, r"--devices is for TRL, whose files do not say it; verl's"),
    ],
)
def test_what_cannot_be_used_is_told(
    tmp_path: Path, text: str, name: str, said: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert imported(tmp_path, text, name, **said).imported.run == "grpo"
        return
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, text, name, **said)


def test_files_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; - is stdin"):
        import_configuration(ImportRequest(path=tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match=r"is a directory"):
        import_configuration(ImportRequest(path=tmp_path))
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(ConfigError, match=r"is a pickle, which Laurel does not open"):
        import_configuration(ImportRequest(path=tmp_path / "training_args.bin"))


def test_the_launchers_own_file_is_not_dropped_in_silence(tmp_path: Path) -> None:
    line = "accelerate launch {} trl/scripts/reward.py --model_name_or_path m --dataset_name d"
    for said in ("--config_file zero3.yaml", "--config_file=zero3.yaml"):
        found = imported(tmp_path, line.format(said), "a.sh").imported
        told = {entry.key: entry for entry in found.with_status("not carried")}
        entry = told["accelerate launch --config_file"]
        assert "zero3.yaml" in str(entry)
        assert "not read" in entry.why


@pytest.mark.parametrize(
    ("script", "run"), [("reward_modeling", "reward"), ("sft", "sft"), ("grpo", "grpo")]
)
def test_an_example_of_trl_is_answered_with_the_command_for_it(
    tmp_path: Path, script: str, run: str
) -> None:
    line = f"python examples/scripts/{script}.py --model_name_or_path m"
    with pytest.raises(ConfigError, match=f"write `trl {run}` instead of it"):
        imported(tmp_path, line, "a.sh", system="trl")


# -------------------------------------------------------------- Python programs; sums in the shell


def test_sums_of_the_shell_are_calculated(tmp_path: Path) -> None:
    script = (
        "length=$((512 * 2))\n"
        "python -m openrlhf.cli.train_rm --actor.model_name_or_path m --data.dataset d "
        "--data.max_len $((length * 4)) --train.batch_size $(( (7 - 3) * 8 / 2 ))\n"
    )
    found = imported(tmp_path, script, "run.sh").imported
    config: Any = found.config
    assert config.policy.max_total_sequence_length == 4096
    assert config.policy.train_global_batch_size == 16


def test_a_sum_that_cannot_be_told_is_not_guessed() -> None:
    assert _filled("$((UNSET * 4))", {}) == "$((UNSET * 4))"
    assert _filled("$((4 / 0))", {}) == "$((4 / 0))"
    assert _filled("$((-7 / 2)) $((-7 % 2))", {}) == "-3 -1"
    assert _filled("$((-2 ** 2))", {}) == "$((-2 ** 2))"
    assert _filled("$((a * 3)) $(($a * 3))", {"a": "1+2"}) == "9 7"  # as bash has it
    assert _filled("$((2 ** 3000000000))", {}) == "$((2 ** 3000000000))"


@pytest.mark.parametrize(
    "lines",
    ["export PATH=/x:$PATH\nexport PATH=/y:${PATH}", "A=$B\nB=$C\nC=$A"],
)
def test_a_variable_that_leads_back_to_itself_ends(tmp_path: Path, lines: str) -> None:
    script = (
        f"{lines}\npython -m openrlhf.cli.train_rm --data.dataset d --ckpt.output_dir $PATH$C\n"
    )
    found = imported(tmp_path, script, "run.sh").imported
    assert fates(found)["ckpt.output_dir"] == "not carried"


def test_a_python_program_is_refused_with_what_to_give_and_never_executed(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    program = (
        "from datasets import load_dataset\nfrom trl import GRPOTrainer\n"
        f"open({str(trace)!r}, 'w')\n"
        "trainer = GRPOTrainer(model='m', train_dataset=load_dataset('d'))\ntrainer.train()\n"
    )
    with pytest.raises(ConfigError, match=r"Python program.*not executed.*`trl grpo --model_name"):
        imported(tmp_path, program, "train.py")
    assert not trace.exists()
