"""Workers for grammars: real processes, ended where they take too much or their call is over."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine_client.grammar_forms import WholeAnswer, as_text
from quire.engine_client.grammars import LARGE_VOCABULARY
from quire.engine_client.process import grammar_compilers
from quire.engine_client.process.grammar_compilers import GrammarCompilers, WorkerLostError
from quire.errors import EngineDeadError, InvalidRequestError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.parsers.dialect_choice import find_dialect

# In place of llguidance: forms whose texts say what a worker does.
PROGRAM = """
import os, sys, time
from quire.engine_client.process import grammar_main
from quire.text.grammars.compiler import GrammarCompiler
grammar_main.MAX_JOB_S = 0.4
grammar_main._MAX_KEPT_BYTES = 32 << 20
def compile(self, grammar, domain=""):
    if "BURN" in grammar:
        while True: pass
    if "SLEEP" in grammar: time.sleep(60)
    if "EAT" in grammar: bytearray(2 << 30)
    if "ABORT" in grammar: os.abort()
    if "GROW" in grammar: self.kept = bytearray(36 << 20)
GrammarCompiler.compile = compile
sys.exit(grammar_main.main())
"""
FAKE = (sys.executable, "-P", "-c", PROGRAM)


def compilers(folder: Path = EMBEDDED_MODEL, vocab_size: int = 4096, **options) -> GrammarCompilers:
    return GrammarCompilers(folder, vocab_size, find_dialect(None, "hermes"), **options)


async def make(made: GrammarCompilers, regex: str) -> str | None:
    return await made.make(as_text(WholeAnswer(StructuredOutputsParams(regex=regex))), "the field")


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int) -> None:
    until_s = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < until_s, f"process {pid} is still there"
        time.sleep(0.01)


def test_grammars_are_made_and_refusals_come_back_with_their_field():
    async def run() -> None:
        made = compilers()
        assert (await make(made, "[a-z]+")).endswith("start: /[a-z]+/")
        with pytest.raises(InvalidRequestError, match="unclosed character class") as refused:
            await make(made, "[a-z")
        assert refused.value.param == "structured_outputs.regex"
        (worker,) = made._idle
        assert (await make(made, "b")).endswith("/b/") and made._idle == [worker]
        if (score := Path(f"/proc/{worker.pid}/oom_score_adj")).exists():
            assert score.read_text().strip() == "1000"  # it is ended before all others
        process = made._process
        made.close()
        made.close()
        wait_gone(worker.pid)
        wait_gone(process.pid)

    asyncio.run(run())


def test_a_worker_that_takes_too_much_or_dies_is_the_clients_mistake_and_is_replaced():
    async def run() -> None:
        made = compilers(command=FAKE)
        assert await make(made, "good")
        for regex in ("BURN", "EAT", "ABORT"):
            with pytest.raises(InvalidRequestError, match="the field: compiling it takes") as error:
                await make(made, regex)
            assert error.value.param == "the field" and not made._idle
            assert await make(made, "good")
        process = made._process
        assert await make(made, "GROW") and not made._idle
        assert await make(made, "good") and made._process is process
        made.close()

    asyncio.run(run())


def test_only_a_worker_that_used_up_its_time_is_surely_ended_by_its_form(monkeypatch):
    async def run() -> None:
        made = compilers(command=FAKE)
        assert await make(made, "good")
        # The worker burns 0.4 s; the others end, on a busy machine too, before a minute is over.
        for regex, is_lost, limit_s in (("BURN", False, 0.1), ("ABORT", True, 60.0)):
            monkeypatch.setattr(grammar_compilers, "MAX_JOB_S", limit_s)
            with pytest.raises(InvalidRequestError) as error:
                await make(made, regex)
            assert isinstance(error.value, WorkerLostError) == is_lost
        assert await make(made, "good")
        (worker,) = made._idle
        call = asyncio.create_task(make(made, "SLEEP"))
        await asyncio.sleep(0.05)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await call
        made.close()

    asyncio.run(run())


def test_a_call_that_ends_takes_its_worker_with_it_and_so_does_the_end_of_all():
    async def run() -> None:
        made = compilers(command=FAKE)
        assert await make(made, "good")
        (worker,) = made._idle
        call = asyncio.create_task(make(made, "SLEEP"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        wait_gone(worker.pid)
        open_calls = [asyncio.create_task(make(made, "SLEEP")) for _ in range(2)]
        assert await make(made, "good")
        (worker,) = made._idle
        made.close()
        wait_gone(worker.pid)
        ended = await asyncio.gather(*open_calls, return_exceptions=True)
        assert all(isinstance(error, InvalidRequestError | EngineDeadError) for error in ended)

    asyncio.run(run())


def test_a_process_that_died_is_started_again():
    async def run() -> None:
        made = compilers()
        assert await make(made, "a")
        (worker,) = made._idle
        made._process.kill()
        made._process.wait()
        assert await make(made, "a")
        wait_gone(worker.pid)
        made.close()

    asyncio.run(run())


def test_a_large_vocabulary_is_read_before_the_first_grammar():
    small = compilers()
    small.begin()
    assert small._process is None
    large = compilers(vocab_size=LARGE_VOCABULARY)
    large.begin()
    assert large._process is not None
    large.limit_to(LARGE_VOCABULARY)
    process = large._process
    assert process is not None
    large.limit_to(100)
    assert large._process is None and process.poll() is not None
    large.close()


def test_a_tokenizer_that_can_not_be_read_fails_each_grammar(tmp_path, capfd):
    made = compilers(tmp_path, LARGE_VOCABULARY)
    made.begin()

    async def run() -> None:
        with pytest.raises(EngineDeadError, match="has ended"):
            await make(made, "a")
        made.close()

    asyncio.run(run())
    assert "tokenizer" in capfd.readouterr().err
