"""Makes the start of our own processes quick: imports without garbage collection and unused parts.

Only processes that quire starts itself, and the command's own, use this module: in a caller's
process, the collector is the caller's.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from quire.deferred_imports import defer_imports


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules in this block, without garbage collection and without the parts of torch that
    `deferred_imports` defers.

    The collector would look at all objects again and again, while nearly all of them live as long
    as the process. It never looks at them afterwards, either.
    """
    defer_imports()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
