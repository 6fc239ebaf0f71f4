"""The open connections of a server: how many, from which addresses, and which are idle.

Bounds their number, since each takes a file descriptor, and the number of one address. At a bound,
connections that wait for their clients are closed before a new one is refused: first those of the
address that has most of them, and of these the one that has waited longest. Pure but for the clock
that it is given. `listener` asks it before it accepts, `connection` says how each one stands.
"""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Protocol

LEAST_WAIT_S = 1.0
"""How long a connection must have waited before it may be closed for another: a client that has
just connected is about to send its request."""

CLOSED_AT_ONCE = 16
"""Idle connections closed in one turn of the event loop, whose descriptors are free in the next."""

_IPV6_PREFIX = 64
"""One customer of a network has a whole IPv6 network of this size, so it counts as one address."""


class Closable(Protocol):
    """A connection, as far as this module needs one."""

    def close_idle(self) -> None:
        """Close it; `OpenConnections.remove` is called once it is closed."""


class OpenConnections:
    """Counts the connections of one server and finds those that may be closed for others.

    num_refused: connections closed at once because their address had too many. num_closed_idle:
    connections closed while they waited for their clients, because others wanted their places.

    Invariant: `_waiting` and `_uploading` have, by address, connections of `_address_of`, each in
    one of the two at most, and in the order of the time since which they have waited.
    """

    def __init__(
        self,
        max_open: int | None = None,
        max_per_address: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_open, max_per_address: None: no bound. clock: in seconds."""
        self.max_open = max_open
        self.num_refused = 0
        self.num_closed_idle = 0
        self.on_room: Callable[[], None] | None = None
        """Called when a connection has ended."""
        self._max_per_address = max_per_address
        self._clock = clock
        self._address_of: dict[Closable, str] = {}
        self._num_of: Counter[str] = Counter()
        # For each address its connections, with the time since which each waits for its client.
        self._waiting: dict[str, dict[Closable, float]] = {}
        self._uploading: dict[str, dict[Closable, float]] = {}

    @property
    def num_open(self) -> int:
        return len(self._address_of)

    def has_room(self) -> bool:
        """Whether one more may be accepted."""
        return self.max_open is None or self.num_open < self.max_open

    def make_room(self) -> bool:
        """Close some idle connections of the address that has most; returns whether there were any.

        First those that wait for a request, then those whose bodies have stopped coming.
        """
        for kind in (self._waiting, self._uploading):
            # An address whose connections have all just begun to wait has none to give.
            for address in sorted(kind, key=lambda each: len(kind[each]), reverse=True):
                if self._close_idle(kind, address, CLOSED_AT_ONCE):
                    return True
        return False

    def admit(self, connection: Closable, address: str) -> bool:
        """Count a new connection; False: its address has as many as it may, and none is idle.

        address: as the socket has it; "" for a socket without one.
        """
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
        """It has ended. May be called for one that was not admitted."""
        address = self._address_of.get(connection)
        if address is None:
            return
        self.note_answering(connection)
        del self._address_of[connection]
        self._num_of[address] -= 1
        if not self._num_of[address]:
            del self._num_of[address]
        if self.on_room is not None:
            self.on_room()

    def note_waiting(self, connection: Closable) -> None:
        """No request is being answered, and none has come whole. It keeps the time since which it
        waits: bytes of a head that does not end change nothing."""
        address = self._address_of.get(connection)
        if address is None or connection in self._waiting.get(address, ()):
            return
        self.note_answering(connection)
        self._waiting.setdefault(address, {})[connection] = self._clock()

    def note_uploading(self, connection: Closable) -> None:
        """A piece of a body has come, but not its end. It waits from now on."""
        address = self._address_of.get(connection)
        if address is not None:
            self.note_answering(connection)
            self._uploading.setdefault(address, {})[connection] = self._clock()

    def note_answering(self, connection: Closable) -> None:
        """A request is being answered: the connection is not idle."""
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
        """Close those of an address that have waited longest; returns them."""
        last_s = self._clock() - LEAST_WAIT_S
        found = kind.get(address, {}).items()
        idle = [each for each, since_s in islice(found, most) if since_s <= last_s]
        for each in idle:
            self.note_answering(each)  # it is closing: no other may have its place
            self.num_closed_idle += 1
            each.close_idle()
        return idle


def _group(address: str) -> tuple[str, bool]:
    """The group that an address is counted in, and whether its connections are bounded.

    Those of this machine are not: its users and its reverse proxy come from there.
    """
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
