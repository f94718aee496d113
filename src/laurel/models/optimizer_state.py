"""The state of an optimizer by the names of its parameters: what is saved, checked and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laurel.errors import CheckpointError
from laurel.models.state_encoding import Json, UnencodableError, decode, encode

STATE = "optimizer/state/"
"""How the names of its tensors begin; the name of a parameter follows."""

_SHOWN_NAMES = 3

# Parameters by name, for each group of the optimizer.
Groups = list[dict[str, torch.Tensor]]


def encode_optimizer(
    optimizer: Optimizer | None,
    parameter_names: Sequence[str] | None,
    tensors: dict[str, torch.Tensor],
) -> Json:
    """Class, parameters, settings and state as JSON; tensors in it are added to `tensors`.

    Raises:
        UnencodableError: part of it is of a kind that cannot be saved.
    """
    if optimizer is None:
        return None
    groups = named_groups(optimizer, parameter_names)
    packed = optimizer.state_dict()
    names = _names_by_index(packed, groups)
    for index in packed["state"]:
        if index not in names:
            raise UnencodableError(f"the optimizer's state has {index!r}, which is no parameter")
    _refuse_undivided(packed, names, groups)
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


def _refuse_undivided(packed: Mapping[str, Any], names: Mapping[int, str], groups: Groups) -> None:
    """Refuse state of spread weights that is not spread as they are.

    Raises:
        UnencodableError: it is of another shape, so another mesh could not divide it.
    """
    parameters = {name: p for group in groups for name, p in group.items()}
    for index, entries in packed["state"].items():
        parameter = parameters[names[index]]
        for key, value in entries.items():
            is_number = not isinstance(value, torch.Tensor) or value.ndim == 0
            if isinstance(parameter, DTensor) and not is_number and value.shape != parameter.shape:
                raise UnencodableError(
                    f"{STATE}{names[index]}/{key} is {list(value.shape)}, not the shape of its "
                    "weight, which is spread over ranks"
                )


def check_optimizer(file: Path, saved: Any, optimizer: Optimizer, groups: Groups) -> None:
    """Refuse the state of another optimizer or model.

    Args:
        file: Where it is from.
        saved: What `encode_optimizer` gave.
        optimizer: Of this run.
        groups: Its parameters.

    Raises:
        CheckpointError: it is of another, or there is none.
    """
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
    was, now = decode(saved["parameters"], {}), _describe(groups)
    if was != now:
        raise CheckpointError(
            f"'{file}' was saved for another model: {_first_differences(was, now)}. Set "
            "the model back, or start a new run from the checkpoint's weights."
        )


def load_optimizer(saved: Any, optimizer: Optimizer, groups: Groups) -> None:
    """Put decoded state, which `check_optimizer` has let pass, into an optimizer."""
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


def named_groups(optimizer: Optimizer, parameter_names: Sequence[str] | None) -> Groups:
    """The parameters of an optimizer by name.

    Raises:
        ValueError: it does not know their names, or there are others in number.
    """
    groups: Groups = []
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


def _names_by_index(packed: Mapping[str, Any], groups: Groups) -> dict[int, str]:
    return {
        index: name
        for packed_group, group in zip(packed["param_groups"], groups, strict=True)
        for index, name in zip(packed_group["params"], group, strict=True)
    }


def _describe(groups: Groups) -> list[list[tuple[str, list[int]]]]:
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
