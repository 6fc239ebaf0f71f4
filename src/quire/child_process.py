"""Starts Python processes of our own: their command, and what they say before they can log.

Engines, ranks and agents are started with it. Knows none of them.
"""

import contextlib
import os
import sys
import tempfile

MAX_TEXT_BYTES = 64 << 10
MAX_LINE_LENGTH = 300

_FLAGS = {
    "isolated": "I",
    "ignore_environment": "E",
    "no_user_site": "s",
    "no_site": "S",
    "dont_write_bytecode": "B",
    "optimize": "O",
    "bytes_warning": "b",
    "verbose": "v",
}
"""Attribute of sys.flags -> the option that sets it, once for each unit of its value."""


def python_command(module: str) -> tuple[str, ...]:
    """Runs a module as a process's main program, with this process's own interpreter and options.

    With -P, so that nothing is imported from the working folder, where anybody's files may lie. The
    options are read from sys.flags, sys.warnoptions and sys._xoptions, which are documented; what
    `subprocess` has for it is not.
    """
    words = [sys.executable, "-P"]
    words += [f"-{option * getattr(sys.flags, name)}" for name, option in _FLAGS.items()]
    words += [f"-W{each}" for each in sys.warnoptions]
    for name, value in sys._xoptions.items():
        words += ["-X", name if value is True else f"{name}={value}"]
    return *(word for word in words if word != "-"), "-m", module


def working_folder() -> str | None:
    """Where to start a process: here (None); but in the root folder if this process's own was
    deleted, where torch can't be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def unnamed_file(name: str) -> int:
    """The descriptor of an empty file that no path leads to, in memory where the system can do
    that; for the caller to close."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())


class StartText:
    """What a process writes to its standard error until it has set up its log: of one that fails to
    start it says why. A file in memory, so that nobody has to read it meanwhile.

    descriptor: what to start the process with as its standard error. `leave_start_text` is told by
    an argument where that shall go later.
    """

    arguments = ("--stderr-fd", "1")
    """For a process whose standard error shall later go where its standard output goes."""

    def __init__(self) -> None:
        self.descriptor = unnamed_file("quire-start")

    def read(self) -> str:
        """What was written, if the process has not called `leave_start_text`; its end, if it is
        long. Nothing once this is closed."""
        if self.descriptor < 0:
            return ""
        num_bytes = os.fstat(self.descriptor).st_size
        start = max(0, num_bytes - MAX_TEXT_BYTES)
        return os.pread(self.descriptor, MAX_TEXT_BYTES, start).decode(errors="replace").strip()

    def close(self) -> None:
        """May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def leave_start_text(stderr: int) -> None:
    """In the process: what was written so far, and all that follows, goes to this descriptor."""
    sys.stderr.flush()
    said = os.pread(2, MAX_TEXT_BYTES, 0)
    os.ftruncate(2, 0)
    with contextlib.suppress(OSError):  # a full disk or a closed pipe ends no process
        os.write(stderr, said)
    os.dup2(stderr, 2)


def last_line(text: str) -> str:
    """As the reason of a failure, after a colon: of a traceback the exception. "" if there is
    none."""
    return f": {text.splitlines()[-1][:MAX_LINE_LENGTH]}" if text else ""
