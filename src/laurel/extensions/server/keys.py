"""Keys of a reward server, addresses that need none, and the delay of clients that guess keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Literal

Role = Literal["score", "admin"]

# Wrong keys that one address may send within a period, in seconds, before answers are delayed.
_TRIES = 10
_PERIOD = 60.0
_PAUSE = 1.0  # seconds of that delay
_MOST_ADDRESSES = 1024


class Keys:
    """Holds digests of the keys, and the role that each of them grants."""

    def __init__(self, api_key: str | None, admin_key: str | None) -> None:
        """Store the digests.

        Args:
            admin_key: Key for everything. None: the API key grants both roles, so that any client
                with it may change the server.
        """
        self._api_key = None if api_key is None else _digest(api_key.encode())
        self._admin_key = None if admin_key is None else _digest(admin_key.encode())

    def role_of(self, authorization: bytes) -> Role | None:
        """Return the role that an `Authorization` header grants; None: none."""
        is_bearer, key = _bearer(authorization)
        digest = _digest(key)
        if is_bearer and _is_same(digest, self._admin_key):
            return "admin"
        if self._api_key is None or (is_bearer and _is_same(digest, self._api_key)):
            return "admin" if self._admin_key is None else "score"
        return None


def names_a_key(authorization: bytes) -> bool:
    """Whether a header has a bearer key, be it right or wrong."""
    is_bearer, key = _bearer(authorization)
    return is_bearer and bool(key)


def _bearer(authorization: bytes) -> tuple[bool, bytes]:
    scheme, _, key = authorization.partition(b" ")
    return scheme.lower() == b"bearer", key.strip()


def _digest(key: bytes) -> bytes:
    # Digests are equally long, so the time of a comparison does not even reveal the key's length.
    return hashlib.sha256(key).digest()


def _is_same(digest: bytes, other: bytes | None) -> bool:
    return other is not None and hmac.compare_digest(digest, other)


class WrongKeys:
    """Delays the answers to an address that keeps guessing keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, int]] = OrderedDict()

    # No address is shut out: behind a proxy, and on loopback, all clients have the same address,
    # and one client with an old key must not end the scores of all others. Keys are safe from
    # guessing by their length; the delay keeps a guessing client from filling the log, and the
    # server's time.
    def pause(self, client: str) -> float:
        """Count a wrong key; return the seconds to delay its answer."""
        now = self._clock()
        began, count = self._tried.pop(client, (now, 0))
        if now - began >= _PERIOD:
            began, count = now, 0
        self._tried[client] = began, count + 1
        if len(self._tried) > _MOST_ADDRESSES:
            self._tried.popitem(last=False)
        return _PAUSE if count >= _TRIES else 0.0


Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Loopback, private and link-local addresses: packets with one of them arrive from nowhere else.
_PRIVATE: tuple[Network, ...] = (
    *map(ipaddress.IPv4Network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    ipaddress.IPv4Network("169.254.0.0/16"),
    *map(ipaddress.IPv6Network, ("::1/128", "fc00::/7", "fe80::/10")),
)
_OF_PROXIES = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"))


def private_network(text: str) -> Network:
    """Parse a range of private addresses such as 10.0.0.0/8, or a single address.

    Raises:
        ValueError: It is not a range, or not all of it is loopback or private. Says which.
    """
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{error}; a range is written as 10.0.0.0/8") from None
    if not any(network.version == p.version and network.subnet_of(p) for p in _PRIVATE):  # type: ignore[arg-type]
        raise ValueError(
            "only loopback and private addresses may do without a key, those of "
            f"{', '.join(map(str, _PRIVATE))}"
        )
    return network


class OpenAddresses:
    """Holds addresses whose requests for scores need no key.

    The other end of the connection counts; no header can change it. A request that came through a
    proxy has the proxy's address, and one that a web page sends has that of the person who views
    the page: where a header shows either, a key is needed.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)

    def opens(self, client: str, headers: Collection[bytes]) -> bool:
        """Whether a request needs no key."""
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
    """Whether an address is of this machine; a name is not an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
