"""Engines that draw what a test says, and groups whose process can die. Nothing is computed."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from laurel.errors import WorkerError
from laurel.generation.engine_worker import EngineWorker
from laurel.types import Generated, GenerationRequest, Weights
from laurel.workers.calls import WorkerCall
from local_group import LocalGroup

ROLE = "generation"


class ScriptedEngine:
    """Its completion for a seed is that seed as one token."""

    def __init__(self, *, version: int = 0, allowed: float = math.inf) -> None:
        self.weight_version = version
        self.allowed = allowed
        """Completions that it may give."""
        self.given = 0
        self.asked: list[GenerationRequest] = []
        self.ended: list[str] = []
        self.num_open = 0
        self.failure: Exception | None = None
        """What it dies of, as soon as it draws."""
        self.refusal: Exception | None = None
        """What it says to weights."""
        self.weights: dict[str, Any] = {}
        self.is_asleep = False
        self.is_closed = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        self.asked.append(request)
        self.num_open += 1
        try:
            for index, seed in enumerate(request.seeds_G):
                while self.given >= self.allowed and self.failure is None:
                    await asyncio.sleep(0.002)
                if self.failure is not None:
                    raise self.failure
                self.given += 1
                yield completion(index, seed, self.weight_version)
        finally:
            self.num_open -= 1

    def end_conversations(self, names: Sequence[str]) -> None:
        self.ended += names

    async def update_weights(self, weights: Weights) -> None:
        if self.refusal is not None:
            raise self.refusal
        if weights.same_as == self.weight_version:
            self.weight_version = weights.version
            return
        tensors = await asyncio.to_thread(lambda: dict(weights.tensors()))
        self.weights = {name: tensor.clone() for name, tensor in tensors.items()}
        self.weight_version = weights.version

    async def sleep(self) -> None:
        self.is_asleep = True

    async def wake(self) -> None:
        self.is_asleep = False

    def close(self) -> None:
        self.is_closed = True


def completion(index: int, seed: int, version: int = 0) -> Generated:
    return Generated(
        index=index,
        ids_L=np.array([seed], np.int32),
        logprobs_L=np.zeros(1, np.float32),
        text=str(seed),
        finish_reason="stop",
        weight_version=version,
    )


class MortalGroup(LocalGroup):
    """A group whose process seems to die."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.is_dead = False
        self.dies_in: str | None = None
        """It dies in this method, when that has been done and nobody has heard of it."""
        self.calls: list[WorkerCall] = []
        super().__init__(ROLE, EngineWorker, lambda: engine)

    def _submit(self, calls: Mapping[int, WorkerCall]) -> Any:
        call = calls[0]
        self.calls.append(call)
        if not self.is_dead:
            done = super()._submit(calls)
            self.is_dead = self.is_dead or self.dies_in == call.method
        if self.is_dead:
            raise WorkerError(
                f"{ROLE} rank 0 of 1 died in {call.method}",
                role=ROLE,
                ranks=(0,),
                exit_code=WorkerError.LOST_EXIT_CODE,
            )
        return done

    def alive(self) -> list[bool]:
        return [not self.is_dead and super().alive()[0]]


class Company:
    """Makes the groups of replicas, and remembers every engine and group that it has made."""

    def __init__(self, prepare: Callable[[ScriptedEngine, int], object] | None = None) -> None:
        self.engines: list[ScriptedEngine] = []
        """In the order in which they were made."""
        self.groups: list[MortalGroup] = []
        self.made: list[int] = []
        """The replica that each was made for."""
        self.said: list[str] = []
        self._prepare = prepare or (lambda engine, number: None)
        self._lock = threading.Lock()

    def make_group(self, index: int) -> MortalGroup:
        with self._lock:
            while len(self.made) < index:  # the first ones in the order of the replicas
                self._lock.release()
                time.sleep(0.001)
                self._lock.acquire()
            engine = ScriptedEngine()
            self._prepare(engine, len(self.engines))
            group = MortalGroup(engine)
            self.engines.append(engine)
            self.groups.append(group)
            self.made.append(index)
            return group

    def asked(self, number: int) -> list[tuple[str, tuple[int, ...]]]:
        """What an engine was asked for: ids and seeds."""
        return [(request.id, request.seeds_G) for request in self.engines[number].asked]
