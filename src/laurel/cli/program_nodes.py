"""Where a run has the programs of the policy run: on this machine, or on every node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from laurel.cli.places import Places
from laurel.environments.sandbox.node_crew import ClusterNodes

if TYPE_CHECKING:
    from laurel.distributed.reservations import NodeState
    from laurel.protocols import WorkerGroup


def nodes_of(places: Places) -> ClusterNodes | None:
    """The nodes that programs are run on; None: this machine. Nothing is started.

    Args:
        places: Those of the run.
    """
    return ClusterNodes(_alive, _make, _is_only_this) if places.are_remote else None


def _alive() -> Sequence[NodeState]:
    from laurel.distributed.ray_node_group import nodes_to_work_on

    return nodes_to_work_on()


def _is_only_this() -> bool:
    from laurel.distributed.ray_node_group import is_on_the_only_node

    return is_on_the_only_node()


def _make(*args: Any, **kwargs: Any) -> WorkerGroup:
    from laurel.distributed.ray_node_group import NodeGroup

    return NodeGroup(*args, **kwargs)
