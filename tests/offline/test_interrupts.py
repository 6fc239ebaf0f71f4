"""Ctrl-C at awkward moments: real signals to this process."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quire.core.sampling_params import SamplingParams
from quire.offline.interrupts import HELD_SIGNALS, deferred_interrupts
from quire.offline.llm import LLM


@pytest.fixture(autouse=True)
def _signals_are_handled() -> Iterator[None]:
    """Whoever starts the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_comes_when_the_block_has_ended() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(), deferred_interrupts():
        interrupt()
        reached.append("the end")
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_held_signal_is_handled_once_when_the_block_has_ended() -> None:
    """Also where one of the handlers raises, and without losing the handlers."""
    handled: list[int] = []

    def note(number: int, _frame: object) -> None:
        handled.append(number)
        if number == signal.SIGALRM:
            raise TimeoutError

    before = {number: signal.signal(number, note) for number in HELD_SIGNALS}
    try:
        with pytest.raises(TimeoutError), deferred_interrupts() as held:
            for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM):
                signal.raise_signal(number)
            assert held and not handled
        assert sorted(handled) == sorted([signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM])
        assert all(signal.getsignal(number) is note for number in HELD_SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_another_thread_is_left_alone() -> None:
    handlers = []

    def look() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def _give_up(_number: int, _frame: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("method", ["add", "schedule", "apply", "_launch", "_plan_all"])
def test_a_signal_in_the_planning_leaves_a_working_llm(
    monkeypatch: pytest.MonkeyPatch, method: str, number: signal.Signals
) -> None:
    """Ctrl-C, or a time limit that the program has set itself."""
    llm = LLM(dtype="float32", max_model_len=128)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    plain = getattr(llm.engine.scheduler, method)

    def interrupted(*args: object) -> object:
        signal.raise_signal(number)
        return plain(*args)

    before = signal.signal(signal.SIGALRM, _give_up)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, method, interrupted)
            with pytest.raises((KeyboardInterrupt, TimeoutError)):
                llm.generate(["import os", "class A:"], params, use_tqdm=False)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert llm.engine.stats().num_held_blocks == 0 and not llm.engine.has_work()
    again = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    assert again == expected


def test_a_progress_bar_is_not_interrupted_in_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would keep the lock of all bars, which the other threads wait for."""
    entered, left = [], []

    class Bar:
        format_dict = {"elapsed": 0.0}  # noqa: RUF012
        interrupted = ""

        def __init__(self, **_: object) -> None:
            self._work("make")

        def update(self, _: int) -> None:
            self._work("update")

        def close(self) -> None:
            self._work("close")

        def _work(self, what: str) -> None:
            entered.append(what)
            if what == self.interrupted:
                interrupt()
            left.append(what)

    monkeypatch.setattr("quire.offline.llm.tqdm", Bar)
    llm = LLM(dtype="float32", max_model_len=128)
    params = SamplingParams(max_tokens=2)
    for what in ("make", "update", "close"):
        Bar.interrupted = what
        with pytest.raises(KeyboardInterrupt):
            llm.generate("import os", params)
    assert entered == left and {"make", "update", "close"} <= set(left)
    entered.clear()
    llm.generate("import os", params, use_tqdm=False)
    assert not entered, "nobody asked for a bar"
