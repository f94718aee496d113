"""A pool whose programs run on every node of a cluster."""

from __future__ import annotations

import logging
from functools import partial

from laurel.config.sandbox import SandboxConfig
from laurel.environments.sandbox.node_crew import ClusterNodes, NodeCrew
from laurel.environments.sandbox.open_pool import accepted_tier, say_tier
from laurel.environments.sandbox.pool import SandboxPool

_log = logging.getLogger(__name__)


def open_pool_on(config: SandboxConfig, nodes: ClusterNodes) -> SandboxPool:
    """A pool of `num_workers` on every node, each node in the best tier that it gives.

    Verdicts are drawn in this process. The pool's tier is that of the worst node; a result has that
    of its own.

    Args:
        config: What is asked for.
        nodes: Of the cluster.

    Raises:
        ConfigError: A node gives no tier that the configuration accepts.
        WorkerError: A node could not start its process.
    """
    crew = NodeCrew(
        nodes,
        num_workers=config.num_workers,
        limits_mb=config.memory_mb + config.disk_mb,
        accept=partial(accepted_tier, config),
        cgroup=config.cgroup,
    )
    alike: dict[str, list[str]] = {}
    for node in crew.nodes:
        alike.setdefault(node.detection.sentence(), []).append(node.address)
    for node in crew.nodes:
        addresses = alike.pop(node.detection.sentence(), None)
        if addresses is not None:
            say_tier(node.detection, node.tier, where=f"{', '.join(addresses)}: ")
    _log.info("%d sandbox workers on %d nodes", crew.size, len(crew.nodes))
    return SandboxPool(
        tier=crew.tier, num_workers=crew.size, backlog=config.backlog,
        make_runner=crew.make_runner, end_runners=crew.close,
    )  # fmt: skip
