"""uvicorn's reading of HTTP, with limits that it does not have."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_CONNECTIONS = 8192
_HEAD_SECONDS = 10.0
"""From the first byte of a request, or the beginning of a connection, to the end of its head."""
_MOST_HEAD_BYTES, _MOST_HEADERS = 16 * 2**10, 64
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections that send a head slowly or without end, and those beyond the most."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Of a head that has not ended, as they came."""
    _parsed_bytes = 0
    """Of a head, as the parser gives its parts: also where it came in one read."""
    _is_in_head = True
    has_begun = False
    """Whether the first byte of a request has come."""

    @property
    def is_before_a_head(self) -> bool:
        """Whether a request is expected whose head has not all come: the first one of a connection,
        or one that has begun."""
        return self._timer is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.close()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request, or several."""
        if self._is_in_head and b"pgrade" in data:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.has_begun = True
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        """Part of the first line."""
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._parsed_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of a head."""
        self._have_head()
        if len(self.headers) > _MOST_HEADERS or self._parsed_bytes > _MOST_HEAD_BYTES:
            self.transport.close()
            return
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = self._parsed_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_SECONDS, self._close_slow)

    def _have_head(self) -> None:
        self._is_in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_slow(self) -> None:
        self._timer = None
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The same without the wish for another protocol, which a server may pass over (RFC 9110, 7.8).

    The parser would take the body for that protocol's: Java's client asks for h2c with every POST.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + rest
