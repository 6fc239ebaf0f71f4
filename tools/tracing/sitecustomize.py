"""Notes which files of the package call which, in every Python process that finds this file.

Python imports it at start where this folder is on PYTHONPATH; `tools/request_path.py` puts it there
and says by HOUSE_TRACE where the notes go. A process notes only while `FOLDER/on` exists, and
writes `FOLDER/PID.json` when that file goes: [seconds, caller's file or null, callee's file, its
function], each once, at its first call.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER = os.environ.get("HOUSE_TRACE", "")
SOURCE = os.environ.get("HOUSE_SOURCE", "")
POLL_S = 0.01
LOOP_FILES = ("asyncio/events.py", "asyncio/base_events.py", "asyncio/runners.py")
"""Files of the event loop. A task that the loop resumes has no calling file."""


class Notes:
    """The calls in this process while noting was on."""

    def __init__(self) -> None:
        self.is_on = False
        self.first_s: dict[tuple[str | None, str, str], float] = {}

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """A profile function: called at every call of a Python function."""
        if not self.is_on or event != "call":
            return
        callee = frame.f_code.co_filename
        if callee.startswith(SOURCE):
            call = (caller_of(frame), callee[len(SOURCE) :], frame.f_code.co_qualname)
            if call not in self.first_s:
                self.first_s[call] = time.monotonic()

    def watch(self) -> None:
        """Switch noting as the folder says, for as long as the process lives."""
        switch, path = Path(FOLDER) / "on", Path(FOLDER) / f"{os.getpid()}.json"
        while True:
            time.sleep(POLL_S)
            if switch.exists() == self.is_on:
                continue
            self.is_on = not self.is_on
            if self.is_on:
                self.first_s.clear()
                path.unlink(missing_ok=True)
            else:
                entries = [[at_s, *call] for call, at_s in list(self.first_s.items())]
                whole = path.with_suffix(".part")
                whole.write_text(json.dumps(entries))
                whole.rename(path)


def caller_of(frame: FrameType) -> str | None:
    """The nearest file of the package on the way up; None: there is none before the event loop."""
    above = frame.f_back
    while above is not None:
        name = above.f_code.co_filename
        if name.startswith(SOURCE):
            return name[len(SOURCE) :]
        if name.endswith(LOOP_FILES):
            return None
        above = above.f_back
    return None


if FOLDER and SOURCE:
    notes = Notes()
    sys.setprofile(notes.note)
    threading.setprofile(notes.note)
    threading.Thread(target=notes.watch, daemon=True, name="tracing").start()
