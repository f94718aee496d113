"""One worker on a node that was chosen, asked by several threads at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from laurel.distributed.reservations import NodeState, Resources
from laurel.errors import MissingDependencyError

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingDependencyError.of("ray", extra="ray", purpose="workers on every node") from error

from laurel.distributed.ray_cluster import RayCluster, Reservation
from laurel.distributed.ray_group import RayGroup
from laurel.distributed.seat import Seat


class NodeGroup(RayGroup):
    """A group of one without a slot, on one node and on no other.

    Its worker's methods may run side by side, unlike those of other groups, and in any order. Any
    thread may ask for them; whoever does must have ended before the cluster is left.
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
        """Make the worker; see `RayGroup`.

        Args:
            role: What it is.
            node_id: Where.
            worker_class: A class that the node can import.
            args: For the class.
            at_a_time: Calls that may run at a time; more wait.
            limit: Seconds until a call is late, where the call does not say.
            kwargs: For the class.

        Raises:
            ConfigError: The node has another version of Laurel, torch or transformers.
            WorkerError: The worker could not be made, or the node is gone.
        """
        self._at_a_time = at_a_time
        place = Reservation(
            role=role, each=Resources(cpus=0), group=None, node_ids=[node_id], bundles=[0]
        )
        super().__init__(place, worker_class, *args, limit=limit, **kwargs)

    def _seat(self, reservation: Reservation, rank: int) -> Any:
        options = ray.remote(Seat).options(
            num_cpus=0,
            num_gpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                reservation.node_ids[rank], soft=False
            ),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=self._at_a_time,
        )
        return options.remote(rank, sys.path)


def is_on_the_only_node() -> bool:
    """Whether there is one node to work on, and this process is on it."""
    return [state.id for state in nodes_to_work_on()] == [ray.get_runtime_context().get_node_id()]


def nodes_to_work_on() -> list[NodeState]:
    """The nodes that are alive, the head first.

    One that was started without CPUs is to be left alone, as the head of a large cluster is; where
    that is said of all of them, none is left out.
    """
    states = RayCluster().nodes()
    return [state for state in states if state.total.get("CPU")] or states
