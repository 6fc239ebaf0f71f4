"""The entry point of `quire`, which handles SIGTERM before it imports anything slow.

The system drops signals for which process 1 of a container has no handler, and Python has none for
SIGTERM. So a handler is installed before other imports. `server.signals` replaces it once the
server has something to clean up.
"""

import os
import signal
import sys
from types import FrameType

SERVERS = ("serve", "cluster")
"""Commands that end with exit code 0 on SIGTERM, also before they serve."""

KILLED = 128
"""The exit code of a process that a signal has ended is this plus the signal's number."""


def main() -> int:
    """Run the command, and return the process's exit code."""
    handle_sigterm()
    try:
        from quire.cli.main import main as run  # a third of a second, on an idle processor

        return run()
    except KeyboardInterrupt:  # before the command could handle it
        return KILLED + signal.SIGINT


def handle_sigterm() -> None:
    """Make SIGTERM end this process at once.

    No handler is installed if the system's default does so with the right exit code, because a
    handler has to wait for the interpreter.
    """
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    code = 0 if command in SERVERS else KILLED + signal.SIGTERM

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    if command in SERVERS or os.getpid() == 1:
        signal.signal(signal.SIGTERM, end)
