"""Weights on their way to another process of this machine.

They travel as safetensors files in a directory that only this user can read, in memory where the
machine has a file system for that: nothing is pickled, nothing listens on the network.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from laurel.errors import EngineError
from laurel.types import Weights

MEMORY = Path("/dev/shm")

Shape = tuple[int, ...]


@contextmanager
def written(
    weights: Weights,
    *,
    has_all: bool = False,
    expected: Mapping[str, Shape] | None = None,
    expected_bytes: int = 0,
    max_file_bytes: int = 1 << 30,
    memory: Path = MEMORY,
) -> Iterator[list[Path]]:
    """The weights as files, for as long as the context is open.

    Args:
        has_all: Whoever reads them has had all of an earlier version: those that change will do.
        expected: Tensors that must be among them, with their shapes.
        expected_bytes: About how much is coming: where it must fit.
        max_file_bytes: Size at which a new file begins: what is held in memory at a time.

    Raises:
        EngineError: A tensor is missing or has another shape, or there is no room.
    """
    changing = weights.changing if has_all else None
    parent = memory if _has_room(memory, expected_bytes) else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="laurel-weights-", dir=parent) as directory:
        try:
            tensors = (changing or weights.tensors)()
            shapes, paths = _write(tensors, Path(directory), max_file_bytes)
        except OSError as error:
            raise EngineError(
                f"the weights of step {weights.version} could not be written below {parent}: "
                f"{error}. Make room there, or set TMPDIR to a larger file system"
            ) from error
        wanted = {n: s for n, s in (expected or {}).items() if changing is None or n in shapes}
        _require(wanted, shapes, weights.version)
        yield paths


def shapes_in(model_dir: Path) -> tuple[dict[str, Shape], int]:
    """The tensors in a Hugging Face directory, and their size in bytes."""
    from safetensors import safe_open

    shapes: dict[str, Shape] = {}
    size = 0
    for path in model_dir.glob("*.safetensors"):
        size += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes, size


def _require(expected: Mapping[str, Shape], shapes: Mapping[str, Shape], version: int) -> None:
    where = f"the weights of step {version}"
    if missing := [name for name in expected if name not in shapes]:
        raise EngineError(
            f"{where} lack {len(missing)} of the model's {len(expected)} tensors: "
            f"{', '.join(missing[:5])}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise EngineError(
                f"{where}: {name} has shape {list(shapes[name])}, but {list(shape)} in the "
                "directory that the engine was started from"
            )


def _has_room(folder: Path, size: int) -> bool:
    # Twice: the learner may hold in float32 what the directory has in 16 bits.
    return folder.is_dir() and shutil.disk_usage(folder).free > 2 * size + (64 << 20)


def _write(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, max_file_bytes: int
) -> tuple[dict[str, Shape], list[Path]]:
    from safetensors.torch import save_file

    shapes: dict[str, Shape] = {}
    paths: list[Path] = []
    part: dict[str, Tensor] = {}
    taken: set[int] = set()

    def flush() -> None:
        if part:
            paths.append(directory / f"weights-{len(paths):05}.safetensors")
            save_file(part, paths[-1])
            part.clear()
            taken.clear()

    for name, tensor in tensors:
        value = tensor.detach().to("cpu").contiguous()
        # safetensors refuses two names for one memory (tied weights, views of one buffer).
        if value.untyped_storage().data_ptr() in taken:
            value = value.clone()
        taken.add(value.untyped_storage().data_ptr())
        part[name] = value
        shapes[name] = tuple(value.shape)
        if sum(other.nbytes for other in part.values()) >= max_file_bytes:
            flush()
    flush()
    return shapes, paths
