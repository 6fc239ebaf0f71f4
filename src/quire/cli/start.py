"""Where the command `quire` begins: signals first, then the imports, which take time.

The system drops signals that process 1 of a container has no handler for, and Python has none for
SIGTERM. So it gets one before anything else is imported. `server.signals` takes over once there is
something to put in order.
"""

import os
import signal
import sys
from types import FrameType

SERVERS = ("serve", "cluster")
"""Commands that SIGTERM ends with exit code 0, as it does once they serve."""

KILLED = 128
"""What shells add to a signal's number, for the exit code of a process that it has ended."""


def main() -> int:
    """Run the command; the process's exit code."""
    handle_sigterm()
    try:
        from quire.cli.main import main as run  # a third of a second, on an idle processor

        return run()
    except KeyboardInterrupt:  # before the command could say what it breaks off
        return KILLED + signal.SIGINT


def handle_sigterm() -> None:
    """From now on SIGTERM ends this process at once. Where it would do so anyway, and its usual
    exit code is right, nothing is changed: the system need not wait for Python's next step."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    code = 0 if command in SERVERS else KILLED + signal.SIGTERM

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    if command in SERVERS or os.getpid() == 1:
        signal.signal(signal.SIGTERM, end)
