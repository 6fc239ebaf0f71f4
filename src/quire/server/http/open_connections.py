"""The open connections of a server: how many, from which addresses, and which are idle.

Bounds the number of connections, since each takes a file descriptor, and the number per address. At
a bound, idle connections are closed to make room: first those of the address with the most idle
connections, and of these the ones that have waited longest. `listener` asks this module before it
accepts a connection; `connection` reports the state of each connection.
"""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Protocol

LEAST_WAIT_S = 1.0
"""Seconds that a connection must have been idle before it may be closed to make room: a client that
has just connected will send its request soon."""

CLOSED_AT_ONCE = 16
"""Maximum number of idle connections closed in one turn of the event loop. Their file descriptors
are free in the next turn."""

_IPV6_PREFIX = 64
"""Prefix length of an IPv6 network that counts as one address. Providers assign such a network to
one customer."""


class Closable(Protocol):
    """The interface of a connection that this module needs."""

    def close_idle(self) -> None:
        """Close the connection; `OpenConnections.remove` is called once it is closed."""


class OpenConnections:
    """Counts the connections of one server and closes idle connections to make room for others.

    Invariant: `_waiting` and `_uploading` are disjoint subsets of the connections in `_address_of`,
    by address. In each, the connection that has waited longest is first.
    """

    def __init__(
        self,
        max_open: int | None = None,
        max_per_address: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_open` and `max_per_address` of None mean no bound. `clock` is in seconds."""
        self.max_open = max_open
        #: Number of connections that were closed on arrival because their address had too many.
        self.num_refused = 0
        #: Number of connections that were closed while they waited for their clients, to make room
        #: for others.
        self.num_closed_idle = 0
        #: Called when a connection has ended.
        self.on_room: Callable[[], None] | None = None
        self._max_per_address = max_per_address
        self._clock = clock
        self._address_of: dict[Closable, str] = {}
        self._num_of: Counter[str] = Counter()
        # Maps each address to its connections, with the time since which each has waited.
        self._waiting: dict[str, dict[Closable, float]] = {}
        self._uploading: dict[str, dict[Closable, float]] = {}

    @property
    def num_open(self) -> int:
        return len(self._address_of)

    def has_room(self) -> bool:
        """Whether another connection may be accepted."""
        return self.max_open is None or self.num_open < self.max_open

    def make_room(self) -> bool:
        """Close some connections of the address with the most idle connections; returns whether
        any was closed. First come connections that wait for a request, then stalled uploads."""
        for kind in (self._waiting, self._uploading):
            # Try the next address if no connection of this one has waited long enough.
            for address in sorted(kind, key=lambda each: len(kind[each]), reverse=True):
                if self._close_idle(kind, address, CLOSED_AT_ONCE):
                    return True
        return False

    def admit(self, connection: Closable, address: str) -> bool:
        """Count a new connection; returns False if its address has too many and none is idle.
        `address` is the client's address; "" for a socket without addresses."""
        group, is_bounded = _group(address)
        bound = self._max_per_address if is_bounded else None
        if bound is not None and self._num_of[group] >= bound:
            kinds = (self._waiting, self._uploading)
            if not any(self._close_idle(kind, group, 1) for kind in kinds):
                self.num_refused += 1
                return False
        self._address_of[connection] = group
        self._num_of[group] += 1
        return True

    def remove(self, connection: Closable) -> None:
        """Remove a connection that has ended. Ignores connections that were not admitted."""
        address = self._address_of.get(connection)
        if address is None:
            return
        self.record_answering(connection)
        del self._address_of[connection]
        self._num_of[address] -= 1
        if not self._num_of[address]:
            del self._num_of[address]
        if self.on_room is not None:
            self.on_room()

    def record_waiting(self, connection: Closable) -> None:
        """Record that the connection waits for a complete request. If it already waits, bytes of an
        incomplete head don't restart its waiting time."""
        address = self._address_of.get(connection)
        if address is None or connection in self._waiting.get(address, ()):
            return
        self.record_answering(connection)
        self._waiting.setdefault(address, {})[connection] = self._clock()

    def record_uploading(self, connection: Closable) -> None:
        """Record that a piece of an incomplete body has arrived. The waiting time starts again."""
        address = self._address_of.get(connection)
        if address is not None:
            self.record_answering(connection)
            self._uploading.setdefault(address, {})[connection] = self._clock()

    def record_answering(self, connection: Closable) -> None:
        """Record that a request is being answered, so that the connection is not idle."""
        address = self._address_of.get(connection)
        if address is None:
            return
        for kind in (self._waiting, self._uploading):
            of_address = kind.get(address)
            if of_address is not None and of_address.pop(connection, None) is not None:
                if not of_address:
                    del kind[address]
                return

    def _close_idle(
        self, kind: dict[str, dict[Closable, float]], address: str, most: int
    ) -> list[Closable]:
        """Close the connections of an address that have waited longest; returns them."""
        last_s = self._clock() - LEAST_WAIT_S
        found = kind.get(address, {}).items()
        idle = [each for each, since_s in islice(found, most) if since_s <= last_s]
        for each in idle:
            self.record_answering(each)  # it is closing, and must not be closed twice
            self.num_closed_idle += 1
            each.close_idle()
        return idle


def _group(address: str) -> tuple[str, bool]:
    """The address or network under which `address` is counted, and whether its connections are
    bounded. This machine's connections are unbounded, since a reverse proxy may run on it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "", False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            network = ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False)
            return str(network), not found.is_loopback
        found = found.ipv4_mapped
    return str(found), not found.is_loopback
