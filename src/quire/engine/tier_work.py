"""Waits for block moves between the KV memory and its tiers, outside the engine's steps.

Moves between the pool and the tiers run in the background. The engine uses this module to wait for
them when it has no step to run, and to advance them while it is idle.
"""

from collections.abc import Callable

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.observability.log import get_logger

WAIT_S = 0.01
"""Maximum seconds of one wait for a load while there is no other work; short, since messages may
come."""

IDLE_TURN_S, PAUSED_TURN_S = 0.1, 2.0
"""Seconds between two calls of `advance_idle` while contents remain to be stored: if tiers accept
stores, and if they accept none."""

MOVES_WAIT_S = 20.0
"""Maximum seconds to wait for moves in flight before memory is released: a disk may hang for a
while."""

DRAIN_S = 5.0
"""Maximum seconds to store published contents when an engine ends."""


logger = get_logger(__name__)


class TierWork:
    """The moves of one engine's memory. Without tiers, its methods do nothing."""

    def __init__(self, memory: KVCacheManager, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._clock = clock
        self._is_closed = False

    def expect(self, model: StepCostModel, chunk: int, longest: int) -> None:
        """Let the load rule predict steps by this cost model until some steps were observed.

        The prediction is for sequences of up to `longest` tokens, in chunks of `chunk` tokens.
        """
        if self._memory.moves is None:
            return
        for num_computed in (0, max(0, longest - chunk)):
            load = StepLoad().with_chunk(num_computed, chunk)
            self._memory.moves.loads.compute_time.observe(
                chunk, load.num_chunk_pairs, model.predict_s(load)
            )

    def observe(self, step_id: int, seconds: float) -> None:
        """Learn from a step that has ended after `seconds`, to predict others."""
        if self._memory.moves is not None:
            self._memory.moves.observe(step_id, seconds)

    def wait(self) -> None:
        """If a move is in flight, wait briefly for a move to end."""
        moves = self._memory.moves
        if moves is not None and moves.num_in_flight:
            moves.tiers.wait(WAIT_S)

    def advance_idle(self) -> float | None:
        """Advance the moves of an engine without work.

        Returns the seconds until it should be called again, or None if nothing is left to store.
        """
        moves = self._memory.moves
        if moves is None:
            return None
        moves.advance(self._clock())
        if moves.num_in_flight:
            return IDLE_TURN_S
        if not moves.stores.num_waiting:
            return None
        return IDLE_TURN_S if moves.tiers.takes_stores else PAUSED_TURN_S

    def wait_for_moves(self, limit_s: float | None = None) -> bool:
        """Wait until no move is in flight, so that no block is held, or for limit_s (None:
        MOVES_WAIT_S).

        Returns whether no move is in flight. For an engine without work.
        """
        moves = self._memory.moves
        end_s = self._clock() + (MOVES_WAIT_S if limit_s is None else limit_s)
        while moves is not None and moves.num_in_flight and self._clock() < end_s:
            moves.tiers.wait(WAIT_S)
            moves.advance(self._clock(), orders_stores=False)
        return moves is None or not moves.num_in_flight

    def drain(self, limit_s: float | None = None) -> bool:
        """Store the published contents, for limit_s at most (None: DRAIN_S).

        Returns whether all are stored. For an engine that ends or sleeps.
        """
        moves = self._memory.moves
        end_s = self._clock() + (DRAIN_S if limit_s is None else limit_s)
        while moves is not None:
            moves.advance(self._clock(), is_last=True)
            is_over = self._clock() >= end_s or not moves.tiers.takes_stores
            if not moves.num_in_flight or is_over:
                return not moves.num_in_flight and not moves.stores.num_waiting
            moves.tiers.wait(WAIT_S)
        return True

    def close(self) -> None:
        """Store as many published contents as DRAIN_S allows, and close the tiers.

        For an engine that ends; further calls do nothing.
        """
        moves = self._memory.moves
        if moves is not None and not self._is_closed:
            self._is_closed = True
            # If the tiers take no stores, they have logged why.
            if not self.drain() and moves.tiers.takes_stores:
                logger.warning("some cached contents were not stored in the tiers before the end")
            moves.tiers.close()
