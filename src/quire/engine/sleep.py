"""Puts an engine to sleep: it gives its KV memory back and keeps its weights.

Called by `offline`.
"""

from quire.engine.engine import Engine
from quire.errors import InvalidRequestError


def sleep(engine: Engine) -> None:
    """Give the memory of the KV cache back, with all cached, pinned and public contents.

    Tiers keep their contents. Requests are refused until `wake_up`. A sleeping engine is left
    alone. Raises InvalidRequestError while requests are running, if several processes hold the
    memory, and while a read or write of the cache folder hangs, which might still touch the memory.
    """
    if engine.kv_memory is None:
        raise InvalidRequestError(
            "this engine can't sleep: several processes hold its KV cache; end them instead"
        )
    if engine.has_work():
        raise InvalidRequestError("requests are under way; let them end, or abort them, first")
    if not engine.is_asleep:
        engine.tier_work.drain()  # contents that can't be stored in time are computed again later
        if not engine.tier_work.wait_for_moves():
            raise InvalidRequestError(
                "the engine can't sleep yet: a read or write of the cache folder hangs; try again"
                " later, or end the process"
            )
        engine.scheduler.memory.prefixes.clear()
        engine.kv_memory.release_memory()
        engine.is_asleep = True


def wake_up(engine: Engine) -> None:
    """Allocate the memory again; an awake engine is left alone.

    Raises InsufficientMemoryError; then the engine stays asleep.
    """
    if engine.is_asleep and engine.kv_memory is not None:
        engine.kv_memory.restore_memory()
        engine.is_asleep = False
