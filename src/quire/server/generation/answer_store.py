"""Answers that were kept, so that a later call can go on from them.

In memory, bounded in bytes, each tenant's apart. Knows no API: what went in and what came out are
JSON values, and an answer is JSON. Called by the routes of `responses`; made by `launch`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

_OVERHEAD_BYTES = 1024
"""Of each answer in memory beside its JSON: this bounds their number, too."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """answer: JSON. given, made: JSON lists of the items that went in and that came out, each with
    an id. previous_id: the answer that it goes on from, whose items come before."""

    answer_id: str
    answer: bytes
    given: bytes
    made: bytes
    previous_id: str | None = None

    @property
    def given_items(self) -> list[dict[str, Any]]:
        """What went in."""
        return _decoded(self.given)

    @property
    def items(self) -> list[dict[str, Any]]:
        """What went in, then what came out."""
        return _decoded(self.given) + _decoded(self.made)

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD_BYTES + len(self.answer) + len(self.given) + len(self.made)


class AnswerStore:
    """The answers that are kept, the one used least recently first.

    Invariant: they have `_num_bytes` together, at most max_bytes; `_of_item` has every item of an
    answer that is there, by tenant and id.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        """max_bytes: 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[tuple[str, str], StoredAnswer] = OrderedDict()
        self._of_item: dict[tuple[str, str], str] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, tenant: str, stored: StoredAnswer) -> None:
        """Keep one more, in place of those used least recently; not one that is larger than all of
        the store."""
        if stored.num_bytes > self._max_bytes:
            return
        self.drop(tenant, stored.answer_id)
        self._answers[tenant, stored.answer_id] = stored
        self._num_bytes += stored.num_bytes
        for item in stored.items:
            self._of_item[tenant, item["id"]] = stored.answer_id
        while self._num_bytes > self._max_bytes:
            self.drop(*next(iter(self._answers)))

    def find(self, tenant: str, answer_id: str) -> StoredAnswer | None:
        """A tenant's answer; None: it is not kept, or no longer. It counts as used."""
        stored = self._answers.get((tenant, answer_id))
        if stored is not None:
            self._answers.move_to_end((tenant, answer_id))
        return stored

    def history(self, tenant: str, answer_id: str) -> list[dict[str, Any]] | None:
        """All items of the conversation up to an answer; None: some of it is not kept."""
        chain: list[StoredAnswer] = []
        next_id: str | None = answer_id
        while next_id is not None:
            stored = self.find(tenant, next_id)
            if stored is None:
                return None
            chain.append(stored)
            next_id = stored.previous_id
        return [item for stored in reversed(chain) for item in stored.items]

    def items_by_id(self, tenant: str, item_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Those items that are in a tenant's answers, or in what went into them. Each answer is
        read once, however many of its items are asked for."""
        wanted: dict[str, set[str]] = {}
        for item_id in item_ids:
            if (answer_id := self._of_item.get((tenant, item_id))) is not None:
                wanted.setdefault(answer_id, set()).add(item_id)
        found: dict[str, dict[str, Any]] = {}
        for answer_id, ids in wanted.items():
            stored = self.find(tenant, answer_id)
            assert stored is not None, "items go with their answer"
            found |= {item["id"]: item for item in stored.items if item["id"] in ids}
        return found

    def drop(self, tenant: str, answer_id: str) -> bool:
        """Forget an answer; says whether there was one."""
        stored = self._answers.pop((tenant, answer_id), None)
        if stored is None:
            return False
        self._num_bytes -= stored.num_bytes
        for item in stored.items:
            if self._of_item.get((tenant, item["id"])) == answer_id:
                del self._of_item[tenant, item["id"]]
        return True


def _decoded(items: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(items)
    return found
