"""Messages between this process and those that check answers: a line of JSON each.

One message is under way at a time in either direction, so whatever has come is one message.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_AT_ONCE = 1 << 16


def send(link: socket.socket, message: object) -> None:
    """Send a message; OSError where the other end is gone."""
    link.sendall(json.dumps(message).encode() + b"\n")


def receive(link: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next message.

    Args:
        link: The connection.
        deadline: Until when to wait, by `time.monotonic`; None waits for ever.

    Raises:
        TimeoutError: There was none before the deadline.
        ConnectionError: There will be none.
    """
    received = b""
    while not received.endswith(b"\n"):
        if deadline is not None:
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = link.recv(_AT_ONCE)
        if not part:
            raise ConnectionResetError("the process is gone")
        received += part
    message: dict[str, Any] = json.loads(received)
    return message
