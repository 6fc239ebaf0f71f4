"""Functions that run in forked children, and what becomes of them.

The parent loads the modules that the children need, and starts no thread: so a child is there in a
few milliseconds, and may start its own.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT_S = 60.0
"""A child that has not ended by then hangs."""


class HungError(AssertionError):
    """A child did not end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """result: what the function returned; None where it was killed. seconds: it ran."""

    result: Any
    was_killed: bool
    seconds: float


class Child:
    """A function in a process of its own, which is under way."""

    def __init__(self, function: Callable[[Callable[[Any], None]], Any]) -> None:
        """function: is given another one, which sends something at once."""
        self._reading, writing = os.pipe()
        self._begun_s = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _run(function, writing)
        os.close(writing)
        self._content = bytearray()

    def wait_for(self, what: Any) -> None:
        """Until it has sent this. Raises AssertionError where it ends before."""
        while what not in _unpacked(bytes(self._content)):
            assert self._read(), f"it ended before it told {what!r}"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Until it has ended. Raises HungError, and AssertionError with what it raised."""
        while self._read(limit_s):
            pass
        os.close(self._reading)
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self._begun_s
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            assert number == signal.SIGKILL, f"it ended by {signal.Signals(number).name}"
            return Ended(None, True, seconds)
        told = _unpacked(bytes(self._content))
        assert told, "it told nothing"
        is_well, result = told[-1]
        assert is_well, result
        return Ended(result, False, seconds)

    def _read(self, limit_s: float = LIMIT_S) -> bool:
        """Take what has come; whether more may come."""
        left_s = self._begun_s + limit_s - time.monotonic()
        if not select.select([self._reading], [], [], max(left_s, 0.0))[0]:
            self.kill()
            os.waitpid(self.pid, 0)
            raise HungError(f"a process has not ended after {limit_s:g} s")
        content = os.read(self._reading, 1 << 20)
        self._content += content
        return bool(content)


def in_child(function: Callable[[], Any], limit_s: float = LIMIT_S) -> Ended:
    """Run a function in a process of its own, to its end."""
    return Child(lambda _: function()).wait(limit_s)


def _run(function: Callable[[Callable[[Any], None]], Any], writing: int) -> None:
    """The child's whole life."""

    def tell(what: Any) -> None:
        content = json.dumps(what).encode()
        view = memoryview(len(content).to_bytes(8, "big") + content)
        while view:
            view = view[os.write(writing, view) :]

    try:
        outcome = True, function(tell)
    except BaseException:
        outcome = False, traceback.format_exc()
    tell(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _unpacked(content: bytes) -> list[Any]:
    found, at = [], 0
    while at + 8 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 8], "big")
        if end > len(content):
            break
        found.append(json.loads(content[at + 8 : end]))
        at = end
    return found
