"""Adds up the changes that a server has sent, for `quire top`."""

import base64
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

RECORD_BYTES = 7
"""Size of a block's record (`core.memory.block_records`)."""

MAX_STEPS = 4096
WINDOW_S = 10.0
"""Seconds of steps from which rates are computed."""

MAX_SAMPLES = 240
"""Number of histograms that are kept. Percentiles count the values since the oldest of them."""


@dataclass
class WatchedBlocks:
    """The block records of one engine."""

    num_blocks: int = 0
    owners: dict[int, str] = field(default_factory=dict)
    records: bytearray = field(default_factory=bytearray)

    def take(self, change: dict[str, Any]) -> None:
        """Apply a change: all records, or those of the blocks that have changed."""
        self.num_blocks = change["num_blocks"]
        self.owners = {int(slot): name for slot, name in change["owners"].items()}
        if (records := change.get("records")) is not None:
            self.records = bytearray(base64.b64decode(records))
            return
        changed = base64.b64decode(change["changed"])
        for at in range(0, len(changed), 4 + RECORD_BYTES):
            (block,) = struct.unpack_from("<I", changed, at)
            start = RECORD_BYTES * block
            self.records[start : start + RECORD_BYTES] = changed[at + 4 : at + 4 + RECORD_BYTES]


@dataclass
class WatchedEngine:
    """One engine. Times of steps and requests are engine time, in seconds."""

    name: str
    state: str = ""
    #: Whether the engine has answered the server's last question.
    answers: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    blocks: WatchedBlocks = field(default_factory=WatchedBlocks)
    now_s: float = 0.0

    def take(self, change: dict[str, Any]) -> None:
        """Apply what the server says has changed."""
        self.state, self.answers = change["state"], change["answers"]
        now_s = change["now_s"]
        if now_s is not None:
            if now_s < self.now_s - 1:  # a new process on another machine, whose clock began anew
                self.steps.clear()
            self.now_s = now_s
        self.facts = change.get("facts", self.facts)
        self.stats = change.get("stats", self.stats)
        self.memory = change.get("memory", self.memory)
        self.requests = change.get("requests", self.requests)
        if "blocks" in change:
            self.blocks.take(change["blocks"])
        # A new connection begins with all events that the server remembers.
        known_s = self.steps[-1]["ended_s"] if self.steps else 0.0
        for each in change.get("events", ()):
            if each["event"] == "step" and each["ended_s"] > known_s:
                self.steps.append(each)

    def recent_steps(self, seconds: float = WINDOW_S) -> Iterator[dict[str, Any]]:
        """The steps that ended in the last `seconds`, newest first."""
        for step in reversed(self.steps):
            if step["ended_s"] < self.now_s - seconds:
                return
            yield step


@dataclass
class WatchedServer:
    """A server and its engines."""

    engines: dict[str, WatchedEngine] = field(default_factory=dict)
    #: The server's own numbers in its last event.
    numbers: dict[str, Any] = field(default_factory=dict)
    _histograms: deque[dict[str, Sequence[int]]] = field(
        default_factory=lambda: deque(maxlen=MAX_SAMPLES)
    )

    def take(self, change: dict[str, Any]) -> None:
        """Apply an event of /stats/events."""
        self.numbers = change
        latest = {
            name: change[name]["counts"] for name in ("time_to_first_token_s", "inter_token_s")
        }
        if self._histograms and sum(latest["inter_token_s"]) < sum(
            self._histograms[-1]["inter_token_s"]
        ):
            self._histograms.clear()  # the server was started again
        self._histograms.append(latest)
        engines = {}
        for each in change["engines"]:
            name = each["name"]
            engine = engines[name] = self.engines.get(name) or WatchedEngine(name)
            engine.take(each)
        self.engines = engines

    def percentile(self, name: str, share: float) -> float | None:
        """A percentile of one of the server's histograms, in seconds; None without values.

        It counts the values since the oldest histogram that is kept; if there are none, all values.
        """
        if not self._histograms:
            return None
        newest, oldest = self._histograms[-1][name], self._histograms[0][name]
        recent = [new - old for new, old in zip(newest, oldest, strict=True)]
        counts = recent if any(recent) else newest
        return quantile(self.numbers[name]["bounds"], counts, share)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which a share of a histogram's values lie, interpolated in its bucket.

    bounds: the upper bounds of all buckets but the last. Returns None if there are no values.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    edges = (0.0, *bounds, bounds[-1])
    for count, (low, high) in zip(counts, pairwise(edges), strict=True):
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]
