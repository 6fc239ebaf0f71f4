"""Combines the disk tiers of several ranks into one tier for the engine in rank 0.

Each rank holds its shard of every block in its own process, and stores that shard in its own
namespace. All ranks get the same orders (stores and loads) in the same sequence, and execute them
independently (see `rank_service`). A content (what a block holds for one KV group) counts as stored
or loaded only if all ranks have done so. Rank 0's index decides whether it is present.

A rank may lack a content that rank 0 has, because the rank dropped a store, evicted a segment
earlier, or found a damaged file. Then the load fails in that rank and counts as a miss, and rank 0
forgets its own record, so that the content is computed and stored again.

Made by `assembly`.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.errors import ConfigurationError, EngineDeadError
from quire.ipc import PeerGoneError, send
from quire.observability.log import get_logger
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.disk.load_rate import LoadSpeed
from quire.tiers.rank_messages import (
    CancelMoves,
    ClearTier,
    CloseTier,
    FromRank0,
    MovesEnded,
    OpenTier,
    RankPages,
    StartMoves,
    TierClosed,
    TierOpened,
    TierRefused,
    TierState,
    ToRank0,
    receive_news,
)

CLOSE_GRACE_S = 1.5
"""Seconds beyond the timeout of `close` in which a rank may report that its tier is closed."""

_SUMMED = (
    "rewritten",
    "damaged",
    "load_failures",
    "store_failures",
    "over_budget",
    "over_queue",
    "bytes_per_s",
)
_OF_THE_LEAST = ("num_records", "is_reading", "is_writing")

logger = get_logger(__name__)


class RankLink:
    """Rank 0's end of the socket to another rank's `RankService`.

    Called from the engine's thread; the link's own thread receives messages. `is_gone` becomes True
    when the rank's tier is closed or its process has ended; then nothing more is sent.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        """Wait for the rank's description of its pages. Raises EngineDeadError."""
        self.rank = rank
        self.state = TierState()
        self.is_gone = False
        self.ended: deque[MovesEnded] = deque()
        self._sock = sock
        self._is_closed = threading.Event()
        pages = self._next()
        assert isinstance(pages, RankPages), pages
        self.description = pages.description

    def open(self, descriptions: Iterable[bytes], wake_up: Callable[[], None]) -> None:
        """Let the rank open its tier, with the descriptions of all ranks' pages. From then on
        `wake_up` is called after each message from the rank.

        Raises ConfigurationError if the rank can't open its tier, EngineDeadError if its process
        has ended.
        """
        self.send(OpenTier(list(descriptions)))
        answer = self._next()
        if isinstance(answer, TierRefused):
            raise ConfigurationError(f"rank {self.rank}: {answer.message}")
        assert isinstance(answer, TierOpened), answer
        receive = threading.Thread(
            target=self._receive_on, args=(wake_up,), name="quire-rank-moves", daemon=True
        )
        receive.start()

    def send(self, message: FromRank0) -> None:
        # The receiving thread notices a dead rank, after it has received the rank's last messages.
        with suppress(PeerGoneError):
            send(self._sock, message)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait after CloseTier was sent. Returns True once the rank's tier is closed or its process
        has ended, False on a timeout."""
        return self.is_gone or self._is_closed.wait(timeout_s)

    def _next(self) -> ToRank0:
        try:
            return receive_news(self._sock)
        except PeerGoneError as error:
            raise EngineDeadError(f"rank {self.rank}: its process has died") from error

    # -- in the thread -----------------------------------------------------------------------------

    def _receive_on(self, wake_up: Callable[[], None]) -> None:
        while not self._is_closed.is_set():
            try:
                news = receive_news(self._sock)
            except PeerGoneError:
                self._end()
            else:
                self._handle(news)
            wake_up()

    def _handle(self, news: ToRank0) -> None:
        match news:
            case MovesEnded():
                self.ended.append(news)
            case TierState():
                self.state = news
            case TierClosed():
                self._end()
            case _:
                raise AssertionError(f"{news} is valid only before the first order")

    def _end(self) -> None:
        self.is_gone = True
        self._is_closed.set()


@dataclass(slots=True)
class _Move:
    """A store or load order that has not ended in all ranks."""

    group: int
    name: bytes
    #: Ranks in which the order has not ended.
    waits_for: set[int]
    is_done: bool = True
    #: True if the order failed because a rank does not have the content.
    is_lost: bool = False


class RankedTiers:
    """The disk tier of an engine with several ranks; implements `core.memory.tiers.contract.Tiers`.

    Invariant: `ended` returns an order after it has ended in all ranks. The order succeeded if it
    succeeded in every rank. In a rank whose process has ended, all orders count as failed.
    """

    def __init__(
        self,
        local: DiskTier,
        links: Sequence[RankLink],
        num_calls: Callable[[], int],
        changed: threading.Event,
    ) -> None:
        """`local` is rank 0's own tier. `links` are the links to all other ranks, whose tiers are
        open. `num_calls` returns the number of runner calls so far. The reference to it is dropped
        in `close`, so the rank processes that it refers to live until then. `changed` is the event
        that wakes rank 0; the links and the local tier also set it."""
        self._local, self._links, self._num_calls = local, links, num_calls
        self._changed = changed
        self._moves: dict[int, _Move] = {}

    def find(self, group: int, name: bytes) -> bool:
        return self._local.find(group, name)

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return self._local.tails(parent)

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        """Start stores and loads in all ranks. Raises ValueError if a name is too long for a
        record."""
        ranks = {0, *(link.rank for link in self._links)}
        orders: list[StoreOrder | LoadOrder] = [*stores, *loads]
        for order in orders:
            self._moves[order.order_id] = _Move(order.group, order.name, set(ranks))
        self._local.start(stores, loads)
        self._send(StartMoves(self._num_calls(), list(stores), list(loads)))

    def cancel(self, order_ids: Iterable[int]) -> None:
        """Cancel orders. A cancelled order fails even if some ranks have already executed it."""
        cancelled = list(order_ids)
        self._local.cancel(cancelled)
        self._send(CancelMoves(cancelled))

    def ended(self) -> list[MoveEnd]:
        self._changed.clear()
        ends: list[MoveEnd] = []
        for order_id, is_done in self._local.ended():
            self._end_in(0, [order_id], ends, is_done=is_done)
        for link in self._links:
            is_gone = link.is_gone  # read before the messages, so that no message is lost
            while link.ended:
                news = link.ended.popleft()
                self._end_in(link.rank, news.done, ends, is_done=True)
                self._end_in(link.rank, news.failed, ends, is_done=False)
                self._end_in(link.rank, news.lost, ends, is_done=False, is_lost=True)
            if is_gone:
                left = [each for each, move in self._moves.items() if link.rank in move.waits_for]
                self._end_in(link.rank, left, ends, is_done=False)
        return ends

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        """Predicted seconds of the loads in the slowest rank. All ranks have the same orders
        queued. They share one disk, so each rank has learned its own share of the disk's
        bandwidth."""
        times_s = [self._local.load_s(contents)]
        for link in self._links:
            speed = LoadSpeed(link.state.latency_s, link.state.s_per_byte)
            times_s.append(self._local.load_s_at(speed, contents))
        return float("inf") if self._lacks_rank else max(times_s)

    @property
    def takes_stores(self) -> bool:
        states = [link.state.takes_stores for link in self._links]
        return self._local.takes_stores and all(states) and not self._lacks_rank

    def wait(self, timeout_s: float) -> None:
        self._local.wait(0.0)  # tells the tier that no step runs
        self._changed.wait(timeout_s)

    def counts(self) -> dict[str, dict[str, float]]:
        """The counters of all ranks combined. Bytes and failures are summed. A count of orders is
        the largest or the least of the ranks' counts, since every rank executes each order."""
        of_ranks: list[Mapping[str, Mapping[str, float]]] = [self._local.counts()]
        of_ranks += [link.state.counts for link in self._links]
        return {
            tier: {
                name: _joined(name, [each[tier][name] for each in of_ranks if tier in each])
                for name in counts
            }
            for tier, counts in of_ranks[0].items()
        }

    def clear(self) -> None:
        self._local.clear()
        self._send(ClearTier())

    def close(self, timeout_s: float = 10.0) -> None:
        """Close the tiers of all ranks at the same time; see `DiskTier.close`."""
        until_s = time.monotonic() + timeout_s + CLOSE_GRACE_S
        self._send(CloseTier(timeout_s))
        self._local.close(timeout_s)
        for link in self._links:
            if not link.wait_closed(max(until_s - time.monotonic(), 0.0)):
                logger.warning(
                    "rank %d: the tier hangs; the folder stays locked until its process ends",
                    link.rank,
                )
        self._num_calls = int  # drops the reference to the rank processes; no orders follow

    @property
    def _lacks_rank(self) -> bool:
        return any([link.is_gone for link in self._links])

    def _send(self, message: FromRank0) -> None:
        for link in self._links:
            if not link.is_gone:
                link.send(message)

    def _end_in(
        self,
        rank: int,
        order_ids: Iterable[int],
        ends: list[MoveEnd],
        *,
        is_done: bool,
        is_lost: bool = False,
    ) -> None:
        """Record that orders have ended in a rank. Append to `ends` those that have now ended in
        all ranks."""
        for order_id in order_ids:
            move = self._moves[order_id]
            move.waits_for.discard(rank)
            move.is_done &= is_done
            move.is_lost |= is_lost
            if not move.waits_for:
                del self._moves[order_id]
                if move.is_lost:
                    self._local.forget(move.group, move.name)
                ends.append(MoveEnd(order_id, move.is_done))


def _joined(name: str, counts: Sequence[float]) -> float:
    if name.endswith("_bytes") or name in _SUMMED:
        return sum(counts)
    return min(counts) if name in _OF_THE_LEAST else max(counts)
