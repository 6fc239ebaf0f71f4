"""A cache whose parts say nothing of one another: one for each cache domain, bounded together."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class _Kept(NamedTuple, Generic[Value]):
    value: Value
    num_bytes: int


class DomainCache(Generic[Value]):
    """What was made for a domain is found in that domain alone. Belongs to one thread at a time.

    Where there is too much, the domain that has the most bytes loses what it used least recently,
    and of several the one that used the cache least recently. So a domain can't push out those that
    have less than it has. Invariant: no domain is empty.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        """max_entries, max_bytes: of all domains together."""
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_entries = 0
        self._num_bytes = 0
        self._domains: OrderedDict[str, OrderedDict[Hashable, _Kept[Value]]] = OrderedDict()
        self._domain_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return self._num_entries

    def find(self, domain: str, key: Hashable) -> Value | None:
        """What was kept; it counts as used. None: nothing, or nothing any more."""
        entries = self._domains.get(domain)
        if entries is None or key not in entries:
            return None
        self._domains.move_to_end(domain)
        entries.move_to_end(key)
        return entries[key].value

    def keep(self, domain: str, key: Hashable, value: Value, num_bytes: int) -> None:
        """Keep `value`, which counts as num_bytes, unless the key has one."""
        entries = self._domains.setdefault(domain, OrderedDict())
        self._domains.move_to_end(domain)
        if key not in entries:
            entries[key] = _Kept(value, num_bytes)
            self._add(domain, 1, num_bytes)
        while self._num_entries > self._max_entries or self._num_bytes > self._max_bytes:
            self._forget_one()

    def forget(self, domain: str, key: Hashable) -> None:
        """Keep what the key has no longer, if it has anything."""
        entries = self._domains.get(domain)
        if entries is None or key not in entries:
            return
        self._add(domain, -1, -entries.pop(key).num_bytes)
        if not entries:
            del self._domains[domain], self._domain_bytes[domain]

    def _forget_one(self) -> None:
        # The first of equals, so the one that was used least recently.
        domain = max(self._domains, key=self._domain_bytes.__getitem__)
        self.forget(domain, next(iter(self._domains[domain])))

    def _add(self, domain: str, num_entries: int, num_bytes: int) -> None:
        self._num_entries += num_entries
        self._num_bytes += num_bytes
        self._domain_bytes[domain] = self._domain_bytes.get(domain, 0) + num_bytes
