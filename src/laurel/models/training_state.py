"""What a run needs besides the model to go on as if it had never stopped.

`training_state.json` holds the settings of the optimizer, the state of the scheduler and of the
random generators, and what the caller adds; `optimizer.safetensors` holds the tensors. Neither can
run code when it is loaded. Optimizer state goes by the names of parameters, so a model that has
changed is refused instead of getting the momentum of another weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laurel.errors import CheckpointError, ConfigError
from laurel.models.random_states import random_states, restore_random_states
from laurel.models.state_encoding import Json, UnencodableError, decode, encode

STATE_NAME = "training_state.json"
TENSORS_NAME = "optimizer.safetensors"
FORMAT_VERSION = 1

_SHOWN_NAMES = 3

# Parameters by name, for each group of the optimizer.
_Groups = list[dict[str, torch.Tensor]]


def save_training_state(
    directory: Path,
    *,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any],
    parameter_names: Sequence[str] | None = None,
) -> None:
    """Write the two files into `directory` (which a `CheckpointStore` makes durable).

    Args:
        directory: Exists.
        optimizer: Any of `torch.optim` whose state is tensors and numbers; None leaves it out.
        scheduler: Any of `torch.optim.lr_scheduler`; None leaves it out.
        extra: Position in the data and the like; see `state_encoding.encode` for what it may hold.
        parameter_names: Names of the optimizer's parameters, group after group. Not needed where
            it was made from `named_parameters()`.

    Raises:
        ConfigError: part of the state is of a kind that cannot be saved.
        OSError, SafetensorError: the disk refuses.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        state: dict[str, Json] = {
            "format_version": FORMAT_VERSION,
            "optimizer": _encode_optimizer(optimizer, parameter_names, tensors),
            "scheduler": _encode_scheduler(scheduler, tensors),
            "random": encode(random_states(), "random", tensors),
            "extra": encode(dict(extra), "extra", tensors),
        }
    except UnencodableError as error:
        raise ConfigError(
            f"this run cannot be saved: {error}, and a checkpoint holds only numbers, text, "
            "lists, tuples, dicts and dense tensors. Choose another policy.optimizer or "
            "policy.scheduler, or set checkpointing.save_optimizer to false."
        ) from error
    save_file(_separate(tensors), directory / TENSORS_NAME)
    text = json.dumps(state, allow_nan=False)
    (directory / STATE_NAME).write_text(text + "\n", encoding="utf-8")


def load_training_state(
    directory: Path,
    *,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    parameter_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Put the saved state into `optimizer`, `scheduler` and the random generators; return `extra`.

    Call it last before the loop: whatever draws random numbers after it changes the run. With
    None for both, only the random generators are restored. Nothing has changed when it raises,
    unless torch itself refuses the state half-way.

    Raises:
        CheckpointError: the files are missing or damaged, or belong to another model, optimizer
            or scheduler. (Their bytes are checked by `checkpoint.verify`, not here.)
    """
    file = directory / STATE_NAME
    groups = [] if optimizer is None else _named_groups(optimizer, parameter_names)
    try:
        state = json.loads(file.read_bytes())
        version = state["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"'{file}' has format version {version!r}; this version of Laurel reads "
                f"{FORMAT_VERSION}"
            )
        tensors = _read_tensors(directory / TENSORS_NAME)
        saved_optimizer = decode(state["optimizer"], tensors)
        saved_scheduler = decode(state["scheduler"], tensors)
        saved_random = decode(state["random"], tensors)
        extra = decode(state["extra"], tensors)
        if optimizer is not None:
            _check_optimizer(file, saved_optimizer, optimizer, groups)
        if optimizer is not None or scheduler is not None:
            _check_scheduler(file, saved_scheduler, scheduler)
        if scheduler is not None:
            scheduler.load_state_dict(saved_scheduler["state"])
        if optimizer is not None:
            _load_optimizer(saved_optimizer, optimizer, groups)
        restore_random_states(saved_random)
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{directory}' cannot be resumed from: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"'{directory}' cannot be resumed from: its training state is damaged or of another "
            f"version of torch ({type(error).__name__}: {error})"
        ) from error
    return dict(extra)


# ---------------------------------------------------------------------------------- optimizer


def _encode_optimizer(
    optimizer: Optimizer | None,
    parameter_names: Sequence[str] | None,
    tensors: dict[str, torch.Tensor],
) -> Json:
    if optimizer is None:
        return None
    groups = _named_groups(optimizer, parameter_names)
    packed = optimizer.state_dict()
    names = _names_by_index(packed, groups)
    for index in packed["state"]:
        if index not in names:
            raise UnencodableError(f"the optimizer's state has {index!r}, which is no parameter")
    fields = {
        "class": type(optimizer).__qualname__,
        "parameters": _describe(groups),
        "settings": [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in packed["param_groups"]
        ],
        "state": {names[index]: value for index, value in packed["state"].items()},
    }
    return encode(fields, "optimizer", tensors)


def _check_optimizer(file: Path, saved: Any, optimizer: Optimizer, groups: _Groups) -> None:
    if saved is None:
        raise CheckpointError(
            f"'{file}' has no optimizer state (checkpointing.save_optimizer was false), so the run "
            "cannot go on exactly. Start a new run from the checkpoint's weights."
        )
    name = type(optimizer).__qualname__
    if saved["class"] != name:
        raise CheckpointError(
            f"'{file}' has the state of {saved['class']}, and this run uses {name}. Set "
            "policy.optimizer back, or start a new run from the checkpoint's weights."
        )
    was, now = saved["parameters"], _describe(groups)
    if was != now:
        raise CheckpointError(
            f"'{file}' was saved for another model: {_first_differences(was, now)}. Set "
            "the model back, or start a new run from the checkpoint's weights."
        )


def _load_optimizer(saved: Any, optimizer: Optimizer, groups: _Groups) -> None:
    packed = optimizer.state_dict()
    names = _names_by_index(packed, groups)
    settings = []
    for old, new in zip(packed["param_groups"], saved["settings"], strict=True):
        # A learning rate may be a tensor; it goes back to the device it is on.
        placed = {
            key: value.to(old[key].device) if isinstance(old.get(key), torch.Tensor) else value
            for key, value in new.items()
        }
        kept = {key: old[key] for key in ("params", "param_names") if key in old}
        settings.append(placed | kept)
    state = {index: saved["state"][name] for index, name in names.items() if name in saved["state"]}
    optimizer.load_state_dict({"state": state, "param_groups": settings})
    # Torch casts what it loads to the type of the parameter, which would round float32 state of
    # bfloat16 parameters.
    for name, parameter in (item for group in groups for item in group.items()):
        for key, value in saved["state"].get(name, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _named_groups(optimizer: Optimizer, parameter_names: Sequence[str] | None) -> _Groups:
    groups: _Groups = []
    given = None if parameter_names is None else iter(parameter_names)
    for group in optimizer.param_groups:
        names = group.get("param_names") if given is None else islice(given, len(group["params"]))
        if names is None:
            raise ValueError(
                "the optimizer does not know the names of its parameters: make it from "
                "model.named_parameters(), or pass parameter_names"
            )
        groups.append(dict(zip(names, group["params"], strict=True)))
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    distinct = {name for group in groups for name in group}
    if len(distinct) != total or (given is not None and next(given, None) is not None):
        raise ValueError(f"the optimizer has {total} parameters; each needs one name of its own")
    return groups


def _names_by_index(packed: Mapping[str, Any], groups: _Groups) -> dict[int, str]:
    return {
        index: name
        for packed_group, group in zip(packed["param_groups"], groups, strict=True)
        for index, name in zip(packed_group["params"], group, strict=True)
    }


def _describe(groups: _Groups) -> list[list[tuple[str, list[int]]]]:
    """Name and shape of each parameter, group by group."""
    return [[(name, list(value.shape)) for name, value in group.items()] for group in groups]


def _first_differences(was: Any, now: Any) -> str:
    def lines(groups: Any) -> list[str]:
        return [
            f"'{name}' {shape}" + (f" (group {index})" if len(groups) > 1 else "")
            for index, group in enumerate(groups)
            for name, shape in group
        ]

    saved, present = lines(was), lines(now)
    gone = [line for line in saved if line not in set(present)]
    new = [line for line in present if line not in set(saved)]
    parts = []
    for label, some in (("only in the checkpoint", gone), ("only in this run", new)):
        if some:
            more = f" and {len(some) - _SHOWN_NAMES} more" if len(some) > _SHOWN_NAMES else ""
            parts.append(f"{label}: {', '.join(some[:_SHOWN_NAMES])}{more}")
    if not parts:
        first = next(pair for pair in zip(saved, present, strict=True) if pair[0] != pair[1])
        parts = [f"its parameters are in another order, {first[0]} where this run has {first[1]}"]
    return "; ".join(parts)


# -------------------------------------------------------------------------- scheduler, tensors


def _encode_scheduler(scheduler: LRScheduler | None, tensors: dict[str, torch.Tensor]) -> Json:
    if scheduler is None:
        return None
    fields = {"class": _class_names(scheduler), "state": scheduler.state_dict()}
    return encode(fields, "scheduler", tensors)


def _check_scheduler(file: Path, saved: Any, scheduler: LRScheduler | None) -> None:
    was = "no scheduler" if saved is None else saved["class"]
    now = "no scheduler" if scheduler is None else _class_names(scheduler)
    if was != now:
        raise CheckpointError(
            f"'{file}' has the state of {was}, and this run uses {now}. Set "
            "policy.scheduler back, or start a new run from the checkpoint's weights."
        )


def _class_names(scheduler: LRScheduler) -> str:
    """The class, and in brackets those it is made of."""
    inner = [_class_names(part) for part in getattr(scheduler, "_schedulers", [])]
    return type(scheduler).__qualname__ + (f"[{', '.join(inner)}]" if inner else "")


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, contiguous and each in memory of its own, as the file format demands."""
    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        dense = tensor.contiguous()
        separate[name] = dense.clone() if dense is tensor and place in seen else dense
        seen.add(place)
    return separate


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    # Cloned, so that nothing of the run lies in a mapped file that may be deleted meanwhile.
    with safe_open(file, framework="pt", device="cpu") as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118
