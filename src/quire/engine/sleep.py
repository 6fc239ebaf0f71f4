"""An engine that gives its KV memory back for a while, and keeps its weights.

Called by `offline`.
"""

from quire.engine.engine import Engine
from quire.errors import InvalidRequestError


def sleep(engine: Engine) -> None:
    """Give the memory of the KV cache back, with all that is cached, pinned and published there.
    Tiers behind it keep what they have.

    Requests are refused until `wake_up`. Nothing happens where it is asleep. Raises
    InvalidRequestError while requests are under way, where several processes have the memory, and
    where a read or write of the cache folder hangs, which may yet touch it.
    """
    if engine.kv_memory is None:
        raise InvalidRequestError(
            "this engine can't sleep: several processes hold its KV cache; end them instead"
        )
    if engine.has_work():
        raise InvalidRequestError("requests are under way; let them end, or abort them, first")
    if not engine.is_asleep:
        engine.tier_work.drain()  # what can't be stored in time is computed again
        if not engine.tier_work.settle():
            raise InvalidRequestError(
                "the engine can't sleep yet: a read or write of the cache folder hangs; try again"
                " later, or end the process"
            )
        engine.scheduler.memory.prefixes.clear()
        engine.kv_memory.release_memory()
        engine.is_asleep = True


def wake_up(engine: Engine) -> None:
    """Take the memory again. Nothing happens where it is awake. Raises InsufficientMemoryError;
    then the engine goes on sleeping."""
    if engine.is_asleep and engine.kv_memory is not None:
        engine.kv_memory.restore_memory()
        engine.is_asleep = False
