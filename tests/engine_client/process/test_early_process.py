"""An engine process that starts before its link: taken by the link, or ended without it."""

import asyncio
import sys

import psutil
import pytest
from tests.engine_client.engine_harness import own_processes
from tests.engine_client.fake_engine_process import COMMAND

from quire.engine_client.engine_slot import ONLY_ENGINE
from quire.engine_client.one_engine import start_one_engine
from quire.engine_client.process import early_process, process_link
from quire.engine_client.process.early_process import EarlyProcess
from quire.errors import EngineDeadError

WAIT_S = 60.0


def start(early: EarlyProcess) -> int | None:
    """Start an engine with this process, and end it. Returns the process's id."""

    async def run() -> int | None:
        engine = await start_one_engine({}, command=COMMAND, early=early)
        try:
            assert engine.facts["kernels"] == "fake"
            return engine.engines.all[ONLY_ENGINE].supervisor.pid
        finally:
            await engine.shutdown(drain=False, timeout_s=5.0)

    return asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_the_engine_takes_the_process_that_has_started() -> None:
    early = EarlyProcess(COMMAND)
    assert early.returncode is None and not early.is_taken
    assert start(early) == early.pid
    assert early.is_taken and early.returncode is not None
    early.close()  # the link has ended it


def test_a_process_that_no_engine_takes_is_ended() -> None:
    before = own_processes()
    early = EarlyProcess(COMMAND)
    assert own_processes() != before
    early.close()
    assert not psutil.pid_exists(early.pid) and own_processes() == before


def test_a_process_that_ended_early_says_why() -> None:
    talk = "import sys; sys.exit('no library here')"
    early = EarlyProcess((sys.executable, "-c", talk))
    with pytest.raises(EngineDeadError, match="exit code 1: no library here"):
        start(early)


def test_memory_that_ran_out_before_the_link_took_the_process_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system's count of kills is read before the process starts, and after its end."""
    monkeypatch.setattr(early_process, "num_oom_kills", lambda: 4)
    early = EarlyProcess((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    monkeypatch.setattr(process_link, "num_oom_kills", lambda: 5)
    with pytest.raises(EngineDeadError, match="the system did that because memory ran out"):
        start(early)


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(OSError, match="no-such-program"):
        EarlyProcess(("./no-such-program",))
