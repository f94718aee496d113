"""How the ranks of a group find each other for torch.distributed."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from laurel.errors import ConfigError

if TYPE_CHECKING:
    import torch

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a worker stands in its group: the first argument that its class is made with."""

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Index of its device among those that it sees (0 where it sees only its own)."""
    master_address: str = LOOPBACK
    master_port: int = 0
    """0 where there is nobody to meet."""
    listener: int | None = None
    """In the process of rank 0: descriptor of the socket that is bound to the master port."""
    host: str = LOOPBACK
    """Address of its machine for those of other groups; that of the master is for its own."""

    def environment(self) -> dict[str, str]:
        """The same as the environment variables that libraries for torchrun read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def bind_master(address: str = LOOPBACK) -> tuple[int, int]:
    """A free port at an address of this machine, and the socket that keeps it.

    The port is held from here until rank 0 serves on it, so nobody can take it in between.

    Returns:
        The port, and the descriptor of the bound socket. Who calls owns the descriptor.

    Raises:
        ConfigError: The address is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.bind((address, 0))
    except OSError as error:
        holder.close()
        raise ConfigError(
            f"no port can be had at {address} ({error.strerror}): "
            "give an address of the node that rank 0 runs on"
        ) from error
    port = int(holder.getsockname()[1])
    return port, holder.detach()


def join(
    place: RankPlace, device: torch.device | str = "cpu", *, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> None:
    """Set up torch.distributed among the ranks of the group: gloo, and NCCL where devices are GPUs.

    Every rank must call it; it returns when all have. A world of one meets nobody and opens no
    port.

    Args:
        place: As the worker was given it.
        device: What the worker computes on.
        timeout: Limit of each collective. The group has its own, usually shorter, limits.
    """
    import torch
    import torch.distributed as dist

    device = torch.device(device)
    if place.world_size > 1 and place.master_address == LOOPBACK:
        # Else gloo listens at whatever address the host's name has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    store = store_of(place, timeout=timeout)
    if device.type == "cuda":
        index = place.local_rank if device.index is None else device.index
        torch.cuda.set_device(index)
        backend, bound = "cpu:gloo,cuda:nccl", torch.device("cuda", index)
    else:
        backend, bound = "gloo", None
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=bound,
    )


def store_of(place: RankPlace, *, timeout: timedelta) -> Any:
    """Where the ranks of a group leave word for each other; rank 0 holds it.

    Args:
        place: Of this process in the group.
        timeout: Limit of reaching rank 0, and of waiting for a word.
    """
    import torch.distributed as dist

    if place.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.master_address,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=place.listener,
    )


def leave() -> None:
    """Take torch.distributed down in this process. Idempotent."""
    # Whoever has joined has it loaded; to load it takes seconds.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def loopback_interface() -> str:
    """Name of the network interface that only this machine sees (`lo` on Linux)."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
