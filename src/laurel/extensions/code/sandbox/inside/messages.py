"""Sends messages between a job's monitor and its client: a header in JSON, and parts of bytes."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!I")
_LARGEST = 1 << 28
_AT_ONCE = 1 << 18


def send(link: socket.socket, header: dict[str, Any], *parts: bytes) -> None:
    """Send a message; raise OSError if the other end is gone."""
    head = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    link.sendall(b"".join([_LENGTH.pack(len(head)), head, *parts]))


def receive(
    link: socket.socket, deadline: float | None = None
) -> tuple[dict[str, Any], list[bytes]]:
    """Receive the next message.

    Args:
        deadline: The time of `time.monotonic` until which to wait; None waits forever.

    Raises:
        TimeoutError: No message came before the deadline.
        ConnectionError: The connection is closed.
    """
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, deadline))
    header: dict[str, Any] = json.loads(_exactly(link, length, deadline))
    return header, [_exactly(link, size, deadline) for size in header.pop("parts")]


def _exactly(link: socket.socket, size: int, deadline: float | None) -> bytes:
    if size > _LARGEST:
        raise ConnectionError(f"a message of {size} bytes is too large")
    received = bytearray()
    while len(received) < size:
        if deadline is not None:
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = link.recv(min(size - len(received), _AT_ONCE))
        if not part:
            raise ConnectionResetError("the process is gone")
        received += part
    return bytes(received)
