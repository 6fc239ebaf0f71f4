"""The entry point of `quire`, which handles SIGTERM before it imports anything slow.

Linux drops a signal to a container's process 1 if the process has no handler for it, and Python
sets none for SIGTERM. So a handler is installed before other imports. `server.signals` replaces it
once the server has something to clean up.
"""

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

from quire.version import __version__

SERVERS = ("serve", "cluster")
"""Commands that end with exit code 0 on SIGTERM, also before they serve."""

KILLED = 128
"""A process that a signal has ended has this number plus the signal's number as its exit code."""


def run_process() -> int:
    """Run the command as all that this process does, and return the process's exit code."""
    _open_standard_streams()
    codes: list[int] = []
    # The function that is registered first is called last. If others were registered before, such
    # as by a sitecustomize module that traces or measures coverage, the interpreter ends as usual.
    if not atexit._ncallbacks():
        atexit.register(_end_at_once, codes)
    codes.append(main())
    return codes[0]


def _open_standard_streams() -> None:
    """Open the null device in place of the standard streams that are closed. Otherwise files would
    get their numbers, child processes could not inherit them, and sys.stderr would be None."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _end_at_once(codes: list[int]) -> None:
    """End this process with the code in `codes`, if there is one, and leave its memory to the
    operating system. The interpreter would first free each object, which takes 0.15 s.

    If output can't be written, the code is 1 instead of 0. An error is printed, unless the reader
    has closed the pipe (`quire ... | head`).
    """
    if not codes:
        return
    code = codes[0]
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except ValueError:  # the command has closed it
            continue
        except OSError as error:
            code = code or 1
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                with contextlib.suppress(OSError):
                    os.write(2, f"quire: error: {error}\n".encode())
    os._exit(code)


def main() -> int:
    """Run the command, and return the process's exit code."""
    handle_sigterm()
    if sys.argv[1:] == ["--version"]:  # as `main` prints it, without the imports
        print(f"quire {__version__}")
        return 0
    try:
        from quire.quick_start import quick_imports  # the version doesn't need it

        with quick_imports():
            from quire.cli.main import main as run  # takes a third of a second

        return run()
    except KeyboardInterrupt:  # Ctrl-C came before the command could handle it
        return KILLED + signal.SIGINT


def handle_sigterm() -> None:
    """Make SIGTERM end this process at once.

    No handler is installed if SIGTERM's default action gives the right exit code, because a handler
    runs only once the interpreter gets to it.
    """
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    code = 0 if command in SERVERS else KILLED + signal.SIGTERM

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    if command in SERVERS or os.getpid() == 1:
        signal.signal(signal.SIGTERM, end)
