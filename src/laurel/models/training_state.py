"""What a run needs besides the model to go on as if it had never stopped.

`training_state.json` holds the settings of the optimizer, the state of the scheduler and of the
random generators, and what the caller adds; `optimizer.safetensors` holds the tensors. Neither can
run code when it is loaded. Optimizer state goes by the names of parameters, so a model that has
changed is refused instead of getting the momentum of another weight.

Of a model that is spread over ranks, each rank writes what it holds of the tensors into the folder
`optimizer`, and the states of its own random generators. Either form is read by any number of
ranks, or by a single process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laurel.errors import CheckpointError, ConfigError
from laurel.models.across_ranks import fail_together
from laurel.models.background import Background
from laurel.models.optimizer_state import (
    STATE,
    Groups,
    check_optimizer,
    encode_optimizer,
    load_optimizer,
    named_groups,
)
from laurel.models.parallel import host_copy
from laurel.models.random_states import random_states, restore_random_states
from laurel.models.shares import plan_shares, read_shares
from laurel.models.state_encoding import Json, UnencodableError, decode, encode

STATE_NAME = "training_state.json"
TENSORS_NAME = "optimizer.safetensors"
SHARES_NAME = "optimizer"
"""Folder instead of that file, where ranks have written."""
ALONE, BY_RANKS = 1, 2
"""Versions of the format: of a single process, and of ranks."""

_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError)


def save_training_state(
    directory: Path,
    *,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any],
    parameter_names: Sequence[str] | None = None,
    mesh: DeviceMesh | None = None,
    background: Background | None = None,
) -> None:
    """Write the state into `directory` (which a `CheckpointStore` makes durable).

    Args:
        directory: Exists; with a mesh, on a disk that all ranks share.
        optimizer: Any of `torch.optim` whose state is tensors and numbers; None leaves it out.
        scheduler: Any of `torch.optim.lr_scheduler`; None leaves it out.
        extra: Position in the data and the like; see `state_encoding.encode` for what it may hold.
        parameter_names: Names of the optimizer's parameters, group after group. Not needed where
            it was made from `named_parameters()`.
        mesh: What the model is spread over: a collective call, with the same `extra` on all ranks.
        background: Writes, from copies on the host that are taken before this returns; each rank
            has its own, which tells what goes wrong in that. None: all is written here.

    Raises:
        ConfigError: part of the state is of a kind that cannot be saved.
        CheckpointError: another rank failed.
        OSError, SafetensorError: the disk refuses.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        state = _encode(optimizer, scheduler, extra, parameter_names, tensors)
    except ConfigError as error:
        if mesh is not None:
            fail_together(error, mesh, "saving the training state")
        raise
    if mesh is None:
        held = _separate(tensors) if background is None else _copied(tensors)
        write = partial(_write_alone, directory, held, state)
    else:
        fail_together(None, mesh, "saving the training state")
        write_share = plan_shares(directory / SHARES_NAME, tensors)
        rank = torch.distributed.get_rank()
        write = partial(_write_of_rank, directory, write_share, state, rank, mesh.size())
    if background is not None:
        background.start(write)
    elif mesh is None:
        write()
    else:
        failure: Exception | None = None
        try:
            write()
        except Exception as found:
            failure = found
        fail_together(failure, mesh, "saving the training state")


def _write_alone(
    directory: Path, tensors: dict[str, torch.Tensor], state: Mapping[str, Json]
) -> None:
    save_file(tensors, directory / TENSORS_NAME)
    _write_json(directory / STATE_NAME, {"format_version": ALONE, **state})


def _write_of_rank(
    directory: Path,
    write_share: Callable[[], None],
    state: Mapping[str, Json],
    rank: int,
    num_ranks: int,
) -> None:
    write_share()
    if rank == 0:
        ranks: dict[str, Json] = {"format_version": BY_RANKS, "num_ranks": num_ranks}
        _write_json(directory / STATE_NAME, {**ranks, **state})
    else:
        _write_json(directory / _random_name(rank), state["random"])


def load_training_state(
    directory: Path,
    *,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    parameter_names: Sequence[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Put the saved state into `optimizer`, `scheduler` and the random generators; return `extra`.

    Call it last before the loop: whatever draws random numbers after it changes the run. With
    None for both, only the random generators are restored. Nothing has changed when it raises,
    unless torch itself refuses the state half-way.

    The mesh (see `save_training_state`) may be another than the one that wrote, and either may be
    none. Every rank gets the random states it had, if there are as many; otherwise rank 0's.

    Raises:
        CheckpointError: the files are missing or damaged, or belong to another model, optimizer
            or scheduler. (Their bytes are checked by `checkpoint.verify`, not here.)
    """
    groups = [] if optimizer is None else named_groups(optimizer, parameter_names)
    try:
        saved = _read(directory, optimizer, scheduler, groups, mesh)
    except Exception as error:
        if mesh is not None:
            fail_together(error, mesh, f"resuming from '{directory}'")
        raise
    if mesh is not None:
        fail_together(None, mesh, f"resuming from '{directory}'")
    try:
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"]["state"])
        if optimizer is not None:
            load_optimizer(saved["optimizer"], optimizer, groups)
        restore_random_states(saved["random"])
    except _DAMAGED as error:
        raise _damage(directory, error) from error
    return dict(saved["extra"])


def _read(
    directory: Path,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    groups: Groups,
    mesh: DeviceMesh | None,
) -> dict[str, Any]:
    """What was saved, once it is known to fit.

    Raises:
        CheckpointError: see `load_training_state`.
    """
    file = directory / STATE_NAME
    try:
        state = json.loads(file.read_bytes())
        version = state["format_version"]
        if version not in (ALONE, BY_RANKS):
            raise CheckpointError(
                f"'{file}' has format version {version!r}; this version of Laurel reads "
                f"{ALONE} and {BY_RANKS}. Go on with the version that wrote it, or start a new run "
                "from the checkpoint's weights."
            )
        if optimizer is not None:
            check_optimizer(file, state["optimizer"], optimizer, groups)
        tensors = _read_tensors(directory, version, groups, mesh)
        state["random"] = _random_of_rank(directory, state, mesh)
        kept = ("scheduler", "random", "extra", *(["optimizer"] if optimizer is not None else []))
        saved = {key: decode(state[key], tensors) for key in kept}
        if optimizer is not None or scheduler is not None:
            _check_scheduler(file, saved["scheduler"], scheduler)
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{directory}' cannot be resumed from: {error}") from error
    except _DAMAGED as error:
        raise _damage(directory, error) from error
    return saved


def _damage(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"'{directory}' cannot be resumed from: its training state is damaged or of another "
        f"version of torch ({type(error).__name__}: {error})"
    )


def _encode(
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any],
    parameter_names: Sequence[str] | None,
    tensors: dict[str, torch.Tensor],
) -> dict[str, Json]:
    """All of the state as JSON; tensors in it are added to `tensors`.

    Raises:
        ConfigError: part of it is of a kind that cannot be saved.
    """
    try:
        return {
            "optimizer": encode_optimizer(optimizer, parameter_names, tensors),
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


def _write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, allow_nan=False) + "\n", encoding="utf-8")


def _random_name(rank: int) -> str:
    return f"random-{rank}.json"


def _random_of_rank(directory: Path, state: Mapping[str, Json], mesh: DeviceMesh | None) -> Json:
    """The states of the generators that this process goes on with."""
    if mesh is None or state.get("num_ranks") != mesh.size() or torch.distributed.get_rank() == 0:
        return state["random"]
    found: Json = json.loads((directory / _random_name(torch.distributed.get_rank())).read_bytes())
    return found


def _read_tensors(
    directory: Path, version: int, groups: Groups, mesh: DeviceMesh | None
) -> dict[str, torch.Tensor]:
    if version == ALONE and mesh is None:
        # Cloned, so that nothing of the run lies in a mapped file that may be deleted meanwhile.
        with safe_open(directory / TENSORS_NAME, framework="pt", device="cpu") as tensors:
            names = tensors.keys()
            return {name: tensors.get_tensor(name).clone() for name in names}
    parameters = {f"{STATE}{name}": p for group in groups for name, p in group.items()}
    return read_shares(
        directory if version == ALONE else directory / SHARES_NAME,
        lambda name: parameters.get(name.rpartition("/")[0]),
        leave_out=None if groups else STATE,
    )


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


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: host_copy(tensor) for name, tensor in tensors.items()}


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
