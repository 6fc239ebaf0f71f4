"""Stored answers, which a later call can continue.

They are kept in memory, separately for each tenant and bounded in bytes, so that no tenant's
answers displace another's. The store is independent of the API: it holds the answer, its input
items and its output items as JSON. Called by the routes of `responses`; made by `launch`.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from quire.errors import InvalidRequestError

_OVERHEAD_BYTES = 1024
"""Bytes that each answer takes besides its JSON. Counting them bounds the number of answers."""


MAX_HISTORY_BYTES = 16 << 20
"""Maximum bytes of JSON in a conversation that a call continues. Without a bound, one short call
could make the server decode the tenant's whole store and hold it in memory."""


class Owner(NamedTuple):
    """The tenant and caller of an answer. Nobody else can find the answer."""

    #: The tenant whose stored bytes include the answer.
    tenant: str
    #: Digest of the keys that the call sends to a server that checks no keys; otherwise "".
    caller: str = ""


@dataclass(frozen=True, slots=True)
class StoredItems:
    """Items of a conversation."""

    #: A JSON list of the items.
    json: bytes = b"[]"
    #: Ids of the items, in the same order.
    ids: tuple[str, ...] = ()

    def read(self) -> list[dict[str, Any]]:
        """Decode the items."""
        found: list[dict[str, Any]] = msgspec.json.decode(self.json)
        return found


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer, with the items that its call added to the conversation."""

    answer_id: str
    #: The answer as JSON.
    answer: bytes
    #: Items of the call's input.
    given: StoredItems
    #: Items that were generated.
    made: StoredItems
    #: Id of the previous answer of the conversation; None for the first answer.
    previous_id: str | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input items, followed by the generated items."""
        return self.given.read() + self.made.read()

    @property
    def item_ids(self) -> tuple[str, ...]:
        """The ids of `items`, in the same order."""
        return self.given.ids + self.made.ids

    @property
    def num_item_bytes(self) -> int:
        """Bytes of the items' JSON."""
        return len(self.given.json) + len(self.made.json)

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD_BYTES + len(self.answer) + self.num_item_bytes


class AnswerStore:
    """The stored answers of all tenants. Each tenant's answers are in order of their last use.

    Invariant: `_num_bytes` has the bytes of each tenant's answers, at most max_bytes; `_of_item`
    maps every item of a stored answer, by owner and id, to the answer's id.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        """`max_bytes` bounds each tenant's answers; 0 means that nothing is stored."""
        self._max_bytes = max_bytes
        self._num_bytes: dict[str, int] = {}
        self._answers: dict[str, OrderedDict[tuple[Owner, str], StoredAnswer]] = {}
        self._of_item: dict[tuple[Owner, str], str] = {}

    @property
    def is_on(self) -> bool:
        """Whether answers are stored."""
        return self._max_bytes > 0

    def num_bytes(self, tenant: str) -> int:
        """Bytes of a tenant's answers."""
        return self._num_bytes.get(tenant, 0)

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def store(self, owner: Owner, stored: StoredAnswer) -> None:
        """Store an answer, and evict the tenant's least recently used answers to make room. An
        answer larger than the tenant's bound is not stored."""
        if stored.num_bytes > self._max_bytes:
            return
        self.drop(owner, stored.answer_id)
        kept = self._answers.setdefault(owner.tenant, OrderedDict())
        kept[owner, stored.answer_id] = stored
        self._num_bytes[owner.tenant] = self.num_bytes(owner.tenant) + stored.num_bytes
        for item_id in stored.item_ids:
            self._of_item[owner, item_id] = stored.answer_id
        while self._num_bytes[owner.tenant] > self._max_bytes:
            self.drop(*next(iter(kept)))

    def find(self, owner: Owner, answer_id: str) -> StoredAnswer | None:
        """An owner's answer, which becomes the most recently used; None if no answer has the id."""
        kept = self._answers.get(owner.tenant, OrderedDict())
        stored = kept.get((owner, answer_id))
        if stored is not None:
            kept.move_to_end((owner, answer_id))
        return stored

    def history(
        self, owner: Owner, answer_id: str
    ) -> Generator[None, None, list[dict[str, Any]] | None]:
        """All items of the conversation up to an answer; None if one of its answers is not stored.
        May pause at every yield. Raises InvalidRequestError for a conversation that is too long."""
        chain: list[StoredAnswer] = []
        next_id: str | None = answer_id
        while next_id is not None:
            stored = self.find(owner, next_id)
            if stored is None:
                return None
            chain.append(stored)
            next_id = stored.previous_id
        num_bytes = sum(stored.num_item_bytes for stored in chain)
        if num_bytes > MAX_HISTORY_BYTES:
            raise InvalidRequestError(
                f"the conversation up to {answer_id!r:.80} has {num_bytes >> 20} MiB, above the"
                f" bound of {MAX_HISTORY_BYTES >> 20} MiB; begin a new one",
                "previous_response_id",
            )
        items: list[dict[str, Any]] = []
        for stored in reversed(chain):
            items += stored.items
            yield
        return items

    def items_by_id(self, owner: Owner, item_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The items with these ids that an owner's answers contain, as input or output. Each answer
        is decoded once, however many of its items are asked for."""
        wanted: dict[str, set[str]] = {}
        for item_id in item_ids:
            if (answer_id := self._of_item.get((owner, item_id))) is not None:
                wanted.setdefault(answer_id, set()).add(item_id)
        found: dict[str, dict[str, Any]] = {}
        for answer_id, ids in wanted.items():
            stored = self.find(owner, answer_id)
            assert stored is not None, "an answer's items are dropped with it"
            found |= {item["id"]: item for item in stored.items if item["id"] in ids}
        return found

    def drop(self, owner: Owner, answer_id: str) -> bool:
        """Delete an answer; returns whether it existed."""
        stored = self._answers.get(owner.tenant, OrderedDict()).pop((owner, answer_id), None)
        if stored is None:
            return False
        self._num_bytes[owner.tenant] -= stored.num_bytes
        for item_id in stored.item_ids:
            if self._of_item.get((owner, item_id)) == answer_id:
                del self._of_item[owner, item_id]
        return True
