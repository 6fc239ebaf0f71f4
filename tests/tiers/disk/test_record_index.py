"""The index is asked by one thread while another writes to it."""

from collections.abc import Iterator
from typing import Any

from quire.tiers.disk.record import Record
from quire.tiers.disk.record_index import RecordIndex


def tail(number: int) -> Record:
    return Record(0, number.to_bytes(16, "big") + b"/3", b"parent", b"tok%d" % number, 64, 9, b"")


def test_tails_are_told_while_a_writer_adds_some() -> None:
    index = RecordIndex()

    class ChangedOnce(dict[Any, Any]):
        """A writer adds a tail after a reader has begun to iterate."""

        def values(self) -> Any:
            return self

        def __reversed__(self) -> Iterator[Any]:
            found = reversed(dict.values(self))
            if len(self) < 3:
                index.learn([tail(3)], 1)
            return found

    index.learn([tail(1), tail(2)], 1)
    index._tails[b"parent"] = ChangedOnce(index._tails[b"parent"])
    assert [each.tokens for each in index.tails(b"parent")] == [b"tok3", b"tok2", b"tok1"]
