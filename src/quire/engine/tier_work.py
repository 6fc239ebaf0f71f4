"""What an engine does for the tiers behind its KV memory, beside its steps.

Moves between the pool and the tiers go on by themselves; here they are waited for, where nothing
else is to be done, and given a turn while the engine is idle.
"""

from collections.abc import Callable

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.observability.log import get_logger

WAIT_S = 0.01
"""So long at most is waited for a load while there is nothing else to do: messages may come."""

IDLE_TURN_S, PAUSED_TURN_S = 0.1, 2.0
"""While the engine is idle, what was published is stored in turns so far apart; while nothing is
taken, it is tried again so often."""

SETTLE_S = 20.0
"""For moves under way to end, where the memory is to go: a disk may hang for a while."""

DRAIN_S = 5.0
"""At the end, what was published may take so long to be stored."""


logger = get_logger(__name__)


class TierWork:
    """The moves of one engine's memory. Without tiers, nothing is ever to be done."""

    def __init__(self, memory: KVCacheManager, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._clock = clock
        self._is_closed = False

    def expect(self, model: StepCostModel, chunk: int, longest: int) -> None:
        """Steps take what this model says, until some were observed: for sequences of up to
        `longest` tokens that are computed `chunk` at a time."""
        if self._memory.moves is None:
            return
        for num_computed in (0, max(0, longest - chunk)):
            load = StepLoad().with_chunk(num_computed, chunk)
            self._memory.moves.loads.compute_time.observe(
                chunk, load.num_chunk_pairs, model.predict_s(load)
            )

    def observe(self, step_id: int, seconds: float) -> None:
        """A step has ended and took so long; for what is predicted of others."""
        if self._memory.moves is not None:
            self._memory.moves.observe(step_id, seconds)

    def wait(self) -> None:
        """Until a move has ended, if one is under way, or for a moment."""
        moves = self._memory.moves
        if moves is not None and moves.num_in_flight:
            moves.tiers.wait(WAIT_S)

    def tend(self) -> float | None:
        """A turn for the moves of an engine without work. Returns after how many seconds it wants
        the next; None: there is nothing to do."""
        moves = self._memory.moves
        if moves is None:
            return None
        moves.go_on(self._clock())
        if moves.num_in_flight:
            return IDLE_TURN_S
        if not moves.stores.num_waiting:
            return None
        return IDLE_TURN_S if moves.tiers.takes_stores else PAUSED_TURN_S

    def settle(self, limit_s: float | None = None) -> bool:
        """Until no move is under way, so that nothing is held, but for limit_s at most (None:
        SETTLE_S); returns whether that is so. For an engine without work."""
        moves = self._memory.moves
        end_s = self._clock() + (SETTLE_S if limit_s is None else limit_s)
        while moves is not None and moves.num_in_flight and self._clock() < end_s:
            moves.tiers.wait(WAIT_S)
            moves.go_on(self._clock(), orders_stores=False)
        return moves is None or not moves.num_in_flight

    def drain(self, limit_s: float | None = None) -> bool:
        """Store what was published, for so long at most (None: DRAIN_S); returns whether all of it
        is. For an engine that ends or sleeps."""
        moves = self._memory.moves
        end_s = self._clock() + (DRAIN_S if limit_s is None else limit_s)
        while moves is not None:
            moves.go_on(self._clock(), is_last=True)
            is_over = self._clock() >= end_s or not moves.tiers.takes_stores
            if not moves.num_in_flight or is_over:
                return not moves.num_in_flight and not moves.stores.num_waiting
            moves.tiers.wait(WAIT_S)
        return True

    def close(self) -> None:
        """Store what was published, as far as it goes in DRAIN_S, and let go of the tiers. For an
        engine that ends; more calls change nothing."""
        moves = self._memory.moves
        if moves is not None and not self._is_closed:
            self._is_closed = True
            # Where nothing is taken, the log says why.
            if not self.drain() and moves.tiers.takes_stores:
                logger.warning("not all that was cached could be stored before the end")
            moves.tiers.close()
