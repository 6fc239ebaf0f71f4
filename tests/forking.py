"""Runs programs in processes of their own that need not import torch first: forks of one that has.

For examples of the documentation, which register what no other test may find.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

# One thread alone, so that a fork is whole. A program reads nothing, and is `__main__`.
PARENT = """
import json, os, sys, traceback
import torch
import quire.offline.llm

def run(code, path):
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(out, number)
    status = 1
    try:
        exec(compile(code, "<program>", "exec"), globals())
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

for line in sys.stdin:
    code, path = json.loads(line)
    child = os.fork()
    if child == 0:
        run(code, path)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Of one process, which is ended by `close`."""

    def __init__(self, folder: Path) -> None:
        """folder: where the programs are run."""
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", PARENT]
        self._parent = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True)

    def run(self, code: str) -> tuple[int, str]:
        """The exit code of a program, and all that it printed."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            self._parent.stdin.write(json.dumps([code, output.name]) + "\n")
            self._parent.stdin.flush()
            status = self._parent.stdout.readline()
            return int(status), output.read()

    def close(self) -> None:
        """End the process, which has nothing to put in order."""
        self._parent.kill()
        self._parent.communicate()
