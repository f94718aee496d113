"""Configurations of TRL, OpenRLHF, verl and NeMo RL in ours: nothing lost, nothing else meant."""

from __future__ import annotations

import ast
import dataclasses
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from imported_sources import (
    OPENRLHF_PPO_OLD,
    OPENRLHF_RM,
    SOURCES,
    TRL_GRPO,
    TRL_REWARD_JSON,
    VERL,
    imported,
)
from laurel import plugins
from laurel.config.data import SHORT, SetsConfig
from laurel.config.load import load_config
from laurel.config.schema_info import kinds_of, sections_of, step_into
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import Section
from laurel.errors import ConfigError
from laurel.extensions.importing import nemo_rl_files
from laurel.extensions.importing.import_config import to_text
from laurel.extensions.importing.rules import Imported, shown
from laurel.extensions.importing.sources import ImportRequest, import_configuration
from laurel.extensions.importing.tables import TableImporter
from laurel.run.request import plan_to_run, request_of
from packages import installed

IMPORTERS = {name: plugins.find(plugins.Importer, name) for name in plugins.names("importers")}
TABLES = {name: one.tables for name, one in IMPORTERS.items() if isinstance(one, TableImporter)}


def said_by(directory: Path, name: str) -> Imported:
    text, file, said = SOURCES[name]
    return imported(directory, text, file, **said).imported


def fates(found: Imported) -> dict[str, str]:
    return {entry.key: entry.status for entry in found.entries}


def at(config: Any, dotted: str) -> Any:
    """Return what stands at a dotted path of attributes, keys and positions."""
    for part in dotted.split("."):
        if isinstance(config, SetsConfig) and part in config.short_keys():  # of the only set
            block, part = SHORT.get(part, ("train", part))
            config = config.train[0] if block == "train" else config.validation["default"]
        if isinstance(config, list):
            config = config[int(part)]
        else:
            config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def assert_values(found: Imported, values: dict[str, Any]) -> None:
    """Compare what stands at dotted paths; a mapping holds the paths below its own."""
    flat: dict[str, Any] = {}
    for path, value in values.items():
        below = value if isinstance(value, dict) else {"": value}
        flat |= {f"{path}.{key}".rstrip("."): one for key, one in below.items()}
    assert {path: at(found.config, path) for path in flat} == flat


@pytest.mark.parametrize(
    ("system", "run"), [(system, run) for system, runs in TABLES.items() for run in runs]
)
def test_names_and_own_keys_are_of_the_table(system: Any, run: Any) -> None:
    table = TABLES[system][run]
    # A name may be of a key that only another run of the system has.
    for name in table.other_names.values():
        assert any(one.knows(name) for one in TABLES[system].values()), name
    assert not table.other_names.keys() & table.known.keys()
    assert table.own_keys <= table.known.keys()


def words(module: str) -> set[tuple[str, ...]]:
    """Return the literal texts of a system's rules, with those that may stand before them."""
    source = (
        files("laurel.extensions.importing").joinpath(f"{module}.py").read_text(encoding="utf-8")
    )
    found: set[tuple[str, ...]] = set()
    for rule in ast.walk(ast.parse(source)):
        if not isinstance(rule, ast.FunctionDef):
            continue
        begins = [n.value for n in ast.walk(rule) if isinstance(n, ast.Constant)]
        begins = [one for one in begins if isinstance(one, str) and one.endswith((".", "_"))]
        for node in ast.walk(rule):
            if isinstance(node, ast.Constant):
                found.add((str(node.value),))
            elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
                found.add(tuple(f"{begin}{node.right.value}" for begin in begins))
    return found


@pytest.mark.parametrize("system", TABLES)
def test_rules_name_keys_of_the_table_and_of_ours(system: Any) -> None:
    tables = TABLES[system]
    roots = {name for schema in SCHEMAS.values() for name in schema.model_fields} | {"{run}"}
    roots |= {short for table in tables.values() for short in table.short}
    seen = 0
    for alternatives in words(system):
        dotted = [one for one in alternatives if re.fullmatch(r"(\{run\}|\w+)(\.\w+)*[^\W_]", one)]
        if any("." in one and one.partition(".")[0] in roots for one in dotted):
            seen += 1
            assert any(
                table.full(one) in table.known or is_ours(run, one)
                for one in dotted
                for run, table in tables.items()
            ), f"{alternatives} is a key neither of {system} nor of ours"
    assert seen > 60


def is_ours(run: Any, dotted: str) -> bool:
    kinds: Any = (SCHEMAS[run],)
    for part in dotted.replace("{run}", run).split("."):
        step = step_into(kinds, part)
        if step.standing not in ("field", "name"):
            return False
        kinds = step.kinds
    return True


def test_trl_knows_every_argument_that_it_inherits_and_has_its_default() -> None:
    from transformers import TrainingArguments

    overridden = {"learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "output_dir"}
    for run, table in TABLES["trl"].items():
        names = table.other_names
        for field in dataclasses.fields(TrainingArguments):
            key = names.get(field.name, field.name)
            assert table.knows(key), f"{run}: {field.name}"
            if key in table.defaults and key not in overridden | {"lr_scheduler_type"}:
                ours, theirs = table.defaults[key], field.default
                assert ours == getattr(theirs, "value", theirs), f"{run}: {field.name}"


def test_nemo_rl_has_a_reason_for_every_key_that_is_ignored() -> None:
    def walk(section: type[Section], seen: tuple[type[Section], ...] = ()) -> None:
        for key in nemo_rl_files.keys_beside(section):
            assert nemo_rl_files.reason(key) is not None, f"{section.__name__}: {key}"
        for field in section.model_fields.values():
            for inner in sections_of(kinds_of(field.annotation)):
                if inner not in seen:
                    walk(inner, (*seen, inner))

    for schema in SCHEMAS.values():
        walk(schema)


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
    (system,) = (name for name, one in IMPORTERS.items() if one.title == found.system)
    table = TABLES[system][found.run]
    for entry in found.entries:
        assert entry.status in ("carried", "default", "not needed", "not carried")
        assert entry.is_said == (entry.status != "default") or entry.status == "not carried"
        assert entry.status != "carried" or entry.to
        assert entry.status in ("carried", "default") or entry.why
        assert entry.why != "it has no effect beside the other keys of this file"
        assert table.knows(entry.key)


def test_no_secret_is_shown_or_written(tmp_path: Path) -> None:
    for name in ("trl-grpo", "openrlhf-rm"):
        found = said_by(tmp_path, name)
        assert "not_to_be_seen" not in to_text(found, source="s", output="o")
        secret = next(e for e in found.entries if e.key in ("hub_token", "logger.wandb.key"))
        assert secret.status != "carried"


BASES = {
    "trl": "model_name_or_path: a\ndataset_name: b\nreward_funcs: accuracy_reward\n{}\n",
    "verl": "python -m verl.trainer.main_ppo A.model.path=a data.train_files=b {}",
    "verl-sft": "python -m verl.trainer.sft_trainer_ray model.path=a data.train_files=b {}",
    "openrlhf": "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a "
    "--reward.model_name_or_path b --data.prompt_dataset c {}",
}


def imported_line(directory: Path, base: str, line: str) -> Imported:
    text = BASES[base].replace("{}", line)
    if base == "trl":
        return imported(directory, text, run="grpo").imported
    text = text.replace("A.", "actor_rollout_ref.").replace("ADV.", "--algo.advantage.")
    return imported(directory, text, "run.sh").imported


# By the name of a source: what it becomes, and the keys that are told not to be carried.
WHOLE = """
trl-grpo:
  # 8 x 4 processes x 4 accumulation = 128 completions, 8 for each of 16 prompts
  policy.train_global_batch_size: 128
  grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 8, max_num_steps: 200,
    leaves_one_out: false}
  grpo.adv_estimator: {scale: none, std_eps: 1.0e-6}  # which is not read
  policy.max_total_sequence_length: 1536
  policy.generation: {max_new_tokens: 1024, backend: vllm}
  data.max_input_seq_length: 512
  loss_fn: {reference_policy_kl_penalty: 0.04, ratio_clip_min: 0.1, ratio_clip_max: 0.28,
    normalizer: max_length, token_level_loss: false}
  policy.optimizer.kwargs: {lr: 2.0e-6, weight_decay: 0.0, betas: [0.9, 0.999], eps: 1.0e-8}
  policy.scheduler.0.kwargs: {start_factor: 1.0e-8, total_iters: 20}  # 0.1 x 200
  policy.scheduler.1: {name: torch.optim.lr_scheduler.CosineAnnealingLR}
  policy.scheduler.1.kwargs: {T_max: 180, eta_min: 0.0}
  policy.scheduler.2.milestones: [20]
  default_environment: math
  logger: {wandb_enabled: true, tensorboard_enabled: false}
  # trackio; vLLM's mode is left out, its default cannot be had, and that is told, too
  lost: [report_to, vllm_importance_sampling_mode]
trl-reward:
  rm.loss.center_rewards_coefficient: 0.01
  policy.max_total_sequence_length: 2048
  data.overlong: drop
  policy.optimizer.kwargs.lr: 1.0e-4
  # linear to 0 over the 100 steps that were told
  policy.scheduler.0.kwargs: {start_factor: 1.0, end_factor: 0.0, total_iters: 100}
  # what the arguments alone do not say has to be said; a period of epochs
  lost: [model_name_or_path, dataset_name, eval_strategy]
openrlhf-rm:
  policy: {train_global_batch_size: 256, tokenizer.chat_template: default}
  policy.optimizer.kwargs: {lr: 9.0e-6, weight_decay: 0.0, betas: [0.9, 0.98], eps: 1.0e-8}
  # 0.03 x 400 = 12 steps of warm-up; the cosine ends at a tenth of the rate
  policy.scheduler.0.kwargs.total_iters: 12
  policy.scheduler.1.kwargs: {T_max: 388, eta_min: 9.000000000000001e-7}
  policy.scheduler.2.milestones: [12]
  data.truncation_side: right
  logger.wandb_enabled: true
  rm.val_period: 0
  lost: [logger.wandb.key]
openrlhf-ppo:
  grpo: {num_prompts_per_step: 128, num_generations_per_prompt: 8, advantage_clip_low: -10,
    advantage_clip_high: 10, adv_estimator.std_eps: 1.0e-9}
  policy: {train_global_batch_size: 512, max_total_sequence_length: 3072}
  updates_per_rollout: 2  # 128 x 8 / 512
  env.reward_model: {urls: ["http://10.0.0.1:5000", "http://10.0.0.2:5000"],
    url_protocol: openrlhf, model_name: my-org/sft-8b}
  loss_fn: {reference_policy_kl_type: k3, use_kl_in_reward: false, ratio_clip_min: 0.2,
    ratio_clip_max: 0.27}
  cluster.gpus_per_node: 8
verl:
  # mini-batches count prompts there: 256 x 5 completions
  policy: {train_global_batch_size: 1280, model_name: Qwen/Qwen2-7B-Instruct,
    max_total_sequence_length: 1536}
  grpo: {num_prompts_per_step: 1024, num_generations_per_prompt: 5, max_num_epochs: 15}
  loss_fn: {ratio_clip_c: 3.0, reference_policy_kl_penalty: 0.001, reference_policy_kl_type: k3}
  env.reward_model.function.path: rewards/mine.py:compute_score
  default_environment: reward_model
  data.validation: {1.data_path: data/gsm8k/test.parquet, 2.data_path: data/math/test.parquet}
  lost: [trainer.experiment_name]  # of a variable that nobody set
verl-sft:
  policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct, train_global_batch_size: 64,
    max_total_sequence_length: 2048, max_grad_norm: 0.5}
  policy.sequence_packing.train_mb_tokens: 8192  # dynamic batches by default
  policy.tokenizer.chat_template_kwargs.enable_thinking: false
  policy.dtensor_cfg.lora_cfg: {dim: 16, alpha: 16.0}
  policy.optimizer.kwargs: {lr: 1.0e-5, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8}
  policy.scheduler.0.kwargs: {start_factor: 1.0e-8, total_iters: 10}
  policy.scheduler.1.kwargs: {T_max: 90, eta_min: 0.0}
  policy.scheduler.2.milestones: [10]
  # validated after the last step, whatever the period
  sft: {val_global_batch_size: 64, max_num_epochs: 2, max_num_steps: 100, only_unmask_final: false,
    val_at_start: false, val_at_end: true}
  data: {chat_key: messages, split_validation_size: 0}
  cluster.gpus_per_node: 4  # of torchrun: the file's own is not read there
  # a word that has no number here; an argument of the script
  lost: [trainer.test_freq, trainer.default_local_dir]
"""


@pytest.mark.parametrize(("name", "values"), yaml.safe_load(WHOLE).items())
def test_a_whole_file(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    found = said_by(tmp_path, name)
    told = fates(found)
    assert {told[key] for key in values.pop("lost", ())} <= {"not carried"}
    assert_values(found, values)
    if name == "trl-grpo":
        assert told["remove_unused_columns"] == told["attn_implementation"] == "not needed"


# For each line: the program, what it is given, and what that becomes.
KEY_BY_KEY = r"""
- [trl, "", {loss_fn: {reference_policy_kl_penalty: 0.0, ratio_clip_min: 0.2, ratio_clip_max: 0.2,
    normalizer: tokens}, grpo: {num_generations_per_prompt: 8, max_num_epochs: 3},
    policy: {optimizer.kwargs.lr: 1.0e-6, generation.temperature: 1.0}}]
- [trl, "loss_type: bnpo", {loss_fn.normalizer: tokens}]
- [trl, "loss_type: grpo", {loss_fn.normalizer: sequences}]
- [trl, "loss_type: grpo\nimportance_sampling_level: sequence",
    {loss_fn: {sequence_level_importance_ratios: true, token_level_loss: false}}]
- [trl, "importance_sampling_level: sequence",
    {loss_fn: {sequence_level_importance_ratios: true, token_level_loss: false,
    normalizer: tokens}}]
- [trl, "loss_type: cispo\nepsilon_high: 5.0",
    {loss_fn: {loss_type: cispo, ratio_clip_min: 1.0, ratio_clip_max: 4.0}}]
- [trl, "delta: 4.0", {loss_fn.ratio_clip_c: 4.0}]
- [trl, "delta: 1.1", {loss_fn.ratio_clip_c: null}]  # below 1 + epsilon it is another loss
- [trl, "scale_rewards: batch", {grpo.adv_estimator.scale: batch}]
- [trl, "scale_rewards: true", {grpo.adv_estimator.scale: group}]
- [trl, "top_k: 20", {policy.generation.top_k: 20}]
# 128 completions a step, 4 updates each
- [trl, "steps_per_generation: 16\ngradient_accumulation_steps: 4\nmax_steps: 100",
    {policy.train_global_batch_size: 32, grpo: {num_prompts_per_step: 16, max_num_steps: 25}}]
- [trl, "num_iterations: 2\nmax_steps: 100", {grpo: {num_iterations: 2, max_num_steps: 50}}]
- [trl, "gradient_accumulation_steps: 4\ngeneration_batch_size: 8",
    {policy.train_global_batch_size: 32, grpo.num_prompts_per_step: 4}]
- [trl, "use_peft: true\nlora_r: 16\nlora_alpha: 32\nuse_rslora: true",
    {policy.dtensor_cfg.lora_cfg: {alpha: 128.0, target_modules: [q_proj, v_proj]}}]
- [trl, "use_vllm: true\nvllm_importance_sampling_mode: token_truncate",
    {loss_fn: {truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 3.0}}]
- [trl, "use_vllm: true\nvllm_importance_sampling_mode: token_mask",
    {loss_fn.truncated_importance_sampling_type: icepop}]
- [trl, "use_vllm: true\nvllm_importance_sampling_cap: 2.0", {loss_fn: {
    truncated_importance_sampling_type: seq-tis, truncated_importance_sampling_ratio: 2.0}}]
- [trl, "fp16: false\nbf16: false", {policy.precision: float32}]
- [trl, "eval_strategy: steps\nlogging_steps: 7", {grpo.val_period: 7}]
- [trl, "warmup_steps: 5\nlr_scheduler_type: constant_with_warmup",
    {policy.scheduler.0.kwargs.total_iters: 5}]
- [verl, A.actor.loss_agg_mode=seq-mean-token-sum-norm, {loss_fn.normalizer: max_length}]
- [verl, A.actor.policy_loss.loss_mode=gspo, {loss_fn: {normalizer: sequences, ratio_clip_c: null,
    sequence_level_importance_ratios: true}}]
- [verl, A.actor.policy_loss.loss_mode=gpg, {loss_fn: {loss_type: reinforce, ratio_clip_c: null}}]
- [verl, A.actor.policy_loss.loss_mode=geo_mean A.actor.clip_ratio_high=0.3, {loss_fn: {
    loss_type: gmpo, normalizer: sequences, token_level_loss: false, ratio_clip_c: null,
    gmpo.clip_low: 0.2, gmpo.clip_high: 0.3}}]
- [verl, A.actor.policy_loss.loss_mode=sapo A.actor.tau_neg=1.2, {loss_fn: {loss_type: sapo,
    normalizer: sequences, ratio_clip_max: 0.2, sapo.tau_positive: 1.0, sapo.tau_negative: 1.2}}]
- [verl, A.actor.policy_loss.loss_mode=dppo_tv A.actor.clip_ratio_low=0.15, {loss_fn: {
    loss_type: dppo, normalizer: tokens, dppo.divergence: tv, dppo.low: 0.15, dppo.high: 0.2,
    dppo.max_ratio: 3.0}}]
- [verl, A.actor.policy_loss.loss_mode=dppo_kl, {loss_fn.dppo.divergence: kl}]
- [trl, "loss_type: sapo\nsapo_temperature_neg: 1.2\nepsilon: 0.1", {loss_fn: {loss_type: sapo,
    normalizer: sequences, ratio_clip_min: 0.2, sapo.tau_positive: 1.0, sapo.tau_negative: 1.2}}]
- [verl, A.actor.clip_ratio_high=0.28, {loss_fn: {ratio_clip_max: 0.28, ratio_clip_min: 0.2}}]
- [verl, A.actor.clip_ratio=0.5, {loss_fn: {ratio_clip_max: 0.2, ratio_clip_min: 0.2}}]
- [verl, algorithm.norm_adv_by_std_in_grpo=False, {grpo.adv_estimator.scale: none}]
- [verl, algorithm.filter_groups.enable=True,
    {grpo: {use_dynamic_sampling: true, dynamic_sampling_max_gen_batches: 1000000}}]
- [verl, algorithm.rollout_correction.rollout_is=token,
    {loss_fn: {truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 2.0}}]
- [verl, algorithm.use_kl_in_reward=True, {loss_fn: {use_kl_in_reward: true,
    reference_policy_kl_type: k1, reference_policy_kl_penalty: 0.001}}]
- [verl, A.rollout.val_kwargs.do_sample=True A.rollout.val_kwargs.temperature=0.6,
    {policy.generation.val_temperature: 0.6}]
# greedy all the same
- [verl, A.rollout.val_kwargs.temperature=0.6, {policy.generation.val_temperature: 0}]
- [verl, reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=100
    reward_model.reward_manager=dapo reward_model.overlong_buffer.penalty_factor=0.5,
    {grpo.reward_shaping: {overlong_buffer_length: 100, overlong_buffer_penalty: 0.5}}]
- [verl, reward_model.enable=True reward_model.model.path=my/rm reward_model.nnodes=1
    reward_model.model.trust_remote_code=True reward_model.num_workers=4
    reward_model.use_reward_loop=False reward_model.enable_resource_pool=True
    reward_model.n_gpus_per_node=2 reward_model.rollout.tensor_model_parallel_size=2
    reward_model.rollout.dtype=fp16,
    {env.reward_model: {model_name: my/rm, trust_remote_code: true, precision: float16,
      resources.gpus_per_node: 2, resources.num_nodes: 1, num_workers: 4, use_reward_loop: false,
      dtensor_cfg.tensor_parallel_size: 2}}]
- [verl-sft, "", {policy: {train_micro_batch_size: 1, sequence_packing.train_mb_tokens: 8192,
    optimizer.kwargs.lr: 1.0e-3, max_grad_norm: 1.0, train_global_batch_size: 256},
    sft.max_num_epochs: 4}]
- [verl-sft, data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2,
    {policy.train_micro_batch_size: 2}]
- [verl-sft, optim.clip_grad=0, {policy.max_grad_norm: null}]
- [verl-sft, data.messages_key=turns, {data.chat_key: turns}]
- [verl-sft, "data.apply_chat_template_kwargs='{a: 1}'",
    {policy.tokenizer.chat_template_kwargs.a: 1}]
- [verl-sft, trainer.save_freq=5 trainer.max_ckpt_to_keep=2,
    {checkpointing: {save_period: 5, keep_top_k: 2}}]
- [verl-sft, engine.param_offload=True engine.optimizer_offload=True,
    {policy.dtensor_cfg.cpu_offload: true}]
- [verl-sft, optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=59,
    {policy.scheduler.0.kwargs.total_iters: 5}]
- [verl-sft, optim.lr_warmup_steps=0 optim.lr_warmup_steps_ratio=0.1
    trainer.total_training_steps=50, {policy.scheduler.0.kwargs.total_iters: 5}]
- [openrlhf, ADV.estimator dr_grpo, {grpo.adv_estimator: {name: grpo, scale: none},
    grpo.leaves_one_out: false}]
- [openrlhf, ADV.estimator rloo, {grpo.adv_estimator: {name: grpo, scale: none},
    grpo.leaves_one_out: true}]
- [openrlhf, ADV.estimator reinforce_baseline, {grpo.leaves_one_out: false,
    grpo.adv_estimator: {name: reinforce_plus_plus, scale: null}}]
- [openrlhf, ADV.estimator reinforce_baseline ADV.no_std_norm, {grpo.leaves_one_out: false,
    grpo.adv_estimator: {name: grpo, scale: none}}]
# gae, which is told not to be carried; without use_loss, the divergence is in the reward, k1
- [openrlhf, "", {grpo.adv_estimator: {name: grpo, scale: group}, grpo.leaves_one_out: false,
    loss_fn: {use_kl_in_reward: true, reference_policy_kl_type: k1}}]
"""
MORE = {"verl": "algorithm.adv_estimator=grpo A.rollout.n=4 "}
MORE |= {"openrlhf": "--rollout.n_samples_per_prompt 4 "}


@pytest.mark.parametrize(("base", "line", "values"), yaml.safe_load(KEY_BY_KEY))
def test_one_key_at_a_time(tmp_path: Path, base: str, line: str, values: dict[str, Any]) -> None:
    found = imported_line(tmp_path, base, MORE.get(base, "") + line)
    assert_values(found, values)
    if base == "verl-sft":
        assert not found.with_status("not carried")


OVERLONG = "+reward.reward_kwargs.overlong_buffer_cfg.enable=True " + (
    "+reward.reward_kwargs.overlong_buffer_cfg.len=10 +reward.reward_kwargs.max_resp_len=400 "
)
CALLED = "F.path=pkg://my/rewards F.name=score +reward.max_rpm=30 +F.reward_kwargs.scale=100 "
MANAGERS = {
    "naive": {},
    "gdpo": {},
    "batch": {},
    "prime": {},
    "dapo": {"grpo.reward_shaping": {"enabled": True, "overlong_buffer_length": 10}},
    "remote": {"env.reward_model.num_workers": 8},
    "rate_limited": {
        "env.reward_model.function": {
            "manager": "rate_limited",
            "timeout": 300.0,
            "rate_limited.max_rpm": 30,
        },
        "env.reward_model.max_concurrent": 1,
    },
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", MANAGERS)
def test_each_manager_of_verl_is_what_it_does(tmp_path: Path, name: str, old: bool) -> None:
    line = MORE["verl"] + CALLED + OVERLONG + f"reward.reward_manager.name={name} "
    line = line.replace("F.", "reward.custom_reward_function.")
    if old:  # of January 2026
        line = line.replace("reward.custom", "custom").replace("reward.reward_m", "reward_m")
        line = line.replace("reward.reward_k", "reward_model.reward_k")
        line = line.replace("+reward.max", "+reward_model.max")
    found = imported_line(tmp_path, "verl", line)
    assert not found.with_status("not carried")
    told = {"path": "my.rewards:score", "kwargs": {"scale": 100}}
    assert_values(found, {"env.reward_model.function": told, **MANAGERS[name]})
    config: Any = found.config
    assert config.grpo.reward_shaping.enabled is (name == "dapo")
    assert (config.env.reward_model.function.manager == "naive") is (name != "rate_limited")


def test_a_manager_by_its_path_gets_what_it_reads(tmp_path: Path) -> None:
    line = MORE["verl"] + CALLED + OVERLONG + "reward.reward_manager.source=importlib "
    line += (
        "reward.reward_manager.name=Mine reward.reward_manager.module.path=mine.py +reward.odd=3"
    )
    line = line.replace("F.", "reward.custom_reward_function.")
    found = imported_line(tmp_path, "verl", line)
    assert not found.with_status("not carried")
    function = at(found.config, "env.reward_model.function")
    read = {"overlong_buffer_cfg": {"enable": True, "len": 10}, "max_resp_len": 400}
    assert function.manager == "verl"
    assert function.verl.model_dump() == {
        "path": "mine.py:Mine",
        "tokenizer": at(found.config, "policy.model_name"),
        "config": {"reward": {"odd": 3, "max_rpm": 30, "reward_kwargs": read}},
    }
    assert not at(found.config, "grpo.reward_shaping.enabled")
    alone = imported_line(tmp_path, "verl", line.replace("reward.custom_reward_function.path", "x"))
    assert fates(alone)["reward.reward_manager.module.path"] == "not carried"


def test_a_size_of_calls_without_a_limit_is_not_said_to_be_carried(tmp_path: Path) -> None:
    line = "reward.reward_manager.name=rate_limited +reward.estimated_tokens_per_request=9 "
    call = "reward.custom_reward_function.path=r.py "
    told = fates(imported_line(tmp_path, "verl", MORE["verl"] + line + call))
    assert told["reward.estimated_tokens_per_request"] == "not needed"
    found = imported_line(tmp_path, "verl", MORE["verl"] + line + call + "reward.max_tpm=90")
    assert fates(found)["reward.estimated_tokens_per_request"] == "carried"
    assert at(found.config, "env.reward_model.function.rate_limited.max_rpm") == 10


def test_a_manager_without_a_function_is_not_lost(tmp_path: Path) -> None:
    line = MORE["verl"] + "reward.reward_manager.name={} +reward.max_rpm=30"
    told = fates(imported_line(tmp_path, "verl", line.format("rate_limited")))
    assert told["reward.max_rpm"] == "not needed"
    mine = fates(imported_line(tmp_path, "verl", line.format("mine")))
    assert mine["reward.reward_manager.name"] == "not carried"
    model = " reward.reward_model.enable=True reward.reward_model.model_path=my/rm " + OVERLONG
    judged = imported_line(tmp_path, "verl", line.format("dapo") + model)
    assert not at(judged.config, "grpo.reward_shaping.enabled")
    assert not judged.with_status("not carried")


def test_a_function_beside_a_reward_model_asks_a_server_of_the_run(tmp_path: Path) -> None:
    model = "reward.reward_model.enable=True reward.reward_model.model_path=my/genrm "
    call = "reward.custom_reward_function.path=r.py "
    colocated = imported_line(tmp_path, "verl", MORE["verl"] + model + call)
    found = at(colocated.config, "env.reward_model.server")
    assert (found.model_name, found.replicas, found.tensor_parallel_size) == ("my/genrm", 4, 2)
    assert found.resources.gpus_per_node is None
    assert found.arguments == ["--gpu-memory-utilization=0.5"], "verl's default, and not vLLM's"
    more = "reward.reward_model.rollout.dtype=float16 reward.reward_model.trust_remote_code=True"
    told = imported_line(tmp_path, "verl", MORE["verl"] + model + call + more)
    arguments = at(told.config, "env.reward_model.server.arguments")
    assert arguments[1:] == ["--dtype=float16", "--trust-remote-code"]
    spread = "trainer.nnodes=3 trainer.n_gpus_per_node=4 "
    spread += "reward.reward_model.rollout.gpu_memory_utilization=0.3 "
    spread += "reward.reward_model.rollout.name={}"
    shared = imported_line(tmp_path, "verl", MORE["verl"] + model + call + spread.format("sglang"))
    assert at(shared.config, "env.reward_model.server.replicas") == 6
    assert fates(shared)["reward.reward_model.rollout.name"] == "not carried"
    assert fates(shared)["reward.reward_model.rollout.gpu_memory_utilization"] == "carried"
    arguments = at(shared.config, "env.reward_model.server.arguments")
    assert arguments == ["--gpu-memory-utilization=0.3"]
    shared = imported_line(tmp_path, "verl", MORE["verl"] + model + call + spread.format("vllm"))
    assert not shared.with_status("not carried")
    pool = "reward.reward_model.enable_resource_pool=True reward.reward_model.n_gpus_per_node=8 "
    apart = imported_line(tmp_path, "verl", MORE["verl"] + model + call + pool)
    to = "env.reward_model.server"
    assert_values(apart, {to: {"replicas": 4, "resources.gpus_per_node": 8}})
    assert not apart.with_status("not carried")
    nodes = "reward.reward_model.nnodes=2"
    wide = imported_line(tmp_path, "verl", MORE["verl"] + model + call + pool + nodes)
    to = "env.reward_model.server"
    slots = {"resources.gpus_per_node": 8, "resources.num_nodes": 2}
    assert_values(wide, {to: {"replicas": 8, **slots}})


def test_what_is_below_a_mapping_is_part_of_it(tmp_path: Path) -> None:
    """Each table's keys that hold a mapping, written key by key."""
    for base in ("verl", "verl-sft"):
        line = "+data.apply_chat_template_kwargs.a.b=1 data.apply_chat_template_kwargs.c=x"
        found = imported_line(tmp_path, base, MORE.get(base, "") + line)
        to = "policy.tokenizer.chat_template_kwargs"
        assert at(found.config, to) == {"a": {"b": 1}, "c": "x"}, base


@pytest.mark.parametrize(
    ("program", "line", "nodes_and_gpus", "staleness"),
    [
        ("", "trainer.n_gpus_per_node=4 JUDGE", (1, 8), 0),
        ("", "trainer.n_gpus_per_node=8 JUDGE reward_model.n_gpus_per_node=8", (2, 8), 0),
        ("", "trainer.nnodes=2 JUDGE reward_model.n_gpus_per_node=8", (3, 8), 0),
        ("one_step_off_policy.", "trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4", (1, 8), 1),
        ("one_step_off_policy.", "trainer.nnodes=2 rollout.nnodes=1", (3, 8), 1),
        (
            "one_step_off_policy.",
            "trainer.nnodes=2 rollout.nnodes=2 rollout.n_gpus_per_node=2",
            None,
            1,
        ),
    ],
)
def test_pools_of_verl_add_up_to_the_cluster(
    tmp_path: Path, program: str, line: str, nodes_and_gpus: tuple[int, int] | None, staleness: int
) -> None:
    judge = "reward_model.enable=True reward_model.model.path=my/rm reward_model.nnodes=1 "
    judge += "reward_model.enable_resource_pool=True"
    if "n_gpus_per_node=8" not in line:
        judge += " reward_model.n_gpus_per_node=4"
    text = BASES["verl"].replace("trainer.main", f"{program}main")
    text = text.replace("{}", MORE["verl"] + line.replace("JUDGE", judge))
    found = imported(tmp_path, text.replace("A.", "actor_rollout_ref."), "run.sh").imported
    assert_values(found, {"grpo.max_staleness": staleness})
    if nodes_and_gpus is None:
        assert fates(found)["rollout.nnodes"] == "not carried"
        return
    nodes, gpus = nodes_and_gpus
    assert_values(found, {"cluster": {"num_nodes": nodes, "gpus_per_node": gpus}})
    plan_to_run(request_of(found.config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("opo A.rollout.n=4", {"adv_estimator.name": "opo", "scale": "none"}),
        ("gpg A.rollout.n=4", {"adv_estimator.name": "gpg", "scale": "none"}),
        ("remax A.rollout.n=1", {"adv_estimator.name": "remax", "num_generations_per_prompt": 1}),
        ("grpo_passk A.rollout.n=4", {"adv_estimator.name": "pass_at_k", "scale": "group"}),
        (
            "grpo_passk A.rollout.n=4 algorithm.norm_adv_by_std_in_grpo=False",
            {"adv_estimator.name": "pass_at_k", "scale": "none"},
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_estimators_of_verl(tmp_path: Path, line: str, values: dict[str, Any]) -> None:
    found = imported_line(tmp_path, "verl", f"algorithm.adv_estimator={line}")
    assert_values(found, {"grpo": values})
    assert "algorithm.adv_estimator" not in {one.key for one in found.with_status("not carried")}


TEACHER = (
    "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=my/teacher "
    "distillation.distillation_loss.loss_mode=k1 "
)
PG = "distillation.distillation_loss.use_policy_gradient=True "
ALONE = "distillation.distillation_loss.use_task_rewards=False "


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (PG, {"rewards": True, "weight": 1.0, "clamp_value": None}),
        (
            PG + "distillation.distillation_loss.distillation_loss_coef=0.5",
            {"rewards": True, "weight": 0.5},
        ),
        (
            PG + ALONE + "distillation.distillation_loss.loss_max_clamp=10",
            {"rewards": False, "weight": 1.0, "clamp_value": 10.0},
        ),
    ],
)
def test_a_teacher_of_verl(tmp_path: Path, line: str, values: dict[str, Any]) -> None:
    found = imported_line(tmp_path, "verl", MORE["verl"] + TEACHER + line)
    assert_values(found, {"loss_fn.distillation": {"model_name": "my/teacher", **values}})
    assert "distillation" not in {
        one.key.partition(".")[0] for one in found.with_status("not carried")
    }


@pytest.mark.parametrize(
    "line",
    [
        "",  # the divergence itself is differentiated
        PG + "distillation.distillation_loss.loss_mode=k3",
        PG + "distillation.teacher_models.teacher_model.model_path=null",
    ],
)
def test_other_ways_of_verl_to_learn_from_a_teacher_are_told(tmp_path: Path, line: str) -> None:
    found = imported_line(tmp_path, "verl", MORE["verl"] + TEACHER + line)
    assert fates(found)["distillation.enabled"] == "not carried"
    assert at(found.config, "loss_fn.distillation").model_name is None


def test_the_old_probabilities_of_one_step_off_policy_are_told(tmp_path: Path) -> None:
    text = BASES["verl"].replace("trainer.main", "one_step_off_policy.main")

    def told(line: str) -> tuple[str, str | None]:
        more = MORE["verl"] + "trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4 " + line
        whole = text.replace("{}", more).replace("A.", "actor_rollout_ref.")
        found = imported(tmp_path, whole, "run.sh").imported
        return found.origins["grpo.max_staleness"], fates(found).get(BYPASS.partition("=")[0])

    assert "bypass_mode" in told("")[0]
    assert told(BYPASS + "True")[1] == "not needed"
    assert "bypass_mode" not in told(BYPASS + "False")[0]


BYPASS = "algorithm.rollout_correction.bypass_mode="
GDPO = "algorithm.adv_estimator=gdpo A.rollout.n=4 reward.reward_manager.name=gdpo "
KEYS = '+algorithm.gdpo_reward_keys=\'["accuracy_reward", "format_reward"]\' '


def test_the_components_of_verl_are_named(tmp_path: Path) -> None:
    found = imported_line(tmp_path, "verl", GDPO + KEYS)
    weights: Any = {"accuracy_reward": 1.0, "format_reward": 1.0}
    assert_values(found, {"grpo.adv_estimator": {"name": "gdpo", "reward_weights": weights}})
    told = fates(found)
    assert (told["algorithm.gdpo_reward_keys"], told["reward.reward_manager.name"]) == (
        "carried",
        "not needed",
    )
    weighed = imported_line(
        tmp_path, "verl", GDPO + KEYS + "algorithm.gdpo_reward_weights=[1,0.25]"
    )
    weights |= {"format_reward": 0.25}
    assert_values(weighed, {"grpo.adv_estimator.reward_weights": weights})
    with pytest.raises(ConfigError, match=r"gdpo_reward_weights.* a weight for each"):
        imported_line(tmp_path, "verl", GDPO + KEYS + "algorithm.gdpo_reward_weights=[1.0]")
    plain = imported_line(tmp_path, "verl", MORE["verl"] + KEYS)
    assert fates(plain)["algorithm.gdpo_reward_keys"] == "not needed"


def test_trl_rewards_that_are_several_are_a_composite(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: a\ndataset_name: b\nreward_model_name_or_path: my/rm\n"
        "reward_funcs: [accuracy_reward, get_soft_overlong_punishment, mine.score]\n"
        "reward_weights: [0.5, 2.0, 1.0, 1.0]\n"
    )
    found = imported(tmp_path, text).imported
    parts = at(found.config, "env.composite.imported.parts")
    assert [(part.env, part.weight) for part in parts] == [("reward_model", 0.5), ("math", 2.0)]
    values = {"data.env_name": "imported", "env.reward_model.model_name": "my/rm"}
    assert_values(found, values | {"grpo.reward_shaping.max_response_length": 1280})
    assert fates(found)["reward_funcs"] == "not carried"
    both = imported(tmp_path, text + "multi_objective_aggregation: normalize_then_sum\n").imported
    # in alphabetical order: math, reward_model
    assert_values(both, {"grpo.adv_estimator": {"name": "gdpo", "reward_weights": [2.0, 0.5]}})


@pytest.mark.parametrize(
    "name", ["linear", "cosine", "constant_with_warmup", "constant", "cosine_with_min_lr"]
)
@pytest.mark.parametrize("warm_up", [0, 3])
def test_the_learning_rate_of_every_step_is_that_of_the_trainer(
    tmp_path: Path, name: str, warm_up: int
) -> None:
    import torch
    from transformers import get_scheduler

    from laurel.training.learner import build_scheduler

    steps, rate = 10, 1e-3
    kwargs = {"min_lr_rate": 0.1} if name.endswith("min_lr") else {}
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


@pytest.mark.parametrize(
    ("base", "line", "why"),
    [
        ("openrlhf", "4", "Laurel learns without a critic: group_norm"),
        ("openrlhf", "1", "Laurel learns without a critic, and rollout"),
        ("openrlhf", "1 ADV.estimator group_norm", "rollout.n_samples_per_prompt=1 makes no"),
        ("openrlhf", "1 ADV.estimator reinforce ADV.no_std_norm", "rollout.n_samples_per_prompt=1"),
        ("openrlhf", "1 ADV.estimator reinforce", None),
        ("verl", "", "Laurel learns without a critic, and actor_rollout"),
        ("verl", "algorithm.adv_estimator=gae", "Laurel learns without a critic, and actor_"),
        ("verl", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1 makes no group"),
        ("verl", "A.rollout.n=4", "Laurel learns without a critic: grpo is written instead"),
    ],
)
def test_without_groups_or_with_a_critic_it_is_told_what_is_chosen(
    tmp_path: Path, base: str, line: str, why: str | None
) -> None:
    flag = "--rollout.n_samples_per_prompt " if base == "openrlhf" else ""
    found = imported_line(tmp_path, base, flag + line)
    (entry,) = [one for one in found.entries if "adv" in one.key and one.key.endswith("estimator")]
    assert entry.status == ("carried" if why is None else "not carried")
    assert why is None or entry.why.startswith(why)
    # Of one completion for each prompt the whole batch is compared.
    assert at(found.config, "grpo.compares_within_groups") == ("4" in line)


@pytest.mark.parametrize(
    "line",
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
def test_what_verl_fine_tuning_has_and_laurel_does_not_is_told(tmp_path: Path, line: str) -> None:
    assert imported_line(tmp_path, "verl-sft", line).with_status("not carried")


def test_a_verl_yaml_is_told_to_be_of_its_run(tmp_path: Path) -> None:
    tuning = "model: {path: a}\ndata: {train_files: b, max_length: 64}\noptim: {lr: 1.0e-5}\n"
    assert imported(tmp_path, tuning, system="verl").imported.run == "sft"
    policy = "algorithm: {adv_estimator: grpo}\ndata: {train_files: b}\n"
    assert imported(tmp_path, policy).imported.run == "grpo"


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
custom_reward_function: {path: r.py, name: f, reward_kwargs: {
  longest: "${data.max_response_length}", api_key: sk-1, deep: {odd: "${nowhere}", even: 2}}}
"""
    found = imported(tmp_path, text)
    assert found.system == "verl"
    config: Any = found.imported.config
    assert config.checkpointing.checkpoint_dir == "ckpt/p/e"
    assert fates(found.imported)["trainer.logger"] == "not carried"
    kwargs = config.env.reward_model.function.kwargs
    assert kwargs == {"longest": 64, "api_key": "sk-1", "deep": {"even": 2}}
    told = {entry.key: entry for entry in found.imported.entries}
    call = "reward.custom_reward_function.reward_kwargs"
    assert told[f"{call}.deep.odd"].status == "not carried"
    assert "sk-1" not in shown(call, told[call].value)


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


def test_an_unknown_key_is_not_carried_and_the_one_meant_is_named(tmp_path: Path) -> None:
    found = imported(tmp_path, TRL_GRPO + "num_generationz: 4\nquite_different: 1\n").imported
    told = {entry.key: entry for entry in found.with_status("not carried")}
    assert "not known" in told["num_generationz"].why
    assert "did you mean num_generations?" in told["num_generationz"].why
    assert "not known" in told["quite_different"].why


WRONG = {
    r"the key 'beta' is given twice": TRL_GRPO + "beta: 0.1\n",
    r"TRL's generation_batch_size=8: steps_per_generation is set, too": TRL_GRPO
    + "generation_batch_size: 8\nsteps_per_generation: 2\n",
    r"TRL's delta=high: it must be a number": TRL_GRPO + "delta: high\n",
    r"TRL's temperature: policy.generation.temperature: must be a number of at": TRL_GRPO
    + "temperature: -1\n",
    r"TRL's num_generations=7: 32 completions are sampled at a time": TRL_GRPO.replace(
        "num_generations: 8", "num_generations: 7"
    ),
    r"--adam.lr is given twice, as 1e-05 and 9e-06": OPENRLHF_RM.replace(
        "--ds.zero_stage 3", "--adam.lr 1e-5"
    ),
    r"OpenRLHF's train.batch_size=500: .* 128 x 8 = 1024 is no multiple": OPENRLHF_PPO_OLD.replace(
        "--train_batch_size 512", "--train_batch_size 500"
    ),
    r"verl's actor_rollout_ref.actor.ppo_mini_batch_size=2000: it is more": VERL.replace(
        "ppo_mini_batch_size=256", "ppo_mini_batch_size=2000"
    ),
    r"verl's data.train_files=5: it is not of the kind": BASES["verl"].replace("=b {}", "=5"),
    r"TRL's per_device_train_batch_size=0: it must be at least 1": TRL_GRPO.replace(
        "per_device_train_batch_size: 8", "per_device_train_batch_size: 0"
    ),
    r"source\.yaml:1:\d+: not YAML": "a: [1",
    r"neither a mapping of keys \(YAML, JSON\) nor a": "just words",
    r"neither a mapping": "",
    r"another program of openrlhf": "python -m openrlhf.cli.train_dpo --lr 1",
    r"fsdp_sft_trainer is another program of verl; .*main_ppo\|sft_trainer": "torchrun "
    "-m verl.trainer.fsdp_sft_trainer model.partial_pretrain=a",
    r"starts no training program .*unexpected EOF": "python -m openrlhf.cli.train_rm --data.a 'a",
    r"none of its keys tells where it is from .*--from": "colour: blue",
    r"which run is it for\? nothing in it tells; --for rm\|grpo\|sft": "learning_rate: 1.0e-5\n"
    "num_train_epochs: 1",
    r"it has keys of several: grpo \(beta\), sft \(packing\)": "beta: 0.1\npacking: true\n"
    "learning_rate: 1.0e-5",
}


@pytest.mark.parametrize(("message", "text"), WRONG.items())
def test_what_cannot_be_used_is_told(tmp_path: Path, message: str, text: str) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, text, "run.sh" if "--" in text or " -m " in text else "source.yaml")


@pytest.mark.parametrize(
    ("text", "name", "said", "message"),
    [
        ("{'a': 1}", "a.json", {}, r"a\.json:1: not JSON"),
        ("python train.py --lr 1e-5", "a.sh", {}, r"neither a mapping of keys|nor YAML"),
        (
            TRL_GRPO + "max_seq_length: 5\nmax_length: 6\n",
            "a.yaml",
            {"run": "rm"},
            r"max_length is another name of max_seq_length, and they differ",
        ),
        (TRL_GRPO, "a.yaml", {"system": "verl"}, r"is not of verl: .* of TRL; --from trl"),
        (VERL, "a.sh", {"system": "trl"}, r"is not of TRL: the program verl.trainer.main_ppo is"),
        (VERL, "a.sh", {"run": "rm"}, r"is laurel grpo, not rm; leave --for out"),
        (
            "algorithm: {adv_estimator: grpo}",
            "a.yaml",
            {"run": "rm", "system": "verl"},
            r"verl has no rm that is imported; --for grpo\|sft",
        ),
        (VERL, "a.sh", {"devices": 8}, r"--devices is for TRL, whose files do not say it; verl's"),
    ],
)
def test_what_is_asked_beside_the_file_must_fit(
    tmp_path: Path, text: str, name: str, said: dict[str, Any], message: str
) -> None:
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


def test_an_example_of_trl_is_answered_with_the_command_for_it(tmp_path: Path) -> None:
    for script, run in (("reward_modeling", "reward"), ("sft", "sft"), ("grpo", "grpo")):
        line = f"python examples/scripts/{script}.py --model_name_or_path m"
        with pytest.raises(ConfigError, match=f"write `trl {run}` instead of it"):
            imported(tmp_path, line, "a.sh", system="trl")


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


THEIRS = """
from dataclasses import replace
from pathlib import Path
from laurel import plugins
from laurel.config.data import SHORT, SetsConfig
from laurel.config.load import check_tree
from laurel.config.schemas import SCHEMAS

class Tiny(plugins.Importer):
    "A trainer of one key."
    title = "Tiny"

    def own_keys(self, values):
        return [key for key in values if key.startswith("tiny_")]

    def make(self, section, source):
        from laurel.extensions.importing.rules import MappingTable, Work, import_said

        work = Work(system=self.title, run=source.run or "rm", table=MappingTable(),
                    said=source.values)
        work.carry("tiny_model", "policy.model_name")
        return import_said(work)
"""


def test_another_package_imports_another_system(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(
        tmp_path, "tiny", {"tiny_system": THEIRS}, {"importers": {"tiny": "tiny_system:Tiny"}}
    )
    found = imported(tmp_path, "tiny_model: a/b\ntiny_other: 3\n")
    assert (found.system, found.imported.config.policy.model_name) == ("tiny", "a/b")
    assert "tiny_model" in found.by
    assert fates(found.imported)["tiny_other"] == "not carried"
    with pytest.raises(ConfigError, match="--from tiny"):
        imported(tmp_path, "tiny_model: a/b\n", system="trl")


def test_another_package_that_cannot_be_used_hinders_no_other_system(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = {"unusable_system": "raise OSError('no disk')"}
    installed(tmp_path, "unusable", module, {"importers": {"x": "unusable_system:X"}})
    text = "model_name_or_path: a/b\nnum_generations: 8\n"
    assert imported(tmp_path, text, run="grpo").system == "trl"
    assert imported(tmp_path, text, run="grpo", system="trl").system == "trl"
    with pytest.raises(ConfigError, match=r"the package unusable .*no disk"):
        imported(tmp_path, text, system="x")
