"""The start and the end of the command's process: signals, standard streams, exit functions."""

import os
import signal
import subprocess
import sys

import pytest

# The command's imports take a minute, of which the test waits for the first moment.
PROGRAM = """
import importlib.abc, os, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "quire.cli.main":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
pid = int(sys.argv.pop(1))
if pid:
    os.getpid = lambda: pid
from quire.cli.start import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("pid", "words", "number", "expected"),
    [
        (1, ["serve", "--port", "0"], signal.SIGTERM, 0),
        (0, ["serve", "--port", "0"], signal.SIGTERM, 0),
        (1, ["--debug", "cluster", "agent"], signal.SIGTERM, 0),
        (1, ["batch", "calls.jsonl"], signal.SIGTERM, 143),
        (0, ["batch", "calls.jsonl"], signal.SIGTERM, -signal.SIGTERM),
        (0, ["serve"], signal.SIGINT, 130),
        (0, ["doctor"], signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_a_command_that_is_not_imported_yet(
    pid: int, words: list[str], number: int, expected: int
) -> None:
    # Who starts the tests may ignore SIGINT, and processes inherit that.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + PROGRAM
    command = [sys.executable, "-c", program, str(pid), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (expected, "")


# A command that registers a function for the process's end, and an object that notes its own end.
ENDING = """
import atexit, os, sys
from quire.cli import start

class Noted:
    def __del__(self, write=os.write):
        write(1, b"freed\\n")

def command():
    atexit.register(print, "registered by the command")
    print("printed by the command")
    if sys.argv[1] == "raises":
        sys.exit(int(sys.argv[2]))
    return int(sys.argv[2])

noted = Noted()
start.main = command
sys.exit(start.run_process())
"""


@pytest.mark.parametrize(("how", "freed"), [("returns", ""), ("raises", "freed\n")])
@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_returns_ends_without_freeing_what_it_holds(
    how: str, freed: str, code: int
) -> None:
    command = [sys.executable, "-c", ENDING, how, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    printed = f"printed by the command\nregistered by the command\n{freed}"
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


def test_functions_that_were_registered_before_the_command_are_called() -> None:
    """A tracer or a measurement of coverage registers one before the command's first line."""
    program = f"import atexit; atexit.register(print, 'registered before'){ENDING}"
    command = [sys.executable, "-c", program, "returns", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    *_, before, freed = done.stdout.splitlines()
    assert (done.returncode, before, freed) == (3, "registered before", "freed")


FULL = "quire: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("code", "is_full", "expected", "errors"),
    [(0, True, 1, FULL), (3, True, 3, FULL), (0, False, 1, ""), (3, False, 3, "")],
)
def test_output_that_cannot_be_written_is_reported_unless_its_reader_has_gone(
    code: int, is_full: bool, expected: int, errors: str
) -> None:
    read, write = (None, os.open("/dev/full", os.O_WRONLY)) if is_full else os.pipe()
    if read is not None:
        os.close(read)
    # The output is written at the end, as that of an unbuffered process is not.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", ENDING, "returns", str(code)]
    with open(write, "wb") as out:
        pipe = subprocess.PIPE
        done = subprocess.run(
            command, stdout=out, stderr=pipe, text=True, env=environment, timeout=60
        )
    assert (done.returncode, done.stderr) == (expected, errors)


# A command whose first file and whose child process must not get, or lack, a standard stream.
OPENING = """
import os, subprocess, sys
from quire.cli import start

def command():
    assert os.open(os.devnull, os.O_RDONLY) > 2
    assert not sys.stdin.isatty()
    print("printed")
    print("printed", file=sys.stderr)
    child = "import os; [os.fstat(number) for number in range(3)]"
    return subprocess.run([sys.executable, "-c", child]).returncode

start.main = command
sys.exit(start.run_process())
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_are_replaced(closed: str) -> None:
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", OPENING]
    assert subprocess.run(words, timeout=60, stdin=subprocess.DEVNULL).returncode == 0
