"""Answers that were kept, so that a later call can go on from them.

In memory, each tenant's apart and bounded in bytes, so that no tenant's answers push out another's.
Knows no API: what went in and what came out are JSON values, and an answer is JSON. Called by the
routes of `responses`; made by `launch`.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from quire.errors import InvalidRequestError

_OVERHEAD_BYTES = 1024
"""Of each answer in memory beside its JSON: this bounds their number, too."""


MAX_HISTORY_BYTES = 16 << 20
"""Of the JSON of all items of a conversation that is gone on in: a call of a few bytes would have
all of the store read, and held as long as it runs."""


class Owner(NamedTuple):
    """Who alone finds an answer.

    tenant: whose room it takes. caller: where the server has no keys, what tells apart those who
    call it; "" where nothing does.
    """

    tenant: str
    caller: str = ""


@dataclass(frozen=True, slots=True)
class StoredItems:
    """json: a list of items. ids: theirs, in the same order."""

    json: bytes = b"[]"
    ids: tuple[str, ...] = ()

    def read(self) -> list[dict[str, Any]]:
        """The items."""
        found: list[dict[str, Any]] = msgspec.json.decode(self.json)
        return found


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """answer: JSON. given, made: the items that went in and that came out. previous_id: the answer
    that it goes on from, whose items come before."""

    answer_id: str
    answer: bytes
    given: StoredItems
    made: StoredItems
    previous_id: str | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """What went in, then what came out."""
        return self.given.read() + self.made.read()

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Theirs."""
        return self.given.ids + self.made.ids

    @property
    def num_item_bytes(self) -> int:
        """Of the items' JSON."""
        return len(self.given.json) + len(self.made.json)

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD_BYTES + len(self.answer) + self.num_item_bytes


class AnswerStore:
    """The answers that are kept, each tenant's with the one used least recently first.

    Invariant: a tenant's have `_num_bytes` together, at most max_bytes; `_of_item` has every item
    of an answer that is there, by owner and id.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        """max_bytes: of each tenant's answers; 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._num_bytes: dict[str, int] = {}
        self._answers: dict[str, OrderedDict[tuple[Owner, str], StoredAnswer]] = {}
        self._of_item: dict[tuple[Owner, str], str] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def num_bytes(self, tenant: str) -> int:
        """Of a tenant's answers."""
        return self._num_bytes.get(tenant, 0)

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def keep(self, owner: Owner, stored: StoredAnswer) -> None:
        """Keep one more, in place of the tenant's own that were used least recently; not one that
        is larger than all that a tenant may keep."""
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
        """An owner's answer; None: it is not kept, or no longer. It counts as used."""
        kept = self._answers.get(owner.tenant, OrderedDict())
        stored = kept.get((owner, answer_id))
        if stored is not None:
            kept.move_to_end((owner, answer_id))
        return stored

    def history(
        self, owner: Owner, answer_id: str
    ) -> Generator[None, None, list[dict[str, Any]] | None]:
        """All items of the conversation up to an answer; None: some of it is not kept. May pause at
        every yield. Raises InvalidRequestError where it is too long."""
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
        """Those items that are in an owner's answers, or in what went into them. Each answer is
        read once, however many of its items are asked for."""
        wanted: dict[str, set[str]] = {}
        for item_id in item_ids:
            if (answer_id := self._of_item.get((owner, item_id))) is not None:
                wanted.setdefault(answer_id, set()).add(item_id)
        found: dict[str, dict[str, Any]] = {}
        for answer_id, ids in wanted.items():
            stored = self.find(owner, answer_id)
            assert stored is not None, "items go with their answer"
            found |= {item["id"]: item for item in stored.items if item["id"] in ids}
        return found

    def drop(self, owner: Owner, answer_id: str) -> bool:
        """Forget an answer; says whether there was one."""
        stored = self._answers.get(owner.tenant, OrderedDict()).pop((owner, answer_id), None)
        if stored is None:
            return False
        self._num_bytes[owner.tenant] -= stored.num_bytes
        for item_id in stored.item_ids:
            if self._of_item.get((owner, item_id)) == answer_id:
                del self._of_item[owner, item_id]
        return True
