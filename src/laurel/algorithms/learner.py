"""The one learner: micro-batches in, one optimizer step out.

It knows nothing of the algorithm. A micro-batch carries what the model reads and the labels that
the loss reads; the loss counts its denominator over all micro-batches before the first of them is
computed, so how a batch is cut into micro-batches changes nothing.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar

import torch
from torch import Tensor, nn

from laurel.algorithms.losses import LossOutput
from laurel.config.schema import Milestones, NamedCall
from laurel.errors import ConfigError
from laurel.types import PaddedRows, TokenForest

Label = TypeVar("Label")
LabelIn = TypeVar("LabelIn", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch(Generic[Label]):
    """What one forward pass computes, and what its outputs are judged by."""

    inputs: TokenForest | PaddedRows
    labels: Sequence[Label]
    num_tokens: int
    """Tokens that are computed: distinct ones in a forest, padding included in rows."""


class Loss(Protocol[LabelIn]):
    """How outputs of the model are judged. See `losses.RewardLoss`."""

    def count(self, batch: Sequence[LabelIn], /) -> float:
        """What the batch adds to the denominator."""

    def __call__(
        self, outputs: Tensor, batch: Sequence[LabelIn], /, *, num_groups: float
    ) -> LossOutput:
        """The loss of a micro-batch, already divided by the global denominator."""

    def metrics(self, sums: Mapping[str, SupportsFloat], /) -> dict[str, float]:
        """Figures from the totals of `LossOutput.sums`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What came of one step."""

    metrics: dict[str, float]
    """Those of the loss, `grad_norm` and `lr`."""
    failure: str | None = None
    """Why the step was not applied; None where it was."""


class Learner:
    """A model with its optimizer and schedule."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: NamedCall,
        scheduler: NamedCall | list[NamedCall | Milestones] | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Build the optimizer over every parameter that takes gradients.

        Raises:
            ConfigError: An optimizer or scheduler that torch does not have, or refuses.
        """
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.named_parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizer = build_optimizer(optimizer, self.named_parameters)
        self.scheduler = build_scheduler(scheduler, self.optimizer)

    @property
    def learning_rate(self) -> float:
        """That of the next step (of the first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    def update(self, batch: Sequence[MicroBatch[Label]], loss: Loss[Label]) -> Update:
        """Take one optimizer step.

        The step is applied only if the loss and the gradient are finite. A batch that teaches
        nothing skips the optimizer too: Adam moves even with a gradient of zero.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        denominator = sum(loss.count(micro_batch.labels) for micro_batch in batch)
        if denominator == 0:
            return Update(metrics={}, failure="no row of the batch teaches this loss anything")
        totals: dict[str, Tensor] = {}
        for micro_batch in batch:
            outputs = self.model(micro_batch.inputs)
            result = loss(outputs, micro_batch.labels, num_groups=denominator)
            if not torch.isfinite(result.loss):
                self.optimizer.zero_grad(set_to_none=True)
                return Update(metrics={}, failure=f"the loss is {float(result.loss.detach())}")
            result.loss.backward()  # type: ignore[no-untyped-call]
            add_up(totals, result.sums)
        metrics = loss.metrics(totals)
        metrics["grad_norm"] = grad_norm = self._clip()
        metrics["lr"] = self.learning_rate
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            return Update(metrics=metrics, failure=f"the norm of the gradient is {grad_norm}")
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return Update(metrics=metrics)

    def _clip(self) -> float:
        parameters = [parameter for _, parameter in self.named_parameters]
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model without dropout and gradients, and as it was afterwards."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                yield self.model
        finally:
            self.model.train(was_training)


def add_up(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """Add the sums of one micro-batch to those of the batch."""
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value


def build_optimizer(
    config: NamedCall, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer by its import path.

    The fused kernel is used where torch has one and the configuration does not choose: it is the
    same arithmetic in one pass over memory instead of a dozen.
    """
    make = _import("policy.optimizer.name", config.name, torch.optim.Optimizer)
    if issubclass(make, torch.optim.SparseAdam) or _needs_argument(make.step):
        raise ConfigError(
            f"policy.optimizer.name={config.name}: it needs sparse gradients, or to compute the "
            "loss several times a step, which training does not do; torch.optim.AdamW does well"
        )
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in config.kwargs.items()}
    accepted = inspect.signature(make).parameters
    if "fused" in accepted and not {"fused", "foreach", "capturable", "differentiable"} & set(
        kwargs
    ):
        kwargs["fused"] = True
    try:
        return make(list(named_parameters), **kwargs)  # type: ignore[no-any-return]
    except _REFUSALS as error:
        raise ConfigError(
            f"policy.optimizer: {config.name} refuses these kwargs ({error}). It takes: "
            f"{', '.join(name for name in accepted if name != 'params')}."
        ) from error


def build_scheduler(
    config: NamedCall | list[NamedCall | Milestones] | None, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """One scheduler, several handing over at milestones, or none."""
    if config is None:
        return None
    if isinstance(config, NamedCall):
        return _scheduler(config, optimizer)
    calls = [entry for entry in config if isinstance(entry, NamedCall)]
    milestones = [entry.milestones for entry in config if isinstance(entry, Milestones)]
    if len(calls) == 1 and milestones in ([], [[]]):
        return _scheduler(calls[0], optimizer)
    if not calls or len(milestones) != 1 or len(milestones[0]) != len(calls) - 1:
        raise ConfigError(
            f"policy.scheduler: a list of {len(calls)} schedulers needs one entry "
            f"`milestones` with {max(len(calls) - 1, 0)} steps"
            + ("" if calls else ", and a scheduler; null keeps the learning rate constant")
        )
    if any(a >= b for a, b in pairwise([0, *milestones[0]])):
        raise ConfigError(
            f"policy.scheduler: the milestones {milestones[0]} must be rising steps above 0"
        )
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [_scheduler(call, optimizer) for call in calls], milestones=milestones[0]
    )


def _scheduler(
    config: NamedCall, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    make = _import("policy.scheduler.name", config.name, torch.optim.lr_scheduler.LRScheduler)
    if _needs_argument(make.step):
        raise ConfigError(
            f"policy.scheduler.name={config.name}: it needs a metric at every step, and here the "
            "learning rate follows the steps alone; choose another scheduler"
        )
    try:
        return make(optimizer, **config.kwargs)  # type: ignore[no-any-return]
    except _REFUSALS as error:
        accepted = [name for name in inspect.signature(make).parameters if name != "optimizer"]
        raise ConfigError(
            f"policy.scheduler: {config.name} refuses these kwargs ({error}). It takes: "
            f"{', '.join(accepted)}."
        ) from error


_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)
"""What constructors of torch raise at arguments that they cannot use."""


def _needs_argument(step: Callable[..., object]) -> bool:
    """Whether a method cannot be called without arguments."""
    _self, *others = inspect.signature(step).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in others)


def _import(key: str, path: str, kind: type) -> Any:
    """A class by its import path.

    Raises:
        ConfigError: Nothing there, or something else.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        home = torch.optim if kind is torch.optim.Optimizer else torch.optim.lr_scheduler
        classes = {n: c for n, c in vars(home).items() if inspect.isclass(c) and n[0] != "_"}
        known = sorted(n for n, c in classes.items() if issubclass(c, kind) and c is not kind)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {home.__name__}.{near[0]}?" if near else ""
        raise ConfigError(
            f"{key}={path}: no such class.{hint} In {home.__name__}: {', '.join(known)}."
        ) from error
    if not (inspect.isclass(found) and issubclass(found, kind)):
        raise ConfigError(f"{key}={path} is not a {kind.__name__}")
    return found
