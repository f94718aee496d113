"""What the model cards of a run say of its data and its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from laurel.config.reward_training import RewardTrainingRun
from laurel.config.schema import PolicyConfig
from laurel.data.report import DataReport, RowReport
from laurel.data.text_report import TextReport
from laurel.observe.counts import counted

if TYPE_CHECKING:
    from laurel.algorithms.learner_worker import ModelFacts
    from laurel.evaluation.benchmark_sets import BenchmarkSet
    from laurel.models.model_card import CardFacts


def facts_of_reward_model(
    config: RewardTrainingRun,
    reports: Mapping[str, DataReport],
    benchmarks: Mapping[str, BenchmarkSet],
    model: ModelFacts,
) -> CardFacts:
    """The facts of a run of `laurel rm`, once its rows are tokens."""
    from laurel.models.model_card import CardFacts

    loss = config.rm.loss
    more = {
        name: value
        for name, value in loss.model_dump(mode="json", exclude_defaults=True).items()
        if name != "type"
    }
    settings = {
        "loss": loss.type + "".join(f", {name} {value}" for name, value in more.items()),
        **_settings(config.policy, unit="groups"),
        "epochs": config.rm.max_num_epochs,
        "ties": "used by the loss" if loss.uses_ties else config.data.ties,
        "seed": config.rm.seed,
    }
    return CardFacts(
        **_base(config.policy, model),
        method="reward-model training",
        data={name: _preferences(report) for name, report in reports.items()}
        | {f"validation-{name}": one.described() for name, one in benchmarks.items()},
        settings=settings,
    )


def facts_of_policy(
    policy: PolicyConfig, model: ModelFacts, reports: Mapping[str, TextReport], *, method: str
) -> CardFacts:
    """The facts of a run that trains a policy by this method."""
    from laurel.models.model_card import CardFacts

    return CardFacts(
        **_base(policy, model),
        method=method,
        data={name: _rows(report) for name, report in reports.items()},
        settings={"method": method, **_settings(policy, unit="sequences")},
        max_length=policy.max_total_sequence_length,
    )


def _base(policy: PolicyConfig, model: ModelFacts) -> dict[str, str | None]:
    """What training started from; of a directory only its name, for cards are made public."""
    from laurel.models.model_card import hub_name

    name = policy.model_name if policy.scratch is None else None
    is_here = name is not None and os.path.isdir(os.path.expanduser(name))
    described = f"the local directory {os.path.basename(os.path.realpath(name or ''))}"
    return {"base_model": described if is_here else model.base_model, "hub_base": hub_name(name)}


def _settings(policy: PolicyConfig, *, unit: str) -> dict[str, str]:
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
    figures = [counted(report.figures.num_pairs, "pair"), counted(report.num_prompts, "prompt")]
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
