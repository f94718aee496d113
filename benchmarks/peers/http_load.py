"""A client that asks one address as fast as it answers, in a process of its own.

Its argument is JSON: `{"url", "key", "path", "body_file", "connections", "requests"}`; the bodies
are the lines of the file, in turn. It prints JSON: seconds, and the latency of each request.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


class Connection(asyncio.Protocol):
    """One connection, one request at a time, the next as soon as the last is answered."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.buffer = bytearray()
        self.needed = -1

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        request = self.load.next_request()
        if request is None:
            self.transport.close()
            return
        self.asked = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.needed < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            self.status = int(head[9:12])
            at = head.index(b"content-length:") + 15
            self.needed = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
        if len(self.buffer) >= self.needed:
            self.load.note(self.status, time.perf_counter() - self.asked, bytes(self.buffer))
            self.buffer.clear()
            self.needed = -1
            self.ask()

    def connection_lost(self, error) -> None:
        self.load.closed(error)


class Load:
    def __init__(self, settings: dict) -> None:
        address = urlsplit(settings["url"])
        self.host, self.port = address.hostname, address.port
        head = (
            f"POST {settings['path']} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Authorization: Bearer {settings['key']}\r\nContent-Type: application/json\r\n"
        )
        self.requests = [
            f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            for body in Path(settings["body_file"]).read_bytes().splitlines()
        ]
        self.left = settings["requests"]
        self.connections = settings["connections"]
        self.latencies: list[float] = []
        self.statuses: dict[int, int] = {}
        self.open = self.connections

    def next_request(self) -> bytes | None:
        if self.left == 0:
            return None
        self.left -= 1
        return self.requests[self.left % len(self.requests)]

    def note(self, status: int, seconds: float, answer: bytes) -> None:
        self.latencies.append(seconds)
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def closed(self, error: Exception | None) -> None:
        self.open -= 1
        if self.open == 0:
            self.done.set_result(None)

    async def run(self) -> dict:
        loop = asyncio.get_running_loop()
        self.done = loop.create_future()
        began = time.perf_counter()
        for _ in range(self.connections):
            await loop.create_connection(lambda: Connection(self), self.host, self.port)
        await self.done
        return {
            "seconds": time.perf_counter() - began,
            "statuses": self.statuses,
            "latencies": self.latencies,
        }


def main() -> None:
    settings = json.loads(sys.argv[1])
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(Load(settings).run())))


if __name__ == "__main__":
    main()
