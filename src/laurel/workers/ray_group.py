"""Worker groups of Ray actors."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray import cloudpickle
from ray._private.state import state as ray_state
from ray.exceptions import RayError

from laurel.errors import ConfigError, WorkerError
from laurel.workers.calls import (
    ENDING,
    Failure,
    GroupCalls,
    Outcome,
    Success,
    WorkerCall,
    again,
    without_shared,
)
from laurel.workers.ray_cluster import Reservation, joined_cluster
from laurel.workers.rendezvous import LOOPBACK, RankPlace
from laurel.workers.reservations import NodeState, Resources
from laurel.workers.worker_actor import Packed, WorkerActor, package_versions

_log = logging.getLogger(__name__)

BLAMING = 10.0
"""Seconds for the other workers to end after one of them raised."""
SEPARATE_BYTES = 4096
"""Arrays of at least this size travel beside the pickle of their call."""
_ARRAY_DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


class RayGroup(GroupCalls):
    """A `WorkerGroup` of Ray actors, one per reserved slot.

    Arguments and results are copied on the way, so both sides may write into theirs.
    """

    def __init__(
        self,
        reservation: Reservation,
        worker_class: Callable[..., Any],
        *args: Any,
        limit: float = 1800.0,
        blaming: float = BLAMING,
        at_a_time: int = 1,
        **kwargs: Any,
    ) -> None:
        """Make a worker `worker_class(place, *args, **kwargs)` in every slot.

        Args:
            reservation: The slots, or shares of them; its role is the group's.
            worker_class: A class that every node can import.
            limit: Seconds until a call is late, where the call does not say.
            blaming: Seconds that the other ranks have to end after one has raised.
            at_a_time: Calls of a worker that may run concurrently; more wait.

        Raises:
            ConfigError: The nodes have different versions of Laurel, torch or transformers.
            WorkerError: A worker could not be made.
        """
        self.role, self.size = reservation.role, reservation.size
        self._limit = limit
        self._blaming = blaming
        self._at_a_time = at_a_time
        self._pids: list[int] = []
        self._node_ids = reservation.node_ids
        self._actors = [self._actor(reservation, rank) for rank in range(self.size)]
        try:
            self._build(
                reservation, cloudpickle.dumps((worker_class, WorkerCall("", args, kwargs)))
            )
        except BaseException:
            self._kill()
            raise

    def _actor(self, reservation: Reservation, rank: int) -> Any:
        each, share = reservation.each, reservation.share
        others = {name: amount * share for name, amount in each.others.items()}
        options = ray.remote(WorkerActor).options(
            num_cpus=each.cpus * share,
            num_gpus=each.gpus * share,
            memory=others.pop("memory", None),
            resources=others,
            scheduling_strategy=reservation.strategy(rank),
            max_restarts=0,  # an actor that Ray restarts has neither its worker nor its ranks
            max_task_retries=0,
            max_concurrency=self._at_a_time,
        )
        return options.remote(rank, sys.path)

    def _build(self, reservation: Reservation, payload: bytes) -> None:
        about = self._collect(dict(enumerate(s.about.remote() for s in self._actors)), "", None)
        self._pids = [pid for pid, _ in about]
        self._node_ids = [
            str(ray_state.actor_table(actor._actor_id.hex())["Address"]["NodeID"])
            for actor in self._actors
        ]
        mine = package_versions()
        for rank, (_, theirs) in enumerate(about):
            if theirs != mine:
                raise ConfigError(
                    f"{self.role} rank {rank} runs on a node with {theirs}; here it is {mine}. "
                    "Install the same versions on every node"
                )
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        several = len(set(self._node_ids)) > 1
        master = addresses[self._node_ids[0]] if several else LOOPBACK
        port, listener = 0, None
        if self.size > 1:
            bound = {0: self._actors[0].bind.remote(master)}
            port, listener = self._collect(bound, "", None)[0]
        sent = ray.put(payload)
        # As here: Ray sets it to the CPUs that it has assigned, which is one for a rank of many.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
        making = {}
        for rank, actor in enumerate(self._actors):
            sees_all = not reservation.each.gpus
            place = RankPlace(
                role=self.role,
                rank=rank,
                world_size=self.size,
                # Where it has GPUs it sees only its own.
                local_rank=self._node_ids[:rank].count(self._node_ids[rank]) if sees_all else 0,
                master_address=master,
                master_port=port,
                listener=listener if rank == 0 else None,
                host=addresses[self._node_ids[rank]],
            )
            environment = place.environment() | _devices(reservation, rank) | threads
            making[rank] = actor.build.remote(sent, place, environment)
        self._collect(making, "", None)

    def _submit(self, calls: Mapping[int, WorkerCall]) -> _RayPending:
        self._check_open()
        sent = sent_once(calls, ray.put)
        refs = {rank: self._actors[rank].run.remote(*sent[rank]) for rank in calls}
        return _RayPending(self, refs, next(iter(calls.values())).method)

    def _collect(self, refs: Mapping[int, Any], method: str, timeout: float | None) -> list[Any]:
        # The results in the order of the ranks, or one error for all failures.
        limit = self._limit if timeout is None else timeout
        deadline = time.monotonic() + limit
        waiting = {ref: rank for rank, ref in refs.items()}
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        while waiting and not any(failure.kind == "died" for failure in failures):
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not ready:
                break
            rank = waiting.pop(ready[0])
            outcome = self._fetch(ready[0], rank)
            if isinstance(outcome, Success):
                results[rank] = outcome.value
            else:
                failures.append(outcome)
                deadline = min(deadline, time.monotonic() + self._blaming)
        failures += [Failure(kind="late", rank=rank) for rank in waiting.values()]
        if not failures:
            return [results[rank] for rank in refs]
        self._raise(method, failures, limit=limit)

    def _fetch(self, ref: Any, rank: int) -> Outcome:
        try:
            answer = ray.get(ref)
        except RayError as error:
            return Failure(kind="died", rank=rank, summary=self._obituary(rank, str(error)))
        if not isinstance(answer, bytes):
            return Success(answer)
        outcome: Outcome = cloudpickle.loads(answer)
        return outcome

    def _obituary(self, rank: int, reason: str) -> str:
        where = f"process {self._pids[rank]} on " if self._pids else ""
        found = re.search(r"(Worker exit detail:|The node|node).*", reason)
        detail = " ".join((found.group(0) if found else reason).split())[:300]
        return f"{where}node {self._node_ids[rank][:8]} is gone ({detail})"

    def alive(self) -> list[bool]:
        """Report for each rank whether its process lives."""
        return [self._is_open and _state(actor) not in ("DEAD", "") for actor in self._actors]

    def _close(self) -> None:
        # The slots stay reserved.
        if not ray.is_initialized():
            return
        if self._failure is None:
            refs = {actor.close.remote(): rank for rank, actor in enumerate(self._actors)}
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ENDING)
            for ref in ready:
                outcome = self._fetch(ref, refs[ref])
                if isinstance(outcome, Failure):
                    _log.warning("%s rank %d: %s", self.role, outcome.rank, outcome.summary)
        # What was to be said has been said in `close`.
        self._kill()

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        # Until they are gone; processes are looked for where they are on this machine.
        here = own_address()
        near = {n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == here}
        pids = [p for p, node in zip(self._pids, self._node_ids, strict=False) if node in near]
        deadline = time.monotonic() + ENDING
        while time.monotonic() < deadline:
            are_dead = all(_state(actor) in ("DEAD", "") for actor in self._actors)
            if are_dead and not any(map(psutil.pid_exists, pids)):
                return
            time.sleep(0.02)


def sent_once(calls: Mapping[int, WorkerCall], send: Callable[[Any], Any]) -> dict[int, list[Any]]:
    """Send what several ranks are given once: to all of them, or, of a place of the data-parallel
    mesh, to each of its tensor- and context-parallel ranks. Their arguments are one tuple.

    Args:
        calls: By rank.

    Returns:
        What `send` gave, for each rank: for its call, then for each shared value in it.
    """
    sent: dict[int, list[Any]] = {}
    for call in calls.values():
        if id(call.args) not in sent:
            rest, shared = without_shared(call)
            sent[id(call.args)] = [send(_packed((None, rest)))]
            sent[id(call.args)] += [each.carried(send) for each in shared]
    return {rank: sent[id(call.args)] for rank, call in calls.items()}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors travel as arrays: torch's own way would copy each of them several times."""

    def reducer_override(self, value: Any) -> Any:
        is_array = (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and value.dtype in _ARRAY_DTYPES
            and value.is_contiguous()
            and not value.requires_grad
        )
        if is_array:
            return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def _packed(value: Any) -> Packed:
    stream, buffers = io.BytesIO(), list[memoryview]()

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        """Ray copies large arrays straight into its store, instead of a pickle that holds them."""
        view = buffer.raw()
        if view.nbytes >= SEPARATE_BYTES:
            buffers.append(view)
        return view.nbytes < SEPARATE_BYTES

    _Pickler(stream, protocol=5, buffer_callback=keep_out).dump(value)
    return Packed(stream.getvalue(), [np.frombuffer(view, np.uint8) for view in buffers])


class _RayPending:
    def __init__(self, group: RayGroup, refs: dict[int, Any], method: str) -> None:
        self._group = group
        self._refs = refs
        self._method = method
        self._results: list[Any] | None = None
        self._error: WorkerError | None = None

    def done(self) -> bool:
        if self._results is not None or self._error is not None:
            return True
        refs = list(self._refs.values())
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[1]) == 0

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        if self._results is not None:
            return self._results
        if self._error is not None:
            raise again(self._error)
        self._group._check_open()
        try:
            self._results = self._group._collect(self._refs, self._method, timeout)
        except WorkerError as error:
            self._error = error
            raise
        return self._results


def _devices(reservation: Reservation, rank: int) -> dict[str, str]:
    # Ray knows the GPUs of one slot; a process may own those of several.
    if not reservation.each.gpus:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if reservation.slots_each == 1:
        return {}
    assert reservation.devices is not None, "several slots a rank need whole GPUs"
    return {"CUDA_VISIBLE_DEVICES": reservation.devices[rank]}


def _state(actor: Any) -> str:
    # '' where the cluster has forgotten the actor.
    return str(ray_state.actor_table(actor._actor_id.hex()).get("State", ""))


# One worker on a node that was chosen, asked by several threads at a time.


class NodeGroup(RayGroup):
    """A group of one worker without a slot, bound to one node.

    Its worker's methods may run concurrently, unlike those of other groups, and in any order. Any
    thread may call them; all calls must have ended before the cluster is left.
    """

    def __init__(
        self,
        role: str,
        node_id: str,
        worker_class: Callable[..., Any],
        *args: Any,
        at_a_time: int,
        limit: float,
        **kwargs: Any,
    ) -> None:
        """Start the worker as `RayGroup` does; `at_a_time` of its calls run concurrently."""
        place = Reservation(role=role, each=Resources(cpus=0), node_ids=[node_id])
        super().__init__(place, worker_class, *args, at_a_time=at_a_time, limit=limit, **kwargs)


def own_address() -> str:
    """Return the address that this machine has in the cluster."""
    return str(ray.util.get_node_ip_address())


def is_on_the_only_node() -> bool:
    """Report whether there is only one node to work on, and this process is on it."""
    return [state.id for state in nodes_to_work_on()] == [ray.get_runtime_context().get_node_id()]


def nodes_to_work_on() -> list[NodeState]:
    """List the nodes that are alive, the head first.

    Nodes without CPUs are left out, such as the head of a large cluster; where no node has any,
    none is left out.
    """
    states = joined_cluster().nodes()
    return [state for state in states if state.total.get("CPU")] or states
