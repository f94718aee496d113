"""Who may ask what: the keys of a reward server, and how those are slowed who try others."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

Role = Literal["score", "admin"]

_TRIES = 10
_PERIOD = 60.0
"""Seconds in which one address may try so many wrong keys without being slowed."""
_PAUSE = 1.0
"""Seconds that the answer to every further one takes."""
_MOST_ADDRESSES = 1024


class Keys:
    """The keys, of which only digests are held, and what each of them opens."""

    def __init__(self, api_key: str | None, admin_key: str | None) -> None:
        """Take the keys.

        Args:
            api_key: For scores; None: nobody needs one for those.
            admin_key: For everything. None: the API key is; then that of who only asks for scores
                may change the server as well.
        """
        self._api_key = None if api_key is None else _digest(api_key.encode())
        self._admin_key = None if admin_key is None else _digest(admin_key.encode())

    def role_of(self, authorization: bytes) -> Role | None:
        """What a header opens; None: nothing."""
        is_bearer, key = _bearer(authorization)
        digest = _digest(key)
        if is_bearer and _is_same(digest, self._admin_key):
            return "admin"
        if self._api_key is None or (is_bearer and _is_same(digest, self._api_key)):
            return "admin" if self._admin_key is None else "score"
        return None


def names_a_key(authorization: bytes) -> bool:
    """Whether a header has a key in the form that is read here, be it right or wrong."""
    is_bearer, key = _bearer(authorization)
    return is_bearer and bool(key)


def _bearer(authorization: bytes) -> tuple[bool, bytes]:
    """Whether the scheme of a header is the one that is read here, and what follows it."""
    scheme, _, key = authorization.partition(b" ")
    return scheme.lower() == b"bearer", key.strip()


def _digest(key: bytes) -> bytes:
    """As long for every key, so the time of a comparison tells nothing, not even its length."""
    return hashlib.sha256(key).digest()


def _is_same(digest: bytes, other: bytes | None) -> bool:
    return other is not None and hmac.compare_digest(digest, other)


class WrongKeys:
    """Slows an address that keeps trying keys.

    It shuts nobody out: behind a proxy, and on loopback, everybody has the same address, and one
    client with an old key must not end the scores of all others. What keeps a key from being
    guessed is its length; this keeps whoever tries from filling the log, and the server's time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def pause(self, client: str) -> float:
        """Note a wrong key; seconds that its answer should take."""
        now = self._clock()
        began, count = self._tried.pop(client, (now, 0))
        if now - began >= _PERIOD:
            began, count = now, 0
        self._tried[client] = began, count + 1
        if len(self._tried) > _MOST_ADDRESSES:
            self._tried.popitem(last=False)
        return _PAUSE if count >= _TRIES else 0.0


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine; a name is not one."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
