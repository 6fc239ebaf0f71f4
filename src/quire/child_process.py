"""Starting child processes: command lines, streams, and stderr until logging is set up.

Used to start engines, ranks, grammar compilers and agents.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import TypedDict

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
"""Maps each attribute of sys.flags to the letter of its option. A command line repeats the letter
as often as the attribute's value."""


def python_command(module: str) -> tuple[str, ...]:
    """The command that runs a module as a main program with this process's interpreter and options.

    It has -P, so that nothing is imported from the working folder, whose files may not be trusted.
    The options are read from sys.flags, sys.warnoptions and sys._xoptions. These are documented;
    the function of `subprocess` that reads options is not.
    """
    words = [sys.executable, "-P"]
    words += [f"-{option * getattr(sys.flags, name)}" for name, option in _FLAGS.items()]
    words += [f"-W{each}" for each in sys.warnoptions]
    for name, value in sys._xoptions.items():
        words += ["-X", name if value is True else f"{name}={value}"]
    return *(word for word in words if word != "-"), "-m", module


def working_folder() -> str | None:
    """The folder in which to start a process; None means this process's own folder.

    If this process's folder was deleted, it is "/", because torch can't be imported in a deleted
    folder.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


class ChildOptions(TypedDict):
    """Arguments of `subprocess.Popen`."""

    stdin: int
    stdout: int
    cwd: str | None
    start_new_session: bool


def child_options() -> ChildOptions:
    """Options for starting child processes: their output goes to this process's standard error.

    Each child has its own session, so that Ctrl-C in a terminal reaches only this process.
    """
    return ChildOptions(
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
        cwd=working_folder(),
        start_new_session=True,
    )


def unnamed_file(name: str) -> int:
    """The descriptor of an empty file without a path, in memory if the system supports that.

    The caller closes it.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())


class StartText:
    """Captures the standard error of a process until that process has set up its log.

    If the process fails to start, the text says why. It is written to a file in memory, not a pipe,
    so the process never waits for a reader.
    """

    #: Arguments that make `redirect_start_text` redirect standard error to standard output.
    arguments = ("--stderr-fd", "1")

    def __init__(self) -> None:
        #: The descriptor to pass as the process's standard error; -1 after `close`.
        self.descriptor = unnamed_file("quire-start")

    def read(self) -> str:
        """The last MAX_TEXT_BYTES of the text that the process has written.

        Returns "" after `close`, or after the process has called `redirect_start_text`.
        """
        if self.descriptor < 0:
            return ""
        num_bytes = os.fstat(self.descriptor).st_size
        start = max(0, num_bytes - MAX_TEXT_BYTES)
        return os.pread(self.descriptor, MAX_TEXT_BYTES, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Close the file. It may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def redirect_start_text(stderr: int) -> None:
    """Redirect this process's standard error to a descriptor. Moves the text written so far
    there."""
    sys.stderr.flush()
    said = os.pread(2, MAX_TEXT_BYTES, 0)
    os.ftruncate(2, 0)
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not end the process
        os.write(stderr, said)
    os.dup2(stderr, 2)


def last_line(text: str) -> str:
    """A colon and the last line of a text. In a traceback, that line names the exception.

    Returns "" for an empty text.
    """
    return f": {text.splitlines()[-1][:MAX_LINE_LENGTH]}" if text else ""
