"""Builds optimizers and schedules from their import paths."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from laurel.config.policy import Milestones, NamedCall
from laurel.errors import ConfigError, counted


def build_optimizer(
    config: NamedCall, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Build the optimizer that an import path names.

    Unless the configuration decides, the fused kernel is used if torch has one: it computes the
    same in one pass over memory instead of a dozen.
    """
    make = _import("policy.optimizer.name", config.name, torch.optim.Optimizer)
    if issubclass(make, torch.optim.SparseAdam) or _needs_argument(make.step):
        raise ConfigError(
            f"policy.optimizer.name={config.name}: it needs sparse gradients, or to compute the "
            "loss several times a step, which training does not do; torch.optim.AdamW does well"
        )
    is_spread = any(isinstance(parameter, DTensor) for _, parameter in named_parameters)
    if is_spread and issubclass(make, (torch.optim.Adafactor, torch.optim.Rprop)):
        raise ConfigError(
            f"policy.optimizer.name={config.name}: torch cannot divide its steps over ranks; "
            "choose torch.optim.AdamW, or train on one rank"
        )
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in config.kwargs.items()}
    accepted = inspect.signature(make).parameters
    chosen = {"fused", "foreach", "capturable", "differentiable"} & set(kwargs)
    # Only the fused kernels of Adam support weights that are sharded over ranks.
    if "fused" in accepted and not chosen and (not is_spread or issubclass(make, torch.optim.Adam)):
        kwargs["fused"] = True
    try:
        return make(list(named_parameters), **kwargs)  # type: ignore[no-any-return]
    except _REFUSALS as error:
        raise ConfigError(
            f"policy.optimizer: {config.name} refuses these kwargs ({error}): "
            f"{_written(config)}. It takes: "
            f"{', '.join(name for name in accepted if name != 'params')}."
        ) from error


def build_scheduler(
    config: Sequence[NamedCall | Milestones] | None, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Build one scheduler, a sequence of schedulers that change at milestones, or none."""
    if config is None:
        return None
    calls = [entry for entry in config if isinstance(entry, NamedCall)]
    milestones = [entry.milestones for entry in config if isinstance(entry, Milestones)]
    if len(calls) == 1 and milestones in ([], [[]]):
        return _scheduler(calls[0], optimizer)
    if not calls or len(milestones) != 1 or len(milestones[0]) != len(calls) - 1:
        raise ConfigError(
            f"policy.scheduler: a list of {counted(len(calls), 'scheduler')} needs one entry "
            f"`milestones` with {counted(max(len(calls) - 1, 0), 'step')}"
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
            f"policy.scheduler: {config.name} refuses these kwargs ({error}): "
            f"{_written(config)}. It takes: {', '.join(accepted)}."
        ) from error


# Constructors of torch raise these errors for invalid arguments.
_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)


def _written(call: NamedCall) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in call.kwargs.items()) or "there are none"


def _needs_argument(step: Callable[..., object]) -> bool:
    _self, *others = inspect.signature(step).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in others)


def _import(key: str, path: str, kind: type) -> Any:
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
        example = "AdamW" if kind is torch.optim.Optimizer else "lr_scheduler.LinearLR"
        raise ConfigError(
            f"{key}={path} is not a {kind.__name__}; name a class of torch, such as "
            f"torch.optim.{example}"
        )
    return found
