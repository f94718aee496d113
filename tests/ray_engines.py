"""Engines in Ray actors, for tests. They take seconds to start: share them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laurel.config.grpo import GenerationConfig
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.load import EngineMaker, GeneratorSpec, TransformersMaker
from laurel.models.checkpoint.export import save_policy
from laurel.models.spec import ModelSpec
from laurel.protocols import WorkerGroup
from laurel.workers.reservations import Resources
from processes import forked

MAX_LENGTH = 1024


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """A small cluster; inside another of these it is the same."""
    ray_cluster = pytest.importorskip("laurel.workers.ray_cluster", exc_type=ImportError)
    with forked():
        started = ray_cluster.RayCluster(cpus=4, gpus=0, object_store_bytes=80 * 2**20)
    with started:
        yield started


def maker(directory: str, policy: Any, tokenizer: Any, *, max_concurrent: int) -> EngineMaker:
    """Saves a policy of the test, and says how an engine is made of it."""
    save_policy(Path(directory), policy, tokenizer, card="")
    return TransformersMaker(
        model=ModelSpec(name=directory, precision="float32"),
        device="cpu",
        cpu_threads=1,
        spec=GeneratorSpec(
            settings=GenerationConfig(max_concurrent=max_concurrent),
            end_ids=(tokenizer.eos_token_id,),
            max_length=MAX_LENGTH,
        ),
    )


def groups(
    cluster: Any,
    make_engine: EngineMaker,
    count: int,
    *,
    limit: float = 60.0,
) -> Callable[[int], WorkerGroup]:
    """For `GeneratorReplicas`: each replica has a slot of its own, also after a restart."""
    from laurel.workers.ray_group import RayGroup

    slots = cluster.reserve("generation", count, Resources(cpus=0.5))

    def make_group(index: int) -> WorkerGroup:
        return RayGroup(slots.part("generation", [index]), EngineWorker, make_engine, limit=limit)

    return make_group
