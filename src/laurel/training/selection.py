"""Chooses the metric that ranks checkpoints, and the goal that ends a run.

This module does not import torch, so that a wrong name is reported quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from laurel.errors import ConfigError
from laurel.observe.metrics import PREFERENCE_METRICS, STEP_METRICS, is_lower_better
from laurel.training.stopping import Position

if TYPE_CHECKING:
    from laurel.config.grpo import GRPOConfig

NO_SET = "There is no validation set: name one under data"
"""Why a run validates nothing where it has nothing to validate on."""
TRAIN_METRICS = ("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The metric that ranks checkpoints."""

    key: str | None
    """`validation-<set>_<metric>` or `train_<metric>`; None keeps the most recent checkpoints."""
    higher_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A target of a validation metric that ends the run."""

    key: str
    """The name of the metric, as in `Selection`."""
    threshold: float
    """The value that ends the run when it is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """A validation metric that ends the run when it has not improved for a while."""

    key: str
    """The name of the metric, as in `Selection`."""
    higher_is_better: bool
    patience: int
    """The number of consecutive validations without a new best value that ends the run."""
    min_delta: float
    """The difference to the best value so far that makes a value a new best."""

    def watched(self, position: Position) -> Position:
        """Return a validated position with its best value and the validations since counted."""
        value, best = position.metrics.get(self.key), position.best_watched
        # A metric that could not be measured is no improvement.
        if value is not None:
            gain = math.inf if best is None else value - best
            if best is not None and not self.higher_is_better:
                gain = -gain
            if gain > self.min_delta:
                return replace(position, best_watched=value, num_stale=0)
        if position.step == 0:
            return position  # nothing was trained that could have improved
        return replace(position, num_stale=position.num_stale + 1)


def select_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    sets: Sequence[str],
    attributes: Sequence[str] = (),
    benchmarks: Mapping[str, Sequence[str]] = MappingProxyType({}),
    has_steps: bool = False,
    why_not: str = NO_SET,
    setting: str = "checkpointing.metric_name",
) -> Selection:
    """Resolve `checkpointing.metric_name` to a metric that this run measures.

    `auto` is the loss of the first set or, if there are only benchmarks, the accuracy over all rows
    of the first benchmark. `val_loss`, NeMo RL's name, is the loss of the first set too.

    Args:
        metric_name: The configured name, `validation-<set>_<metric>` or `train_<metric>`, with or
            without the prefix `val:` or `train:`.
        higher_is_better: The configured direction; None derives it from the name.
        why_not: The reason why nothing is validated, for the message, if nothing is.
        setting: The key that names the metric, for the message.

    Raises:
        ConfigError: The run does not measure such a metric; the message lists those it measures.
    """
    if metric_name is None:
        return Selection(key=None)
    if metric_name == "auto":
        if not sets and not benchmarks:
            return Selection(key=None)
        first = f"{sets[0]}_loss" if sets else f"{next(iter(benchmarks))}_accuracy"
        metric_name = f"validation-{first}"
    # The answers of a process reward model have no ranks, so there are no pairs to measure.
    names = ["loss", *STEP_METRICS, "num_nonfinite"] if has_steps else list(PREFERENCE_METRICS)
    names += [f"{kind}/{attribute}" for attribute in attributes for kind in ("mse", "pearson")]
    possible = [f"validation-{name}_{metric}" for name in sets for metric in names]
    possible += [f"validation-{name}_{one}" for name, found in benchmarks.items() for one in found]
    possible += [f"train_{metric}" for metric in TRAIN_METRICS]
    return select_among(
        metric_name,
        higher_is_better,
        possible,
        why_not="" if sets or benchmarks else why_not,
        aliases={"val_loss": f"validation-{sets[0]}_loss"} if sets else {},
        setting=setting,
    )


def select_among(
    metric_name: str,
    higher_is_better: bool | None,
    possible: Sequence[str],
    *,
    why_not: str,
    aliases: Mapping[str, str] = MappingProxyType({}),
    setting: str = "checkpointing.metric_name",
) -> Selection:
    """Resolve a name to one of the metrics that a run measures.

    Args:
        metric_name: The configured name, which is not `auto`.
        higher_is_better: The configured direction; None derives it from the name.
        possible: The names of the metrics that the run measures.
        why_not: The reason why the run validates nothing, for the message; empty if it does.

    Raises:
        ConfigError: The run does not measure such a metric; the message lists those it measures.
    """
    bare = metric_name.removeprefix("val:")
    key = aliases.get(metric_name) or aliases.get(bare) or _in_full(metric_name)
    if key is None or key not in possible:
        raise _never_measured(f"{setting}={metric_name}", possible, why_not=why_not)
    if higher_is_better is None:
        higher_is_better = not is_lower_better(key)
    return Selection(key=key, higher_is_better=higher_is_better)


def _never_measured(setting: str, possible: Iterable[str], *, why_not: str) -> ConfigError:
    hint = f" {why_not}." if why_not else ""
    return ConfigError(
        f"{setting}: this run never measures that.{hint} It can measure: {', '.join(possible)}"
    )


def _in_full(metric_name: str) -> str | None:
    # None where the prefix contradicts the name.
    prefix, colon, name = metric_name.partition(":")
    if not colon:
        return metric_name
    kind = {"val": "validation", "train": "train_"}.get(prefix)
    if kind == "train_" and not name.startswith(kind):
        return f"train_{name}"
    return name if kind is not None and name.startswith(kind) else None


POLICY_METRICS = ("reward_mean", "accuracy", "avg_length", "truncation_rate", "num_failures")
"""The metrics of a policy's validation, by their names without a prefix."""
POLICY_TRAIN_METRICS = ("loss", "reward", "kl_penalty", "entropy", "grad_norm", "truncation_rate")
DEMONSTRATION_METRICS = ("loss", "perplexity")


def select_policy_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    has_validation: bool,
    environments: Sequence[str],
    sets: Sequence[str] = (),
    why_not: str = NO_SET,
) -> Selection:
    """Resolve `checkpointing.metric_name` for GRPO; `auto` is the mean reward in validation.

    A metric of one validation set is named `validation-<set>_reward_mean`. `val_reward` and
    `val:accuracy`, the defaults of NeMo RL, are the mean reward too, because NeMo RL's accuracy is
    the mean of any reward.
    """
    if metric_name is None or (metric_name == "auto" and not has_validation):
        return Selection(key=None)
    possible = [f"train_{name}" for name in POLICY_TRAIN_METRICS]
    if has_validation:
        figures = [f"env/{name}/accuracy" for name in environments]
        named = [f"validation-{name}_{figure}" for name in sets for figure in POLICY_METRICS]
        possible = [f"validation_{name}" for name in (*POLICY_METRICS, *figures)] + named + possible
    mean = "validation_reward_mean"
    aliases = dict.fromkeys(("auto", "val_reward", "val:reward", "val:accuracy"), mean)
    if higher_is_better is None:
        name = aliases.get(metric_name, metric_name).removeprefix("val:")
        for one in sets:  # the name of a set says nothing of its figures
            name = name.removeprefix(f"validation-{one}_")
        higher_is_better = any(word in name for word in ("reward", "accuracy", "entropy"))
    why_not = "" if has_validation else why_not
    return select_among(metric_name, higher_is_better, possible, why_not=why_not, aliases=aliases)


def policy_goal(
    config: GRPOConfig,
    *,
    has_validation: bool,
    environments: Sequence[str],
    why_not: str = NO_SET,
) -> Goal | None:
    """Resolve `grpo.stop_at_validation_metric`, which may omit the prefix of a metric.

    `accuracy` is the mean reward, as in NeMo RL, and NeMo RL's `pass_k` is `pass@k` with the
    number of completions per task in validations.

    Args:
        config: The section `grpo`, whose `stop_at_validation_metric` is the target.
        why_not: The reason why nothing is validated, for the message, if nothing is.

    Raises:
        ConfigError: Validations do not measure the metric, or a higher value is not better.
    """
    metric_name, threshold = config.stop_at_validation_metric, config.stop_at_validation_threshold
    num_generations = config.val_num_generations_per_prompt
    if metric_name is None or threshold is None:
        return None
    names = {"reward_mean": "reward_mean", "accuracy": "reward_mean"}
    names |= {name: name for name in (f"env/{e}/accuracy" for e in environments)}
    if num_generations > 1:
        names |= dict.fromkeys(("pass_k", f"pass@{num_generations}"), f"pass@{num_generations}")
    bare = metric_name.removeprefix("val:").removeprefix("validation_")
    if not has_validation or bare not in names:
        raise _never_measured(
            f"grpo.stop_at_validation_metric={metric_name}",
            names if has_validation else (),
            why_not="" if has_validation else why_not,
        )
    return Goal(key=f"validation_{names[bare]}", threshold=threshold)


def select_demonstrations_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    sets: Sequence[str],
    why_not: str = NO_SET,
) -> Selection:
    """Resolve `checkpointing.metric_name` for fine-tuning; `auto` is the loss of the first set."""
    if metric_name is None or (metric_name == "auto" and not sets):
        return Selection(key=None)
    possible = [f"validation-{s}_{name}" for s in sets for name in DEMONSTRATION_METRICS]
    possible += [f"train_{name}" for name in (*DEMONSTRATION_METRICS, "grad_norm")]
    # Without a set, the first is one of training.
    aliases = {"val_loss": possible[0], "auto": possible[0]} if sets else {}
    why_not = "" if sets else why_not
    return select_among(metric_name, higher_is_better, possible, why_not=why_not, aliases=aliases)
