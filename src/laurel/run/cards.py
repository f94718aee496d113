"""Collects the facts about data, settings and evaluations for the model cards that a run writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.config.reward_model import RewardTrainingConfig
from laurel.data.report import DataReport, RowReport, TextReport
from laurel.errors import UserError, counted
from laurel.models.files import is_model_file, read_model_file
from laurel.models.spec import hub_name

if TYPE_CHECKING:
    from laurel.config.grpo_run import GRPORun
    from laurel.evaluation.benchmarks import BenchmarkSet
    from laurel.models.checkpoint.card import CardFacts
    from laurel.run.context import R, RunContext
    from laurel.training.learner_group import ModelFacts

Setting = str | int | float | bool | None


def facts_of_reward_model(
    context: RunContext[R],
    section: RewardTrainingConfig,
    reports: Mapping[str, DataReport],
    benchmarks: Mapping[str, BenchmarkSet],
    model: ModelFacts,
    *,
    ties: str,
) -> CardFacts:
    """Return the facts for the model card of a `laurel rm` run, after its data is tokenized."""
    from laurel.models.checkpoint.card import CardFacts

    loss = section.loss
    more = {
        name: value
        for name, value in loss.model_dump(mode="json", exclude_defaults=True).items()
        if name != "type"
    }
    settings = {
        "loss": loss.type + "".join(f", {name} {value}" for name, value in more.items()),
        **_settings(context, unit="groups"),
        "ties": "used by the loss" if loss.uses_ties else ties,
        "seed": section.seed,
    }
    return CardFacts(
        **_base(context, model),
        method="reward-model training",
        data={name: _preferences(report) for name, report in reports.items()}
        | {f"validation-{name}": one.described() for name, one in benchmarks.items()},
        settings=settings,
    )


def facts_of_policy(
    context: RunContext[R],
    model: ModelFacts,
    reports: Mapping[str, TextReport],
    *,
    method: str,
    settings: Mapping[str, Setting],
) -> CardFacts:
    """Return the facts for the model card of a run that trains a policy by `method`.

    `settings` are those of the method itself.
    """
    from laurel.models.checkpoint.card import CardFacts

    return CardFacts(
        **_base(context, model),
        method=method,
        data={name: _rows(report) for name, report in reports.items()},
        settings={"method": method, **settings, **_settings(context, unit="sequences")},
        max_length=context.config.policy.max_total_sequence_length,
    )


def settings_of_grpo(config: GRPORun, environments: Iterable[str]) -> dict[str, Setting]:
    """Return the settings of GRPO that the model card shows; `environments` judge its tasks."""
    grpo, custom = config.grpo, config.env.custom
    prompts = counted(grpo.num_prompts_per_step, "prompt")
    return {
        "rewards": ", ".join(
            f"{name} ({custom[name].name})" if name in custom else name for name in environments
        ),
        "step": f"{prompts}, {counted(grpo.num_generations_per_prompt, 'completion')} to each",
        "turns": grpo.max_rollout_turns,
        "temperature": config.policy.generation.temperature,
        "KL penalty": config.loss_fn.reference_policy_kl_penalty,
        "seed": grpo.seed,
    }


def _base(context: RunContext[R], model: ModelFacts) -> dict[str, str | None]:
    from laurel.models.checkpoint.card import CardFacts

    policy = context.config.policy
    name = policy.model_name if policy.scratch is None else None
    if name is not None and is_model_file(name):
        described = Path(name).name
        with suppress(UserError):  # a run that goes on does without the file
            described = read_model_file(name).about
        return {"base_model": described, "hub_base": None}
    if name is None or not os.path.isdir(os.path.expanduser(name)):
        return {"base_model": model.base_model, "hub_base": hub_name(name)}
    # Cards are published, so a local directory is reduced to its name.
    path = Path(os.path.realpath(os.path.expanduser(name)))
    # A checkpoint's own name says little without that of its run's directory.
    shown = f"{path.parent.name}/{path.name}" if path.name.startswith("step_") else path.name
    described = f"the local directory {shown}"
    facts = CardFacts.load(path)
    if facts is not None and facts.method and facts.base_model:
        described += f", made by {facts.method} from {facts.base_model}"
    return {"base_model": described, "hub_base": hub_name(name)}


def _settings(context: RunContext[R], *, unit: str) -> dict[str, str]:
    policy = context.config.policy
    optimizer, lora = policy.optimizer, policy.dtensor_cfg.lora_cfg
    settings = {
        "optimizer": f"{optimizer.name} {optimizer.kwargs}",
        "batch": f"{policy.train_global_batch_size} {unit}",
        "precision": policy.precision,
    }
    if lora.enabled:
        settings["adapters"] = f"LoRA of rank {lora.dim}, alpha {lora.alpha}; merged here"
    return settings


def _preferences(report: DataReport) -> str:
    figures = [counted(report.num_pairs, "pair"), counted(report.num_prompts, "prompt")]
    share = report.longer_wins_share
    if share is not None:
        figures.append(
            f"the longer answer is the better one in {share:.1%} (in characters; equal ones count "
            "half)"
        )
    if report.num_truncated:
        figures.append(f"{counted(report.num_truncated, 'conversation')} cut to the longest length")
    return f"{_rows(report)}; {', '.join(figures)}"


def _rows(report: RowReport) -> str:
    left_out = ", ".join(f"{v.count} {reason}" for reason, v in report.dropped.items())
    return (
        f"{report.origin or report.name}: {report.num_kept} of {counted(report.num_read, 'row')}"
        + (f" (left out: {left_out})" if left_out else "")
    )
