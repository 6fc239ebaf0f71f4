"""What a test registers is gone after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.registry import Registry


@contextmanager
def restored(registry: Registry) -> Iterator[None]:
    """At the end of the `with`, the registry has the entries that it had before."""
    before = dict(registry._filled()), dict(registry._origins)
    try:
        yield
    finally:
        registry._entries, registry._origins = before
