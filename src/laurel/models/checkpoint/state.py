"""Saves the training state besides the model, so that a resumed run continues unchanged.

`training_state.json` holds the settings of the optimizer, the state of the scheduler and of the
random generators, and values from the caller; `optimizer.safetensors` holds the tensors. Neither
file is a pickle, so loading them runs no code. Optimizer state is keyed by parameter name, so the
state of another model is refused instead of being applied to the wrong weights.

If the model is sharded, each rank writes its shards of the tensors into the folder `optimizer`, and
the states of its own random generators. Any number of ranks can read either form.
"""

from __future__ import annotations

import json
import logging
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laurel.errors import CheckpointError, ConfigError
from laurel.models.checkpoint.store import Background
from laurel.models.parallel.mesh import fail_together, host_copy

STATE_NAME = "training_state.json"
TENSORS_NAME = "optimizer.safetensors"
SHARES_NAME = "optimizer"
"""The folder that replaces `optimizer.safetensors` if ranks have written their shards."""
ALONE, BY_RANKS = 1, 2
"""The versions of the format: written by a single process, and by ranks."""

_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError)


def save_training_state(
    directory: Path,
    *,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any],
    mesh: DeviceMesh | None = None,
    background: Background | None = None,
) -> None:
    """Write the training state into `directory`, without fsync, which `CheckpointStore` does.

    Args:
        directory: An existing directory; with a mesh, on a disk that all ranks share.
        optimizer: An optimizer that was created from `named_parameters()`, and whose state is
            tensors and numbers; None saves no state of it.
        scheduler: A scheduler of `torch.optim.lr_scheduler`; None saves no state of it.
        extra: Other state, such as the position in the data, of the types that `encode` accepts.
        mesh: The mesh of a sharded model. All ranks then call this, with the same `extra`.
        background: The worker of this rank that writes the files after this call returns. Tensors
            are copied to the host before, and the worker reports errors. None: this call writes.

    Raises:
        ConfigError: Part of the state has a type that cannot be saved.
        CheckpointError: Another rank failed.
        OSError, SafetensorError: The disk reports an error.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        state = _encode(optimizer, scheduler, extra, tensors)
    except ConfigError as error:
        if mesh is not None:
            fail_together(error, mesh, "saving the training state")
        raise
    if mesh is None:
        held = (
            _separate(tensors)
            if background is None
            else {name: host_copy(tensor) for name, tensor in tensors.items()}
        )
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
    mesh: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Restore `optimizer`, `scheduler` and the random generators; return the saved `extra`.

    Call this last before the training loop, because random numbers sampled later change the run.
    With None for both `optimizer` and `scheduler`, only the random generators are restored. If an
    error is raised, nothing has changed, unless torch itself refuses the state half-way.

    The mesh may differ from the one that the state was saved with, and either may be None. Each
    rank gets its own random states if the number of ranks is the same, otherwise those of rank 0.

    Raises:
        CheckpointError: The files are missing or damaged, or belong to another model, optimizer or
            scheduler. (`store.verify` checks only that the bytes are intact.)
    """
    groups = [] if optimizer is None else named_groups(optimizer)
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
            check_optimizer_state(file, state["optimizer"], optimizer, groups)
        tensors = _read_tensors(directory, version, groups, mesh)
        if mesh is not None and state.get("num_ranks") == mesh.size():
            # Each rank goes on with its own generators; the file holds those of rank 0.
            rank = torch.distributed.get_rank()
            if rank:
                state["random"] = json.loads((directory / _random_name(rank)).read_bytes())
        kept = ("scheduler", "random", "extra", *(["optimizer"] if optimizer is not None else []))
        saved = {key: decode(state[key], tensors) for key in kept}
        if optimizer is not None or scheduler is not None:
            scheduled = saved["scheduler"]
            was = "no scheduler" if scheduled is None else scheduled["class"]
            now = "no scheduler" if scheduler is None else _class_names(scheduler)
            if was != now:
                raise CheckpointError(
                    f"'{file}' has the state of {was}, and this run uses {now}. Set "
                    "policy.scheduler back, or start a new run from the checkpoint's weights."
                )
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
    tensors: dict[str, torch.Tensor],
) -> dict[str, Json]:
    try:
        encoded_optimizer = encode_optimizer(optimizer, tensors)
        encoded_scheduler: Json = None
        if scheduler is not None:
            fields = {"class": _class_names(scheduler), "state": scheduler.state_dict()}
            encoded_scheduler = encode(fields, "scheduler", tensors)
        return {
            "optimizer": encoded_optimizer,
            "scheduler": encoded_scheduler,
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


def _class_names(scheduler: LRScheduler) -> str:
    # The class, and in brackets those it is made of.
    inner = [_class_names(part) for part in getattr(scheduler, "_schedulers", [])]
    return type(scheduler).__qualname__ + (f"[{', '.join(inner)}]" if inner else "")


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # The file format demands contiguous tensors, each in memory of its own.
    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        dense = tensor.contiguous()
        separate[name] = dense.clone() if dense is tensor and place in seen else dense
        seen.add(place)
    return separate


# The state of an optimizer by the names of its parameters: what is saved, checked and put back.

STATE = "optimizer/state/"
"""The prefix of the names of optimizer tensors; the name of a parameter follows."""

_SHOWN_NAMES = 3

# Parameters by name, for each group of the optimizer.
Groups = list[dict[str, torch.Tensor]]


def encode_optimizer(
    optimizer: Optimizer | None,
    tensors: dict[str, torch.Tensor],
) -> Json:
    """Encode an optimizer's class, parameters, settings and state as JSON.

    The tensors of the state are added to `tensors`, and the JSON names them.

    Raises:
        UnencodableError: Part of the optimizer has a type that cannot be saved.
    """
    if optimizer is None:
        return None
    groups = named_groups(optimizer)
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


def check_optimizer_state(file: Path, saved: Any, optimizer: Optimizer, groups: Groups) -> None:
    """Check that a saved state belongs to this run's optimizer and model.

    Args:
        file: The file that held the state, for error messages.
        groups: The optimizer's parameters by name, from `named_groups`.

    Raises:
        CheckpointError: The state is of another optimizer or model, or missing.
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
    """Load a saved state into an optimizer.

    Args:
        saved: The result of `encode_optimizer`, checked by `check_optimizer_state`.
        groups: The optimizer's parameters by name, from `named_groups`.
    """
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


def named_groups(optimizer: Optimizer) -> Groups:
    """Return the parameters of each parameter group of an optimizer by name."""
    return [
        dict(zip(group["param_names"], group["params"], strict=True))
        for group in optimizer.param_groups
    ]


def _names_by_index(packed: Mapping[str, Any], groups: Groups) -> dict[int, str]:
    return {
        index: name
        for packed_group, group in zip(packed["param_groups"], groups, strict=True)
        for index, name in zip(packed_group["params"], group, strict=True)
    }


def _describe(groups: Groups) -> list[list[tuple[str, list[int]]]]:
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


# The states of the global random generators, taken and put back as plain values.

_log = logging.getLogger(__name__)


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators of Python, numpy and torch.

    They include those of all GPUs if this process has used one.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if used else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "cuda": [state.numpy() for state in cuda],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the random generators to `states`, which `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    available = torch.cuda.device_count() if states["cuda"] else 0
    for device, state in enumerate(states["cuda"][:available]):
        torch.cuda.set_rng_state(torch.from_numpy(state), device)
    if available < len(states["cuda"]):
        _log.warning(
            "the checkpoint has random states of %d GPUs and %d are here: the run goes on, but "
            "not with the random numbers it would have sampled",
            len(states["cuda"]),
            available,
        )


# Nested Python values as JSON and tensors, so that they come back equal in value *and* in type.
#
# JSON alone would turn a tuple into a list, an integer key into text, and has no NaN; a resumed
# run would then not be the run that was interrupted. What JSON cannot say is an object with one
# key that begins with `$`. Tensors go beside it, by name. Nothing here can run code on loading.

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_NUMBER_KINDS = "biufc"


class UnencodableError(TypeError):
    """Raised for a value of a type that cannot be saved; the message says which value."""


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """Encode a value as JSON; tensors in it are added to `tensors`, and the JSON names them.

    Floats are restored exactly, because `json` writes the shortest text that reads as the same
    number.

    Args:
        name: The prefix of the tensors' names; error messages use it too.
        tensors: Receives the tensors.

    Raises:
        UnencodableError: Part of the value is not None, a number, text, list, tuple, dict,
            `Counter`, array or dense tensor, which may be sharded. Other subclasses of these are
            refused too.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return _encode_all(value, name, tensors)
    if kind is tuple:
        return {"$tuple": _encode_all(value, name, tensors)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{name}/{key}", tensors) for key, item in value.items()}
        return {"$dict": _encode_items(value, name, tensors)}
    if kind is Counter:
        return {"$counter": _encode_items(value, name, tensors)}
    if kind in (torch.Tensor, torch.nn.Parameter, DTensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UnencodableError(f"{name} is a tensor that is not dense")
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _NUMBER_KINDS:
        if isinstance(value, np.generic):
            return {"$number": [value.dtype.str, value.tobytes().hex()]}
        return {"$array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    raise UnencodableError(f"{name} is a {kind.__module__}.{kind.__qualname__}")


def decode(value: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode` encoded.

    Args:
        tensors: The tensors that `encode` collected, by name.

    Raises:
        KeyError, TypeError, ValueError: The JSON is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, content),) = value.items()
        return _DECODERS[tag](content, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _encode_all(values: Iterable[Any], name: str, tensors: dict[str, torch.Tensor]) -> list[Json]:
    return [encode(item, f"{name}/{index}", tensors) for index, item in enumerate(values)]


def _encode_items(
    values: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]
) -> list[Json]:
    return [
        _encode_all(pair, f"{name}/{index}", tensors) for index, pair in enumerate(values.items())
    ]


def _decode_items(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in content}


def _decode_number(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    dtype, data = content
    return np.frombuffer(bytes.fromhex(data), dtype=_number_type(dtype))[0]


def _decode_array(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    dtype, shape, data = content
    # The copy is writable and owns its memory.
    return np.frombuffer(bytes.fromhex(data), dtype=_number_type(dtype)).reshape(shape).copy()


def _number_type(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBER_KINDS:
        raise ValueError(f"'{name}' is not a type of numbers")
    return dtype


_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "$float": lambda content, tensors: float(content),
    "$tuple": lambda content, tensors: tuple(decode(item, tensors) for item in content),
    "$dict": _decode_items,
    "$counter": lambda content, tensors: Counter(_decode_items(content, tensors)),
    "$tensor": lambda content, tensors: tensors[content],
    "$number": _decode_number,
    "$array": _decode_array,
}


# Sharded tensors in safetensors files: each rank writes and reads its own shards.
#
# The files are those of torch's distributed checkpoints in their safetensors form; the header of
# each says where in the whole tensor its parts begin. A reader takes the parts that overlap with
# its own shards, so other ranks than those that wrote, or a single process, can read. Nothing in
# the files can run code. A file that holds whole tensors is read in the same way.
#
# Torch plans and reads. Two things are done here: encoding values that are not tensors, which torch
# would pickle, and writing the copies after the plan, because `async_save` needs a process group of
# its own, and its end waits for every rank, even for one that was lost.


def plan_shares(directory: Path, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Copy to the host the shards of tensors that this rank must save, and return their writer.

    All ranks call this together; each then writes its copies without waiting for other ranks.

    Args:
        directory: The directory on a disk that all ranks share; it is created if necessary.
        tensors: The tensors, with the same names on every rank. A tensor that is not sharded must
            be equal on every rank, and is written once.

    Returns:
        A function that writes this rank's copies to files.

    Raises:
        CheckpointError: A rank failed; the error is raised on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = ShareWriter(directory)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise CheckpointError(f"'{directory}' could not be written: {_said(error)}") from error
    return writer.write


def read_shares(
    directory: Path, like: Callable[[str], Tensor | None], *, leave_out: str | None = None
) -> dict[str, Tensor]:
    """Read tensors from the files of a directory; ranks do not wait for each other.

    Args:
        directory: A directory that `plan_shares` filled, or one with files of whole tensors.
        like: Returns, for the name of a tensor, a tensor with the required shape and sharding, or
            None if any shape is accepted. A tensor that is not sharded is read to the CPU.
        leave_out: The prefix of the names of tensors that are not read.

    Raises:
        CheckpointError: A part is missing, or a tensor has another shape than `like` requires.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(path=str(directory))
    entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    targets: dict[str, Any] = {}
    for name, entry in entries.items():
        if leave_out is not None and name.startswith(leave_out):
            continue
        # torch would leave the memory of what is missing as it was.
        present = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if present != math.prod(entry.size):
            raise CheckpointError(
                f"'{directory}' has {present:,} of the {math.prod(entry.size):,} numbers of {name}"
                ": a file is missing"
            )
        targets[name] = _target(directory, name, entry, like(name))
    if not targets:
        return {}
    try:
        with warnings.catch_warnings():
            # It says that no ranks take part.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(targets, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"'{directory}' cannot be read: {_said(error)}") from error
    return targets


def _target(directory: Path, name: str, entry: Any, like: Tensor | None) -> Tensor:
    dtype = entry.properties.dtype
    if like is None or not entry.size:
        return torch.empty(entry.size, dtype=dtype)
    if entry.size != like.shape:
        # The end of a tensor is where its last part ends.
        raise CheckpointError(
            f"'{directory}': {name} is {list(entry.size)} and its weight {list(like.shape)}: a "
            "file is missing, or it cannot be divided over ranks"
        )
    return torch.empty_like(like, dtype=dtype, device=None if isinstance(like, DTensor) else "cpu")


def _said(error: Any) -> str:
    # The message of the first rank that failed.
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"


# Which rank writes which part of a sharded state, as torch plans it, and writing the file.


class ShareWriter(HuggingFaceStorageWriter):
    """Saves this rank's shards in two stages: all ranks plan and copy, then each writes its file.

    Writing needs no other rank and no device, so it can run during training, and it never waits for
    a lost rank.
    """

    def __init__(self, directory: Path) -> None:
        """Set the directory; nothing is written yet."""
        super().__init__(path=str(directory), save_distributed=True)
        self._directory = directory
        self._file_name = ""
        self._parts: dict[str, Tensor] = {}
        self._offsets: dict[str, dict[str, list[int]]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy the shards to the host; torch calls this when all ranks have agreed on the plan."""
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            name = item.index.fqn
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            self._parts[name] = host_copy(part)
            self._offsets[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        if plan.items:
            self._file_name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def write(self) -> None:
        """Write this rank's file, if it has shards to write, and release the copies.

        Raises:
            OSError, SafetensorError: The disk reports an error.
        """
        parts, self._parts = self._parts, {}
        if not parts:
            return
        # There is only one entry, because the order of several would differ in every file.
        metadata = {CUSTOM_METADATA_KEY: json.dumps(self._offsets)}
        save_file(parts, self._directory / self._file_name, metadata=metadata)
