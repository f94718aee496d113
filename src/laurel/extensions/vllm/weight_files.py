"""Weights on their way to vLLM's processes of this machine.

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
from laurel.generation.weights.held import HeldDtype, as_held
from laurel.sandbox.scratch import ScratchFolder
from laurel.types import Weights

MEMORY = Path("/dev/shm")
Shape = tuple[int, ...]


@contextmanager
def written(
    weights: Weights,
    *,
    held: HeldDtype | None = None,
    has_all: bool = False,
    expected: Mapping[str, Shape] | None = None,
    expected_bytes: int = 0,
    max_file_bytes: int = 1 << 30,
    memory: Path = MEMORY,
) -> Iterator[list[Path]]:
    """Write weights to safetensors files that exist while the context is open.

    Args:
        held: The dtype in which the reader holds its weights; None: they are written as they are.
        has_all: Whether the reader has loaded all weights of an earlier version, so that only those
            that training changes are written.
        expected: Names and shapes of the tensors that the weights must include.
        expected_bytes: Estimate of the size, which decides whether the files fit into `memory`.
        max_file_bytes: Size at which a new file begins; one file's weights are in memory at a time.
        memory: Directory of a file system in memory, used if it has enough room.

    Raises:
        EngineError: A tensor is missing or has another shape, or the disk is full.
    """
    changing = weights.changing if has_all else None
    parent = memory if _has_room(memory, expected_bytes) else Path(tempfile.gettempdir())
    with ScratchFolder("weights", parent) as folder:
        try:
            tensors = (changing or weights.tensors)()
            shapes, paths = _write(as_held(tensors, held), folder.path, max_file_bytes)
        except OSError as error:
            raise EngineError(
                f"the weights of step {weights.version} could not be written below {parent}: "
                f"{error}. Make room there, or set TMPDIR to a larger file system"
            ) from error
        required = {n: s for n, s in (expected or {}).items() if changing is None or n in shapes}
        require_tensors(required, shapes, weights.version)
        yield paths


def shapes_in(model_dir: Path) -> tuple[dict[str, Shape], int]:
    """Return the shapes of all tensors in a Hugging Face directory, and the files' total bytes."""
    from safetensors import safe_open

    shapes: dict[str, Shape] = {}
    size = 0
    for path in model_dir.glob("*.safetensors"):
        size += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes, size


def require_tensors(
    expected: Mapping[str, Shape], shapes: Mapping[str, Shape], version: int
) -> None:
    """Check that the weights of a version include all those that are expected, in their shapes.

    Raises:
        EngineError: One is missing or has another shape.
    """
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
    memories: set[int] = set()

    def flush() -> None:
        if part:
            paths.append(directory / f"weights-{len(paths):05}.safetensors")
            save_file(part, paths[-1])
            part.clear()
            memories.clear()

    for name, tensor in tensors:
        value = tensor.detach().to("cpu").contiguous()
        # safetensors refuses two names for one memory (tied weights, views of one buffer).
        if value.untyped_storage().data_ptr() in memories:
            value = value.clone()
        memories.add(value.untyped_storage().data_ptr())
        part[name] = value
        shapes[name] = tuple(value.shape)
        if sum(other.nbytes for other in part.values()) >= max_file_bytes:
            flush()
    flush()
    return shapes, paths
