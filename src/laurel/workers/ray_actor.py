"""Objects of any class as Ray actors: `ActorMaker(MyClass).remote(...)`."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from laurel.errors import ConfigError, MissingDependencyError
from laurel.observe.user_code import ForkGuard
from laurel.workers.reservations import SETTLING, Resources, refusal, room

try:
    import ray
    from ray import cloudpickle
except ImportError as error:
    raise MissingDependencyError.of("ray", extra="ray", purpose="a Ray actor") from error

from laurel.workers.ray_cluster import ANY_NODE, RayCluster, Reservation, joined_cluster
from laurel.workers.ray_group import RayGroup

ADDRESS = "RAY_ADDRESS"
"""Environment variable that names the cluster to use."""

_starting = threading.Lock()
# The cluster that actors were started on, until this process ends.
_own: RayCluster | None = None


class ActorMaker:
    """A factory of Ray actors that each hold an object of a class.

    The handle has every public method of the class. Where the object cannot be made, each call of
    its methods raises that error. An actor ends with its last handle, and with this process.
    """

    def __init__(
        self,
        held: type,
        *,
        make: Callable[..., Any] | None = None,
        gpus: Callable[..., float] | None = None,
        **options: Any,
    ) -> None:
        """Take the class and the function that makes its objects.

        Args:
            held: The class, whose public methods the handle has.
            make: Makes the object in the actor, of the arguments of `remote`; None: the class.
            gpus: How many GPUs the actor takes, of the same arguments, where the cluster has any
                and `options` do not say; None: none.
            options: Ray's options of the actor: `num_cpus`, `num_gpus`, `name`, ...
        """
        self._held = held
        self._make = make or held
        self._gpus = gpus
        self._options = options

    def options(self, **options: Any) -> ActorMaker:
        """Copy the factory with other options of Ray."""
        merged = self._options | options
        return ActorMaker(self._held, make=self._make, gpus=self._gpus, **merged)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Make the object in a process of its own, and return the actor's handle at once.

        Where this process is not connected to Ray, it uses the cluster that RAY_ADDRESS names, or
        starts one on this machine that ends with this process.

        Raises:
            TypeError: The class is not made with such arguments.
            ConfigError: A cluster of our own has not the slots.
        """
        inspect.signature(self._held).bind(*args, **kwargs)
        options = dict(self._options)
        wanted = self._gpus(*args, **kwargs) if self._gpus and "num_gpus" not in options else 0
        connect_ray()
        if wanted and has_gpus():
            options["num_gpus"] = wanted
        # Ray would wait without a message for resources that no node will ever have.
        if _own is not None and not os.environ.get(ADDRESS):
            each = Resources(
                cpus=options.get("num_cpus", 1),  # Ray's own rule for where an actor may start
                gpus=options.get("num_gpus") or 0,
                others=options.get("resources") or {},
            )
            _nodes_with_room(_own, self._held.__name__, each, groups=1, size=1)
        actor: Any = ray.remote(_actor_class(self._held))
        payload = cloudpickle.dumps((self._make, args, kwargs))
        return (actor.options(**options) if options else actor).remote(payload, sys.path)


def connect_ray() -> None:
    """Connect this process to Ray if necessary, as `ActorMaker.remote` describes."""
    global _own
    with _starting:
        if ray.is_initialized():
            return
        if _own is None:
            atexit.register(_end)
        else:
            _own.shutdown()  # somebody has ended Ray in this process; only files are left
        _own = RayCluster(os.environ.get(ADDRESS) or None)


def has_gpus() -> bool:
    """Report whether the cluster has any GPU."""
    return bool(ray.cluster_resources().get("GPU", 0) > 0)


def _end() -> None:
    if _own is not None:
        _own.shutdown()


def _nodes_with_room(
    cluster: RayCluster, role: str, each: Resources, *, groups: int, size: int
) -> list[str]:
    # The node of each worker of several groups; waits for resources that are just being released.
    deadline = time.monotonic() + SETTLING
    while True:
        states = cluster.nodes()
        found = assign_nodes([room(each, state.free) for state in states], groups, size)
        if found is not None:
            return [states[index].id for index in found]
        never = assign_nodes([room(each, state.total) for state in states], groups, size) is None
        if never or time.monotonic() > deadline:
            why = "there is no room" + (f" for {size} on one node" if size > 1 else "")
            raise ConfigError(refusal(role, groups * size, each, states, why, busy=not never))
        time.sleep(0.05)


def assign_nodes(rooms: Sequence[int], groups: int, size: int) -> list[int] | None:
    """Assign a node to each worker of several groups; None where there is no room.

    Args:
        rooms: For how many workers each node has room.
        size: Workers of each, which share a node, unless that is more than any node has room for.
    """
    if max(rooms, default=0) < size:
        singly = [node for node, free in enumerate(rooms) for _ in range(min(free, groups * size))]
        return singly[: groups * size] if len(singly) >= groups * size else None
    whole = [node for node, free in enumerate(rooms) for _ in range(min(free // size, groups))]
    if len(whole) < groups:
        return None
    return [node for node in whole[:groups] for _ in range(size)]


class GroupBeside(RayGroup):
    """A group of workers that an actor starts, on the cluster that it is on.

    Reserved slots are a run's, and would be lost to it when the actor is killed. These are not
    reserved: they are free as soon as the workers end, and those end with the actor.
    """

    def __init__(
        self,
        role: str,
        each: Resources,
        groups: int,
        size: int,
        worker_class: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Start the workers as `RayGroup` does, for groups of `size` that share a node each.

        Raises:
            ConfigError: There is no room for them.
            WorkerError: A worker could not be made.
        """
        node_ids = _nodes_with_room(joined_cluster(), role, each, groups=groups, size=size)
        slots = Reservation(role=role, each=each, node_ids=node_ids)
        super().__init__(slots, worker_class, *args, **kwargs)


class SpreadGroup(RayGroup):
    """A group of one worker without a slot; several are spread evenly over the nodes.

    The replacement of a lost worker may be on another node.
    """

    def __init__(
        self,
        role: str,
        each: Resources,
        worker_class: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Start the worker as `RayGroup` does; it has resources, or Ray would place it anywhere.

        Raises:
            ConfigError: There is no room for it.
            WorkerError: The worker could not be made.
        """
        _nodes_with_room(joined_cluster(), role, each, groups=1, size=1)
        slot = Reservation(role=role, each=each, node_ids=[ANY_NODE])
        super().__init__(slot, worker_class, *args, **kwargs)


class Holder:
    """The actor: it holds the object, or the error of making it."""

    def __init__(self, payload: bytes, paths: list[str]) -> None:
        """Make the object.

        Args:
            payload: Pickled factory and arguments.
            paths: Module search path of the process that asked for it.
        """
        sys.path += [path for path in paths if path not in sys.path]
        if not ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs that are there are others'
        self._held: Any = None
        self._failure: Exception | None = None
        self._trace: TracebackType | None = None
        try:
            make, args, kwargs = cloudpickle.loads(payload)
            with ForkGuard():
                self._held = make(*args, **kwargs)
        except Exception as error:  # Ray would put an error of its own in its place
            self._failure, self._trace = error, error.__traceback__

    def __repr__(self) -> str:
        return type(self).__name__


def _actor_class(held: type) -> type[Holder]:
    # A holder with the public methods of a class, except those that the class itself answers.
    methods = {
        name: _forwarded(name)
        for name in dir(held)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(held, name))
    }
    named = {"__module__": __name__, "__doc__": held.__doc__}
    return type(held.__name__, (Holder,), {**named, **methods})


def _forwarded(method: str) -> Callable[..., Any]:
    def call(self: Holder, *args: Any, **kwargs: Any) -> Any:
        if self._failure is None:
            with ForkGuard():
                return getattr(self._held, method)(*args, **kwargs)
        if method != "shutdown":  # there is nothing to shut down
            raise self._failure.with_traceback(self._trace)
        return None

    call.__name__ = method
    return call
