"""Executes rank 0's orders for the disk tier in the process of another rank.

A separate thread serves the socket for moves (stores and loads of blocks), while the main thread
runs the steps. A block may be stored only after the last step that writes it, and filled only after
the last step that reads it. When an order of rank 0 arrives, this rank may still be in a step that
rank 0 has finished.

So each order contains the number of runner calls that rank 0 had made, and is executed after this
rank has made the same number. On a CPU, a call that has returned has made all its memory accesses.
Conversely, rank 0 uses a loaded block in a step only after all ranks have reported the load.

`assembly` makes the service; `ranks.RankLink` is the other end of its socket.
"""

import os
import select
import socket
from collections import deque
from collections.abc import Callable
from math import isfinite

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.errors import ConfigurationError
from quire.ipc import PeerGoneError, send
from quire.tiers.disk.disk_tier import DiskTier
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
    receive_order,
)

BUSY_TURN_S, IDLE_TURN_S = 0.5, 5.0
"""Seconds between checks of the tier if no event comes. BUSY_TURN_S applies while orders are in
flight, which may hang, and while the tier is paused."""

OpenRankTier = Callable[[list[bytes], Callable[[], None]], DiskTier]
"""Makes the tier. Arguments: the descriptions of all ranks' pages, and a function that the tier
calls when a move has ended. Raises ConfigurationError, and OSError if the folder can't be read."""


class RankService:
    """Serves the moves of one rank. One thread calls `run`; the thread of the runner calls
    `count_call`.

    Invariant: orders are executed in the order of their arrival, each only after this rank has made
    the number of runner calls that it names.
    """

    def __init__(self, sock: socket.socket, description: bytes, open_tier: OpenRankTier) -> None:
        """`sock` is connected to rank 0 and carries only messages about moves. `description` is the
        fingerprint of this rank's pages as JSON."""
        self._sock, self._description, self._open_tier = sock, description, open_tier
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: deque[FromRank0] = deque()
        #: Group and name of each order in flight.
        self._under_way: dict[int, tuple[int, bytes]] = {}
        self._state = TierState()
        self._num_calls = self._num_reported_calls = 0
        self._waits_for_call = False

    def count_call(self) -> None:
        """Count a call of the runner. All ranks make the same sequence of calls."""
        self._num_calls += 1
        if self._waits_for_call:
            self._wake()

    def run(self) -> None:
        """Serve rank 0 until it closes the tier or its process ends."""
        try:
            send(self._sock, RankPages(self._description))
            opening = receive_order(self._sock)
            assert isinstance(opening, OpenTier), "rank 0's first message opens the tier"
            try:
                tier = self._open_tier(opening.descriptions, self._wake)
            except (ConfigurationError, OSError) as error:
                send(self._sock, TierRefused(str(error)))
                return
            send(self._sock, TierOpened())
            self._serve(tier)
        except PeerGoneError:
            return  # the process is about to end, since its other socket is closed, too

    def _serve(self, tier: DiskTier) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        self._report(tier)
        while True:
            self._waits_for_call = bool(self._inbox)
            # Checked after the flag was set, so that no call is missed.
            if not self._is_next_due():
                events = poll.poll(1000 * (IDLE_TURN_S if self._is_quiet else BUSY_TURN_S))
                ready = {descriptor for descriptor, _ in events}
                if self._wakeup in ready:
                    os.eventfd_read(self._wakeup)
                if self._sock.fileno() in ready:
                    self._inbox.append(receive_order(self._sock))
            while self._is_next_due():
                order = self._inbox.popleft()
                if isinstance(order, CloseTier):
                    tier.close(order.timeout_s)
                    self._report(tier)
                    send(self._sock, TierClosed())
                    return
                self._carry_out(order, tier)
            self._report(tier)

    @property
    def _is_quiet(self) -> bool:
        is_well = self._state.takes_stores and isfinite(self._state.s_per_byte)
        return is_well and not (self._under_way or self._inbox)

    def _is_next_due(self) -> bool:
        if not self._inbox:
            return False
        order = self._inbox[0]
        return not isinstance(order, StartMoves) or order.num_calls <= self._num_calls

    def _carry_out(self, order: FromRank0, tier: DiskTier) -> None:
        match order:
            case StartMoves(_, stores, loads):
                orders: list[StoreOrder | LoadOrder] = [*stores, *loads]
                for each in orders:
                    self._under_way[each.order_id] = each.group, each.name
                tier.start(stores, loads)
            case CancelMoves(order_ids):
                tier.cancel(order_ids)
            case ClearTier():
                tier.clear()
            case _:
                raise AssertionError(f"unexpected message {order}")

    def _report(self, tier: DiskTier) -> None:
        """Send rank 0 the ended orders, and the state of the tier if it has changed."""
        if self._num_calls == self._num_reported_calls:
            tier.wait(0.0)  # tells the tier that no step runs
        self._num_reported_calls = self._num_calls
        done: list[int] = []
        failed: list[int] = []
        lost: list[int] = []
        for order_id, is_done in tier.ended():
            key = self._under_way.pop(order_id)
            if is_done:
                done.append(order_id)
            else:
                (failed if tier.find(*key) else lost).append(order_id)
        latency_s, s_per_byte = tier.load_speed()
        state = TierState(
            tier.takes_stores, _rounded(latency_s), _rounded(s_per_byte), tier.counts()
        )
        if state != self._state:
            self._state = state
            send(self._sock, state)
        if done or failed or lost:  # sent last, so that rank 0 already has the new state
            send(self._sock, MovesEnded(done, failed, lost))

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)


def _rounded(seconds: float) -> float:
    """Round to two significant digits, so that small changes are not reported."""
    return float(f"{seconds:.1e}")
