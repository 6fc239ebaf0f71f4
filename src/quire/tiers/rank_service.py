"""Executes rank 0's orders for the share of the disk tier in another rank.

A thread of its own serves the socket of the moves, beside the process's main thread, which makes
the steps. An order of rank 0 is valid only for memory in the same state as rank 0's at that time. A
block may be stored only after its last writer has ended, and filled only after its last reader has.
This rank may still be in a step that rank 0 has finished.

So each order contains the number of runner calls that rank 0 had made, and is executed when this
rank has made as many. On a CPU, a call that has returned has made all its memory accesses. In the
other direction, rank 0 uses loaded blocks in a step only after all ranks have reported them.

Made by `assembly`; `ranks` is the other end.
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
"""Intervals of checking a silent tier: while orders are in flight, which may hang, or while it is
paused; and otherwise, for changes by time alone."""

OpenRankTier = Callable[[list[bytes], Callable[[], None]], DiskTier]
"""Makes the tier, from the descriptions of all ranks' pages and a function to call when a move has
ended. Raises ConfigurationError, and OSError if the folder can't be read."""


class RankService:
    """Serves the moves of one rank. One thread calls `run`; the thread of the runner calls
    `count_call`.

    Invariant: orders are executed in the order of their arrival, and none before its runner calls.
    """

    def __init__(self, sock: socket.socket, description: bytes, open_tier: OpenRankTier) -> None:
        """`sock` leads to rank 0, for the moves only. `description` is the fingerprint of this
        rank's pages as JSON."""
        self._sock, self._description, self._open_tier = sock, description, open_tier
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: deque[FromRank0] = deque()
        #: Group and name of each order in flight.
        self._under_way: dict[int, tuple[int, bytes]] = {}
        self._state = TierState()
        self._num_calls = self._num_reported_calls = 0
        self._waits_for_call = False

    def count_call(self) -> None:
        """Count a call of the runner, which all ranks make alike."""
        self._num_calls += 1
        if self._waits_for_call:
            self._wake()

    def run(self) -> None:
        """Serve rank 0 until it closes the tier or is gone."""
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
            if not self._is_next_due():  # asked after the flag was set, so that no call is missed
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
                raise AssertionError(f"{order} comes once, and not now")

    def _report(self, tier: DiskTier) -> None:
        """Report ended orders, and the state of the tier if it has changed."""
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
        if done or failed or lost:  # sent last, so that rank 0 knows the state after them
            send(self._sock, MovesEnded(done, failed, lost))

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)


def _rounded(seconds: float) -> float:
    """Round a value, so that small changes are not reported."""
    return float(f"{seconds:.1e}")
