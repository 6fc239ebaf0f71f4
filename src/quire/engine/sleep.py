"""An engine that gives its KV memory back for a while, and keeps its weights.

Called by `offline`.
"""

from quire.engine.engine import Engine
from quire.errors import InvalidRequestError


def sleep(engine: Engine) -> None:
    """Give the memory of the KV cache back, with all that is cached, pinned and published there.

    Requests are refused until `wake_up`. Nothing happens where it is asleep. Raises
    InvalidRequestError while requests are under way, and where several processes have the memory.
    """
    if engine.kv_memory is None:
        raise InvalidRequestError(
            "this engine can't sleep: several processes hold its KV cache; end them instead"
        )
    if engine.has_work():
        raise InvalidRequestError("requests are under way; let them end, or abort them, first")
    if not engine.is_asleep:
        engine.tier_work.settle()
        engine.scheduler.memory.prefixes.clear()
        engine.kv_memory.release_memory()
        engine.is_asleep = True


def wake_up(engine: Engine) -> None:
    """Take the memory again. Nothing happens where it is awake. Raises InsufficientMemoryError;
    then the engine goes on sleeping."""
    if engine.is_asleep and engine.kv_memory is not None:
        engine.kv_memory.restore_memory()
        engine.is_asleep = False
