"""Ctrl-C at awkward moments: real signals to this process."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quire.core.sampling_params import SamplingParams
from quire.engine.interrupts import deferred_interrupts
from quire.engine.llm import LLM


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


def test_another_thread_is_left_alone() -> None:
    handlers = []

    def look() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


@pytest.mark.parametrize("method", ["add", "schedule", "apply", "_launch", "_plan_all"])
def test_ctrl_c_in_the_planning_leaves_a_working_llm(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    llm = LLM(dtype="float32", max_model_len=128)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    plain = getattr(llm.engine.scheduler, method)

    def interrupted(*args: object) -> object:
        interrupt()
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["import os", "class A:"], params, use_tqdm=False)
    assert llm.engine.stats().num_held_blocks == 0 and not llm.engine.has_work()
    again = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    assert again == expected
