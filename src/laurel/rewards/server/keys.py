"""Who may ask what: the keys of a reward server, addresses that need none, and how those are slowed
who try other keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
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


Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_PRIVATE = tuple(
    ipaddress.ip_network(one)
    for one in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
)
"""Loopback, private and link-local addresses: from elsewhere no packet with one of them arrives."""
_OF_PROXIES = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"))


def private_network(text: str) -> Network:
    """A range of addresses such as 10.0.0.0/8, or a single address.

    Raises:
        ValueError: It is none, or not all of it is loopback or private. Says which.
    """
    try:
        found = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{error}; a range is written as 10.0.0.0/8") from None
    if not any(found.version == one.version and found.subnet_of(one) for one in _PRIVATE):  # type: ignore[arg-type]
        raise ValueError(
            "only loopback and private addresses may do without a key, those of "
            f"{', '.join(map(str, _PRIVATE))}"
        )
    return found


class OpenAddresses:
    """Addresses whose requests for scores need no key.

    What counts is the other end of the connection; no header can change it. A request that came
    through a proxy has the proxy's address, and one that a web page sends has that of whoever looks
    at the page: where a header tells of either, the address opens nothing.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)

    def opens(self, client: str, headers: Collection[bytes]) -> bool:
        """Whether a request needs no key.

        Args:
            client: The address at the other end of its connection.
            headers: Names of its headers, in small letters.
        """
        if not self._networks or b"origin" in headers or not _OF_PROXIES.isdisjoint(headers):
            return False
        try:
            address = ipaddress.ip_address(client)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine; a name is not one."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
