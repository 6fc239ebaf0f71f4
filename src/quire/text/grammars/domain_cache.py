"""A cache whose entries belong to cache domains; all domains share its size limits."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class _Kept(NamedTuple, Generic[Value]):
    value: Value
    num_bytes: int


class DomainCache(Generic[Value]):
    """A cache in which a value is found only in the domain for which it was stored. Not
    thread-safe.

    If the cache is too large, the least recently used value of the domain with the most bytes is
    evicted. Of domains with equally many bytes, the least recently used domain loses a value. So a
    domain can't evict values of smaller domains. Invariant: no domain is empty.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        """`max_entries` and `max_bytes` bound all domains together."""
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_entries = 0
        self._num_bytes = 0
        self._domains: OrderedDict[str, OrderedDict[Hashable, _Kept[Value]]] = OrderedDict()
        self._domain_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return self._num_entries

    def find(self, domain: str, key: Hashable) -> Value | None:
        """The stored value, which becomes the most recently used value; None if the key has no
        value."""
        entries = self._domains.get(domain)
        if entries is None or key not in entries:
            return None
        self._domains.move_to_end(domain)
        entries.move_to_end(key)
        return entries[key].value

    def store(self, domain: str, key: Hashable, value: Value, num_bytes: int) -> None:
        """Store `value` and count it as `num_bytes`, unless the key already has a value."""
        entries = self._domains.setdefault(domain, OrderedDict())
        self._domains.move_to_end(domain)
        if key not in entries:
            entries[key] = _Kept(value, num_bytes)
            self._add(domain, 1, num_bytes)
        while self._num_entries > self._max_entries or self._num_bytes > self._max_bytes:
            self._forget_one()

    def forget(self, domain: str, key: Hashable) -> None:
        """Drop the value of the key, if there is one."""
        entries = self._domains.get(domain)
        if entries is None or key not in entries:
            return
        self._add(domain, -1, -entries.pop(key).num_bytes)
        if not entries:
            del self._domains[domain], self._domain_bytes[domain]

    def _forget_one(self) -> None:
        # `max` returns the first of equal domains, which is the least recently used.
        domain = max(self._domains, key=self._domain_bytes.__getitem__)
        self.forget(domain, next(iter(self._domains[domain])))

    def _add(self, domain: str, num_entries: int, num_bytes: int) -> None:
        self._num_entries += num_entries
        self._num_bytes += num_bytes
        self._domain_bytes[domain] = self._domain_bytes.get(domain, 0) + num_bytes
