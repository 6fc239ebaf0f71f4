"""Turns that several processes take: many at once, or one alone."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Locks of files in a folder that all processes name. One that is alone has no other beside it.

    Whoever wants to begin passes the door; one that wants to be alone stands in it until all who
    have begun have ended, so that it is not overtaken again and again.
    """

    def __init__(self, folder: Path) -> None:
        """The files are made here if need be, and kept open."""
        self._door, self._room = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("door", "room")
        )

    @contextmanager
    def turn(self, *, is_alone: bool) -> Iterator[None]:
        """Waits without a bound: whoever dies gives its locks back."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._door)
        os.close(self._room)
