"""The last answers of one engine about itself, and their changes since a listener's last look.

Each part of an answer is asked for again when it is due. A part that took an engine long is due
later, so that all listeners together take at most a small share of the engine's time. Made by
`live_feed`.
"""

import base64
import struct
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, Protocol

from quire.core.memory.block_records import RECORD_BYTES
from quire.engine_client.messages import Observe, Question
from quire.errors import QuireError

PARTS = ("stats", "events", "requests", "memory", "blocks", "prefixes")
"""The parts of an answer, see `engine.observation`."""

MIN_INTERVALS_S = {"prefixes": 2.0}
MIN_INTERVAL_S = 0.2
"""Seconds before a part is asked for again: for some parts, and for the others."""

SHARES = {"blocks": 0.003, "prefixes": 0.001}
SHARE = 0.002
"""Largest shares of the engine's time, for some parts and for each other part: a part that took
2 ms is due again after 1 s."""

ANSWER_S = 5.0
"""Maximum seconds to wait for an engine, which answers between two steps."""

MAX_EVENTS = 2048

_CHUNK_BYTES = RECORD_BYTES * 256


class Answering(Protocol):
    """An engine that answers questions: `FleetEngine`, or a fake."""

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """See `FleetEngine.ask`."""
        ...


class Cursor:
    """The answers of one engine that were sent to one listener."""

    def __init__(self) -> None:
        self.last_event = 0
        self.versions: dict[str, int] = {}
        self.records = b""


class EngineView:
    """The last answers of one engine.

    Invariant: `_events` has consecutive events, the last of them number `_last_event`.
    """

    def __init__(self) -> None:
        #: Whether the engine has answered the last question.
        self.answers = False
        #: Engine time of the last answer; None before the first.
        self.now_s: float | None = None
        self._latest: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._last_event = 0

    async def refresh(self, engine: Answering, parts: Collection[str], now_s: float) -> None:
        """Ask for the parts that are due. now_s: the caller's monotonic time."""
        due = tuple(part for part in parts if self._due_s.get(part, 0.0) <= now_s)
        if not due:
            return
        for part in due:  # so that other listeners don't ask meanwhile
            self._due_s[part] = now_s + MIN_INTERVALS_S.get(part, MIN_INTERVAL_S)
        try:
            found = await engine.ask(Observe(due, self._last_event), ANSWER_S)
        except QuireError:  # the engine recovers, or a step takes long
            self.answers = False
            return
        self.answers, self.now_s = True, found["now_s"]
        if "events" in due:
            self._add_events(found["last_event"], found["events"])
        for part, seconds in found["seconds"].items():
            self._latest[part] = found[part]
            self._versions[part] = self._versions.get(part, 0) + 1
            self._due_s[part] = max(self._due_s[part], now_s + seconds / SHARES.get(part, SHARE))

    def changes(self, cursor: Cursor, parts: Iterable[str]) -> dict[str, Any]:
        """The parts that are newer than the cursor, which moves to now."""
        found: dict[str, Any] = {"answers": self.answers, "now_s": self.now_s}
        for part in parts:
            if part == "events":
                found[part] = self._events_after(cursor)
            elif cursor.versions.get(part) != (version := self._versions.get(part)):
                cursor.versions[part] = version or 0
                latest = self._latest[part]
                found[part] = _block_changes(latest, cursor) if part == "blocks" else latest
        return found

    def _add_events(self, last_event: int, events: list[dict[str, Any]]) -> None:
        if last_event - len(events) != self._last_event:
            self._events.clear()  # a new process, or events were forgotten meanwhile
        self._events.extend(events)
        self._last_event = last_event

    def _events_after(self, cursor: Cursor) -> list[dict[str, Any]]:
        first = self._last_event - len(self._events)
        skipped = cursor.last_event - first
        cursor.last_event = self._last_event
        return list(islice(self._events, max(0, skipped), None))


def _block_changes(blocks: dict[str, Any], cursor: Cursor) -> dict[str, Any]:
    """The part `blocks` with the records that have changed as `changed`, or with all as `records`.

    Both are base64. A changed record has its block's number before it, in four little-endian bytes.
    """
    known, cursor.records = cursor.records, blocks["records"]
    records = cursor.records
    rest = {name: value for name, value in blocks.items() if name != "records"}
    if len(known) == len(records):
        changed = b"".join(_changed_records(known, records))
        if 2 * len(changed) < len(records):
            return rest | {"changed": base64.b64encode(changed).decode()}
    return rest | {"records": base64.b64encode(records).decode()}


def _changed_records(old: bytes, new: bytes) -> Iterable[bytes]:
    """The numbers and records of changed blocks. Equal stretches are skipped in C."""
    for start in range(0, len(new), _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, len(new))
        if old[start:end] == new[start:end]:
            continue
        for at in range(start, end, RECORD_BYTES):
            record = new[at : at + RECORD_BYTES]
            if record != old[at : at + RECORD_BYTES]:
                yield struct.pack("<I", at // RECORD_BYTES) + record
