"""Makes the start of our own processes quick: imports without garbage collection.

Only processes that quire starts itself, and the command's own, use this module: in a caller's
process, the collector is the caller's.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules in this block, without garbage collection.

    The collector would look at all objects again and again, while nearly all of them live as long
    as the process. It never looks at them afterwards, either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
