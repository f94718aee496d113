"""The tables of `docs/coming_from_*_keys.md` are those that `laurel config import` works with.

`python tests/test_coming_from.py` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laurel.config import nemo_rl
from laurel.config.importing.engine import default_at, import_said
from laurel.config.importing.rules import KeyRule, MappingTable, Work, shown
from laurel.config.importing.sources import TABLES, TITLES, System
from laurel.config.schema_info import step_into
from laurel.config.schemas import SCHEMAS, Kind

DOCS = Path(__file__).parents[1] / "docs"
HEADINGS = {"rm": "Reward models", "grpo": "GRPO", "sft": "Fine-tuning"}
START = "<!-- tables: written by `python tests/test_coming_from.py` -->\n"
END = "<!-- end of tables -->"
NEEDED: dict[tuple[System, Kind], dict[str, Any]] = {
    ("verl", "grpo"): {"algorithm.adv_estimator": "grpo"},
    ("openrlhf", "grpo"): {
        "algo.advantage.estimator": "group_norm",
        "rollout.n_samples_per_prompt": 8,
    },
}
"""What a run must say for its defaults to be those of a run that can be imported."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_TRL: list[dict[str, Any]] = [
    {
        "use_peft": True,
        "lora_target_modules": ["q"],
        "use_rslora": True,
        "save_only_model": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "dataset_name": "a",
        "run_name": "b",
        "load_best_model_at_end": True,
        "greater_is_better": False,
        "model_name_or_path": "c",
        "test_split_size": 0.1,
        "max_steps": 100,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_ratio": 0.1,
        "chat_template_path": "a.jinja",
        "save_strategy": "no",
    },
    {
        "datasets": [{"path": "a"}],
        "lora_target_modules": "all-linear",
        "use_peft": True,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_steps": 100,
    },
    {"eval_strategy": "steps"},
]
SAMPLES: dict[tuple[System, Kind], list[dict[str, Any]]] = {
    ("trl", "rm"): _TRL,
    ("trl", "sft"): [{**one, "assistant_only_loss": True} for one in _TRL],
    ("trl", "grpo"): [
        {
            **_TRL[0],
            "load_best_model_at_end": False,
            "use_vllm": True,
            "epsilon_high": 0.3,
            "delta": 2.0,
            "beta": 0.1,
            "max_prompt_length": 9,
            "reward_funcs": ["accuracy_reward"],
            "reward_model_name_or_path": "a",
            "reward_weights": [1.0, 2.0],
            "chat_template_kwargs": {"a": 1},
            "vllm_importance_sampling_clip_min": 0.5,
            "num_generations_eval": 2,
            "multi_objective_aggregation": "normalize_then_sum",
        },
        *_TRL[1:],
        {"vllm_max_model_length": 4096, "reward_funcs": ["get_soft_overlong_punishment"]},
    ],
    ("openrlhf", "rm"): [{}],
    ("openrlhf", "sft"): [{}],
    ("openrlhf", "grpo"): [
        {
            "algo.kl.use_loss": True,
            "actor.eps_clip_low_high": [0.1, 0.2],
            "actor.dual_clip": 3.0,
            "algo.advantage.is_correction_enable": True,
            "train.async_enable": True,
            "reward.model_name_or_path": "a",
            "reward.normalize_enable": True,
            "data.label_key": "b",
            "reward.overlong_buffer_len": 9,
            "rollout.max_new_tokens": 99,
            "vllm.num_engines": 1,
            "train.colocate_all": True,
            "actor.model_name_or_path": "c",
            "eval.temperature": 0.5,
            "eval.n_samples_per_prompt": 2,
            "algo.advantage.estimator": "reinforce_baseline",
            "algo.advantage.no_std_norm": True,
            "data.prompt_split": "train",
        },
        {
            "prompt_max_len": 9,
            "generate_max_len": 9,
            "reward.remote_url": "http://a:1/get_reward",
            "actor.model_name_or_path": "c",
            "reward.stop_properly_penalty_coef": 0.5,
        },
    ],
    ("verl", "grpo"): [
        {"algorithm.adv_estimator": "grpo", _ROLLOUT + "n": 5},
        {"algorithm.adv_estimator": "reinforce_plus_plus_baseline", _ROLLOUT + "n": 5},
        {
            "actor_rollout_ref.model.path": "a",
            "actor_rollout_ref.model.lora_rank": 8,
            "actor_rollout_ref.model.exclude_modules": ["b"],
            "data.train_files": "c",
            "data.val_files": "d",
            "data.val_max_samples": 5,
            "data.seed": 1,
            "data.gen_batch_size": 2048,
            "trainer.total_training_steps": 100,
            _ACTOR + "optim.lr_warmup_steps_ratio": 0.1,
            _ACTOR + "optim.lr_scheduler_type": "cosine",
            _ACTOR + "optim.min_lr_ratio": 0.1,
            _ACTOR + "use_kl_loss": True,
            _ACTOR + "use_dynamic_bsz": True,
            _ROLLOUT + "name": "vllm",
            _ROLLOUT + "val_kwargs.do_sample": True,
            "algorithm.rollout_correction.rollout_is": "token",
            "trainer.project_name": "e",
            "trainer.experiment_name": "f",
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": "g",
            "reward.reward_model.enable_resource_pool": True,
            "reward.reward_model.n_gpus_per_node": 1,
            "reward.reward_model.nnodes": 1,
            "reward.reward_model.rollout.tensor_model_parallel_size": 1,
            "use_reward_loop": False,
            "reward.reward_model.rollout.dtype": "bfloat16",
            "reward.num_workers": 2,
            "reward.reward_model.trust_remote_code": True,
            "reward.reward_model.rollout.max_model_len": 9,
            "algorithm.filter_groups.enable": True,
            "trainer.default_local_dir": "h",
            "reward.reward_kwargs.overlong_buffer.enable": True,
            "reward.reward_kwargs.overlong_buffer.len": 9,
            "reward.reward_kwargs.max_resp_len": 99,
            "reward.reward_kwargs.overlong_buffer.penalty_factor": 1.0,
        },
        {
            "algorithm.use_kl_in_reward": True,
            "data.train_files": ["a", "b"],
            "data.val_files": ["c", "d"],
            "reward.custom_reward_function.path": "a.py",
            _ACTOR + "grad_clip": 2.0,
            "reward.custom_reward_function.reward_kwargs": {"a": 1},
            _ACTOR + "tis_imp_ratio_cap": 2.0,
            _ACTOR + "optim.lr_warmup_steps": 3,
            _ACTOR + "clip_ratio": 0.2,
        },
        {
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": "a",
            "reward.reward_model.rollout.prompt_length": 9,
            _ACTOR + "optim.clip_grad": 2.0,
            _ACTOR + "optim.warmup_style": "constant",
        },
    ],
}
SAMPLES["verl", "sft"] = [
    {
        "model.path": "a",
        "model.lora_rank": 8,
        "model.exclude_modules": ["b"],
        "model.tokenizer_path": "g",
        "data.train_files": "c",
        "data.val_files": "d",
        "trainer.total_training_steps": 100,
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": 0.1,
        "trainer.project_name": "e",
        "trainer.experiment_name": "f",
        "trainer.default_local_dir": "h",
        "data.apply_chat_template_kwargs": {"a": 1},
        "data.enable_thinking_default": True,
    },
    {
        "data.train_files": ["a", "b"],
        "data.val_files": ["c", "d"],
        "optim.lr_warmup_steps": 3,
        "optim.warmup_style": "constant",
        "data.use_dynamic_bsz": False,
    },
]
for _kind in ("rm", "sft"):
    SAMPLES["openrlhf", _kind] = [
        {
            "ds.lora.rank": 8,
            "ds.lora.target_modules": ["a"],
            "model.model_name_or_path": "b",
            "data.dataset": "c",
            "data.dataset_split": "train",
            "eval.dataset": "d",
            "eval.steps": 5,
            "eval.split": "test",
            "data.prompt_key": "e",
            "model.margin_loss_enable": True,
            "data.output_key": "f",
            "logger.wandb.key": "g",
            "logger.wandb.org": "h",
            "logger.wandb.run_name": "i",
            "data.apply_chat_template": True,
            "data.tokenizer_chat_template": "j",
            "lr_scheduler": "linear",
        },
        {"data.dataset": "a,b"},
    ]
SAMPLES["openrlhf", "grpo"][0] |= {
    "ds.lora.rank": 8,
    "data.prompt_dataset": "c",
    "eval.dataset": "d",
    "eval.steps": 5,
    "eval.split": "test",
    "logger.wandb.key": "g",
    "logger.wandb.org": "h",
    "logger.wandb.run_name": "i",
    "data.apply_chat_template": True,
    "data.tokenizer_chat_template": "j",
}
"""Sources that between them show what every key can set."""


def page_of(system: System) -> Path:
    return DOCS / f"coming_from_{system.replace('-', '_')}_keys.md"


def tables(system: System) -> str:
    if system == "nemo-rl":
        return "".join(_nemo_rl())
    kinds = TABLES[system]
    return "".join(
        f"\n## {HEADINGS[run]}: `laurel {run}`\n{_of_run(system, run, table)}"
        for run, table in kinds.items()
    )


def _of_run(system: System, run: Kind, table: MappingTable) -> str:
    title = TITLES[system]
    decides = reached(system, run)
    carried = [rule for rule in table.rules if rule.fate == "carried"]
    parts = [
        f"\n### Carried\n\n| {title} | Laurel | conversion |\n|---|---|---|\n",
        *(row for rule in carried for row in _rows(rule, run, decides)),
        f"\n### Defaults of {title} that are not Laurel's\n\n",
        "Written where a file leaves them out.\n"
        f"\n| {title} | there | Laurel | here |\n|---|---|---|---|\n",
        *_defaults(system, run, table),
        "\n### Not carried\n\nAt a value that changes nothing they are not needed.\n"
        f"\n| {title} | why, and what to do |\n|---|---|\n",
        *(_reason(rule) for rule in table.rules if rule.fate == "not carried"),
        f"\n### Not needed\n\n| {title} | why |\n|---|---|\n",
        *(_reason(rule) for rule in table.rules if rule.fate == "not needed"),
    ]
    return "".join(parts)


def reached(system: System, run: Kind) -> dict[str, list[str]]:
    """By key of the other system, the keys of ours that it may decide."""
    table = TABLES[system][run]
    found: dict[str, list[str]] = {}
    for sample in [{}, *SAMPLES[system, run]]:
        said = {
            k: v
            for k, v in ({**NEEDED.get((system, run), {}), **sample}).items()
            if table.rule_of(k) is not None
        }
        work = Work(
            system=TITLES[system],
            run=run,
            said=said,
            defaults=table.defaults,
            devices=2,
            total_steps=100,
        )
        import_said(table, work, run)
        for key, targets in work.reached.items():
            found.setdefault(key, []).extend(to for to in targets if to not in found[key])
    return found


def _rows(rule: KeyRule, run: Kind, decides: dict[str, list[str]]) -> Iterator[str]:
    """A row for each key; the conversion stands beside the first of those read together."""
    for at, key in enumerate(rule.keys):
        only = rule.to if len(rule.keys) == 1 else ()
        to = _listed(tuple(decides.get(key, only))).format(run=run) or "–"
        yield f"| `{key}` | {to} | {_cell(rule.how) if at == 0 else ''} |\n"


def _reason(rule: KeyRule) -> str:
    return f"| {_listed(rule.keys)} | {_cell(rule.how)} |\n"


def _listed(keys: Iterable[str]) -> str:
    return "<br>".join(f"`{key}`" for key in dict.fromkeys(keys))


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _defaults(system: System, run: Kind, table: MappingTable) -> Iterator[str]:
    said = NEEDED.get((system, run), {})
    work = Work(system=TITLES[system], run=run, said=said, defaults=table.defaults)
    found = import_said(table, work, run)
    ours = SCHEMAS[run]().model_dump(mode="json")
    for one in found.with_fate("default"):
        to = "<br>".join(f"`{key}`" for key in one.to)
        here = "<br>".join(_cell(shown(key, default_at(ours, key))) for key in one.to)
        there = _cell(shown(one.key, one.value))
        yield f"| `{one.key}` | {there} | {to} | {here} |\n"


def _nemo_rl() -> Iterator[str]:
    yield "\n## Not carried\n\n| NeMo RL | what to do |\n|---|---|\n"
    for why, names in nemo_rl.LOST.items():
        yield f"| {_listed(names)} | {_cell(why)} |\n"
    yield "\n## Not needed\n\n| NeMo RL | why |\n|---|---|\n"
    for why, names in nemo_rl.UNNEEDED.items():
        yield f"| {_listed(names)} | {_cell(why)} |\n"


@pytest.mark.parametrize("system", TITLES)
def test_the_tables_of_a_page_are_those_of_the_code(system: System) -> None:
    page = page_of(system).read_text(encoding="utf-8")
    written = page.split(START)[1].split(END)[0]
    assert written == tables(system), "run `python tests/test_coming_from.py`"


def test_a_changed_table_would_be_seen() -> None:
    table = TABLES["verl"]["grpo"]
    key = "actor_rollout_ref.actor.clip_ratio_c"
    before = _of_run("verl", "grpo", table)
    assert f"| `{key}` | 3 |" in before
    assert _of_run("verl", "grpo", replace(table, defaults={**table.defaults, key: 4.0})) != before
    assert _of_run("verl", "grpo", replace(table, rules=table.rules[:-1])) != before


def test_pages_name_no_key_of_ours_that_is_not_there() -> None:
    named = 0
    for page in DOCS.glob("coming_from*.md"):
        text = page.read_text(encoding="utf-8")
        prose = re.sub(f"{re.escape(START)}.*?{END}", "", text, flags=re.S)
        for key in re.findall(r"`((?:policy|grpo|loss_fn|env)(?:\.\w+)+)[=`]", prose):
            kinds: tuple[Any, ...] = (SCHEMAS["grpo"],)
            for part in key.split("."):
                step = step_into(kinds, part)
                assert step.standing in ("field", "name"), f"{page.name}: {key}"
                kinds = step.kinds
            named += 1
    assert named > 10


if __name__ == "__main__":
    for one in TITLES:
        path = page_of(one)
        before, rest = path.read_text(encoding="utf-8").split(START)
        path.write_text(before + START + tables(one) + END + rest.split(END)[1], encoding="utf-8")
