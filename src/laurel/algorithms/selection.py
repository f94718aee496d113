"""Which metric makes a checkpoint the best. Imports no torch: a wrong name is told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laurel.errors import ConfigError
from laurel.observe.metrics import PREFERENCE_METRICS, is_lower_better

TRAIN_METRICS = ("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What makes a checkpoint the best."""

    key: str | None
    """`validation-<set>_<metric>` or `train_<metric>`; None keeps the most recent."""
    higher_is_better: bool = False


def select_by(
    metric_name: str | None,
    higher_is_better: bool | None,
    *,
    sets: Sequence[str],
    attributes: Sequence[str] = (),
) -> Selection:
    """Resolve `checkpointing.metric_name` against what this run can measure.

    Args:
        metric_name: As configured; the forms `validation-<set>_<metric>`, `train_<metric>`, and
            both with the prefix `val:` or `train:`.
        higher_is_better: As configured; None is told from the name.
        sets: Names of the validation sets that will be validated.
        attributes: Of a regression head.

    Raises:
        ConfigError: The run never produces such a metric; those it does produce are listed.
    """
    if metric_name is None:
        return Selection(key=None)
    if metric_name == "auto":
        if not sets:
            return Selection(key=None)
        metric_name = f"validation-{sets[0]}_loss"
    names = [*PREFERENCE_METRICS]
    names += [f"{kind}/{attribute}" for attribute in attributes for kind in ("mse", "pearson")]
    possible = [f"validation-{name}_{metric}" for name in sets for metric in names]
    possible += [f"train_{metric}" for metric in TRAIN_METRICS]
    key = _in_full(metric_name)
    if key not in possible:
        hint = "" if sets else " There is no validation set: name one under data."
        raise ConfigError(
            f"checkpointing.metric_name={metric_name}: this run never measures that.{hint} "
            f"It can measure: {', '.join(possible)}"
        )
    if higher_is_better is None:
        higher_is_better = not is_lower_better(key)
    return Selection(key=key, higher_is_better=higher_is_better)


def _in_full(metric_name: str) -> str | None:
    """The name without its prefix; None where the prefix says something else than the name."""
    prefix, colon, name = metric_name.partition(":")
    if not colon:
        return metric_name
    kind = {"val": "validation-", "train": "train_"}.get(prefix)
    if kind == "train_" and name in TRAIN_METRICS:
        return f"train_{name}"
    return name if kind is not None and name.startswith(kind) else None
