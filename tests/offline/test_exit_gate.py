"""At the interpreter's end no thread is left inside of the engine's native code."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from quire.offline import exit_gate
from quire.offline.exit_gate import ExitGate

WAIT_S = 60.0

# A thread that Python does not wait for uses torch when the main thread ends.
PROGRAM = """
import sys, threading
import quire

def generate():
    llm = quire.LLM(kernels="torch")
    params = quire.SamplingParams(max_tokens=400, ignore_eos=True)
    while True:
        for _ in llm.stream("import os", params):
            has_begun.set()

has_begun = threading.Event()
threading.Thread(target=generate, daemon=True).start()
has_begun.wait(60)
"""


@pytest.fixture
def started() -> Callable[[Callable[[], object]], threading.Thread]:
    def start(work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    return start


def test_closing_waits_for_those_inside_and_lets_no_other_in(started) -> None:
    gate, is_inside, may_leave = ExitGate(), threading.Event(), threading.Event()
    passed = []

    def work() -> None:
        with gate:
            is_inside.set()
            may_leave.wait(WAIT_S)
        passed.append("first")
        with gate:
            passed.append("second")

    thread = started(work)
    assert is_inside.wait(WAIT_S)
    assert not gate.close(0.01), "a thread is inside"
    may_leave.set()
    assert gate.close(WAIT_S)
    thread.join(0.05)
    assert thread.is_alive() and passed == ["first"]


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(monkeypatch) -> None:
    gate = ExitGate()
    with gate:  # as another thread was when the process was forked
        monkeypatch.setattr(exit_gate.os, "getpid", lambda: 1)
        assert gate.close(WAIT_S)
    with gate:  # the interpreter's own thread may still
        gate.stop_point()


def test_long_work_stops_where_it_asks(started) -> None:
    gate, is_inside = ExitGate(), threading.Event()

    def work() -> None:
        with gate:
            while True:
                gate.stop_point()
                is_inside.set()

    thread = started(work)
    assert is_inside.wait(WAIT_S)
    assert gate.close(WAIT_S)
    assert thread.is_alive()


def test_a_thread_that_generates_while_the_interpreter_ends_aborts_nothing() -> None:
    words = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
