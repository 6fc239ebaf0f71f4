"""Starts an engine process of this machine before the API server has been imported.

`ProcessLink` starts processes with the running event loop. The first process of a server may start
earlier, as an `EarlyProcess`: it imports its libraries while the API server imports its own.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from quire.child_process import StartText, child_options, python_command
from quire.engine_client.messages import Prepare
from quire.engine_client.process.activity import ActivityRecord, make_shared_memory
from quire.ipc import encode
from quire.observability import log
from quire.observability.machine_memory import num_oom_kills

ENGINE_COMMAND = python_command("quire.engine_process.engine_main")

_EXIT_POLL_S = 0.01
"""Interval of checking whether a process has ended, once its connection is closed."""


class EngineEnds:
    """This process's ends of the socket, the record and the file that an engine process inherits.

    The caller closes the other ends by `close_inherited` once the process has started, and these
    ends by `close` if it has not.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            self._activity_fd = make_shared_memory()
            undo.callback(os.close, self._activity_fd)
            #: The record that the process writes.
            self.record = ActivityRecord(self._activity_fd)
            #: Text that the process writes to stderr before it has started.
            self.start_text = StartText()
            undo.callback(self.start_text.close)
            self.sock, self._theirs = socket.socketpair()
            undo.pop_all()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the process that follow its command."""
        descriptors = ("--fd", str(self._theirs.fileno()), "--activity-fd", str(self._activity_fd))
        return *descriptors, *StartText.arguments, *log.arguments()

    @property
    def options(self) -> dict[str, Any]:
        """Options of `subprocess.Popen` for the process."""
        return {
            "pass_fds": (self._theirs.fileno(), self._activity_fd),
            "stderr": self.start_text.descriptor,
            **child_options(),
        }

    def close_inherited(self) -> None:
        """Close the ends that the process has inherited."""
        os.close(self._activity_fd)
        self._theirs.close()

    def close(self) -> None:
        """Close this process's ends."""
        self.sock.close()
        self.start_text.close()


class EarlyProcess:
    """An engine process that loads its libraries until a `ProcessLink` takes it. Has the members of
    `asyncio.subprocess.Process` that the link uses.

    Invariant: unless a link has taken the process, `close` ends it.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """Start the process. Raises OSError if it can't be started."""
        self.ends = EngineEnds()
        #: Whether a link has taken the process, which ends it.
        self.is_taken = False
        #: The system's count of out-of-memory kills before the process started.
        self.num_oom_kills = num_oom_kills()
        try:
            words = [*command, *self.ends.arguments]
            self._process = subprocess.Popen(words, **self.ends.options)
        except BaseException:
            self.ends.close()
            raise
        finally:
            self.ends.close_inherited()
        with contextlib.suppress(OSError):  # it has ended, as the link will notice
            self.ends.sock.sendall(encode(Prepare()))

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End the process by a signal."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(_EXIT_POLL_S)
        return status

    def close(self) -> None:
        """End the process, unless a link has taken it."""
        if not self.is_taken:
            self._process.kill()
            self._process.wait()
            self.ends.close()
