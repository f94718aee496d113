"""The rendezvous of a group's ranks for torch.distributed."""

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
    """A worker's rank and addresses in its group: the first argument of its class."""

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Index of its device among those that it sees (0 where it sees only its own)."""
    master_address: str = LOOPBACK
    master_port: int = 0
    """Port of the master; 0 where there is no other rank."""
    listener: int | None = None
    """Descriptor of the socket bound to the master port, in the process of rank 0."""
    host: str = LOOPBACK
    """Address of its machine for other groups; the master's address is for its own."""

    def environment(self) -> dict[str, str]:
        """Convert it to the environment variables that libraries for torchrun read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def bind_master(address: str = LOOPBACK) -> tuple[int, int]:
    """Bind a free port at an address of this machine; return it with its socket.

    The port is held until rank 0 serves on it, so no other process can take it.

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
            f"no port can be bound at {address} ({error.strerror}): "
            "give an address of the node that rank 0 runs on"
        ) from error
    port = int(holder.getsockname()[1])
    return port, holder.detach()


def join(
    place: RankPlace, device: torch.device | str = "cpu", *, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> None:
    """Set up torch.distributed among the ranks: gloo, and NCCL where devices are GPUs.

    Every rank must call it; it returns when all have. A world of one opens no port.

    Args:
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
    """Open the key-value store of a group's ranks; rank 0 holds it.

    Args:
        timeout: Limit of connecting to rank 0, and of waiting for a key.
    """
    import torch.distributed as dist

    if place.world_size == 1:
        return dist.HashStore()
    return dist.TCPStore(
        place.master_address,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=place.listener,
    )


def leave() -> None:
    """Shut torch.distributed down in this process. Idempotent."""
    # A process that has joined has it loaded; loading takes seconds.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def loopback_interface() -> str:
    """Name the loopback network interface (`lo` on Linux)."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
