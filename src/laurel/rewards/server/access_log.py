"""One line of JSON for each request, written beside whoever answers it."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

_MOST_WAITING = 20_000
_SECONDS_BETWEEN = 0.1
"""A thread that every request wakes would cost more than what it writes."""


class AccessLog:
    """Writes records in a thread. A disk that is full or a reader that is slow costs lines only."""

    def __init__(self, target: str, *, say: Callable[[str], None]) -> None:
        """Open a log.

        Args:
            target: A file, which is appended to; `-` is standard error.
            say: Told once when lines begin to be lost.

        Raises:
            OSError: The file cannot be opened.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.dup(2) if target == "-" else os.open(target, flags, 0o600)
        self._say = say
        self._is_told = False
        self.dropped = 0
        """Lines that were lost."""
        self._records: deque[Mapping[str, Any]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laurel-access-log", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record; it does not wait."""
        if len(self._records) >= _MOST_WAITING:
            self._lose(1, "it is written too slowly")
        else:
            self._records.append(record)

    def close(self) -> None:
        """Write what waits, for two seconds at most. Idempotent."""
        self._closing.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(_SECONDS_BETWEEN)
            while self._records:
                self._put([self._records.popleft() for _ in range(min(256, len(self._records)))])

    def _put(self, records: list[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        left = memoryview(text.encode("ascii"))
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._lose(len(records), str(error))

    def _lose(self, count: int, why: str) -> None:
        self.dropped += count
        if not self._is_told:
            self._is_told = True
            self._say(f"warning: the access log loses lines: {why}")
