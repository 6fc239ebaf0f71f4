"""Rank 0 with other ranks' processes, which only remember what they are told."""

import fcntl
import os
import signal
import threading
import time

import psutil
import pytest
import torch
from tests.runtime.fake_rank import COMMAND, RecordingRunner

from quire.core.step import Chunk, StepPlan
from quire.errors import CheckpointError, EngineDeadError
from quire.runtime.executor import DistributedRunner, Workers, first_rank


@pytest.fixture(autouse=True)
def nobody_waits_long(monkeypatch):
    """For the reasons of workers that have not failed."""
    monkeypatch.setattr("quire.runtime.executor.FAILURE_TIMEOUT_S", 0.3)


@pytest.fixture
def make_workers():
    """make_workers(options, size=2) -> Workers, which have ended after the test."""
    before = psutil.Process().children()
    made = []

    def make(options=None, size=2):
        made.append(Workers(COMMAND, options or {}, size))
        return made[-1]

    yield make
    for workers in made:
        workers.end()
    assert psutil.Process().children() == before


@pytest.fixture
def start(make_workers):
    """start(options, runner of rank 0, size=2) -> (DistributedRunner, Workers)."""

    def start(options=None, runner=None, size=2):
        workers = make_workers(options, size)
        workers.wait_joining()
        workers.wait_ready()
        return DistributedRunner(runner or RecordingRunner(), workers), workers

    return start


def pid_of(workers):
    return workers._processes[0].pid


def wait_for_lines(path, count):
    deadline_s = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return path.read_text().splitlines()


def test_all_ranks_make_all_calls(start, tmp_path) -> None:
    calls = tmp_path / "calls"
    own = RecordingRunner()
    runner, workers = start({"calls": str(calls)}, own)
    runner.execute(StepPlan(0, 1, 1))
    runner.sample()
    runner.execute(StepPlan(1, 1, 2, chunks=(Chunk(0, 2, (7,)),)))
    runner.sample({0: [b"\x03", b"\x05"]})
    assert [runner.result().step_id for _ in range(2)] == [0, 1]
    runner.reset()
    assert len(own.calls) == 7 == runner.num_calls
    assert wait_for_lines(calls, 8) == ['[1, 2, "ranks"]', *own.calls]
    workers.end()
    workers.end()


def test_processes_end_with_the_object() -> None:
    workers = Workers(COMMAND, {}, 2)
    process, folder = psutil.Process(pid_of(workers)), workers.rendezvous.parent
    assert folder.exists()
    del workers
    assert not process.is_running() and not folder.exists()


def test_why_a_worker_can_not_be_built_is_raised(make_workers) -> None:
    workers = make_workers({"fail": "no config.json"}, 3)
    workers.wait_joining()
    with pytest.raises(CheckpointError, match=r"^rank 1: no config\.json$"):
        workers.wait_ready()


def test_a_worker_that_dies_before_it_has_said_anything(make_workers) -> None:
    workers = make_workers({"die_joining": True})
    with pytest.raises(EngineDeadError, match=r"^rank 1: its process has died \(exit code 3\)$"):
        workers.wait_joining()


def test_a_process_that_can_not_be_started() -> None:
    with pytest.raises(EngineDeadError, match=r"can't be started: .*/no/such/program"):
        Workers(["/no/such/program"], {}, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fail_at": 1}, "rank 1: RuntimeError: step 1 can't be computed"),
        ({"die_at": 1}, r"rank 1: its process has died \(exit code 9\)"),
    ],
)
def test_a_call_that_fails_elsewhere_ends_the_group(start, options, reason) -> None:
    """Rank 0's own part is a collective that breaks off, as gloo's do when a rank is gone."""

    class Broken(RecordingRunner):
        def execute(self, plan):
            if plan.step_id == 1:
                raise RuntimeError("connection reset")
            super().execute(plan)

    runner, workers = start(options, Broken())
    runner.execute(StepPlan(0, 1, 1))
    with pytest.raises(EngineDeadError, match=reason) as raised:
        runner.execute(StepPlan(1, 1, 1))
    assert "connection reset" in str(raised.value.__cause__)
    assert not psutil.pid_exists(pid_of(workers))
    runner.reset()  # as the engine does after any failure
    for call in (runner.sample, runner.result):
        with pytest.raises(EngineDeadError, match=f"{reason}; make a new engine"):
            call()


def test_a_call_that_fails_here_ends_the_group(start) -> None:
    runner, workers = start({}, RecordingRunner({"fail_at": 0}))
    with pytest.raises(EngineDeadError, match="rank 0: step 0 can't be computed"):
        runner.execute(StepPlan(0, 1, 1))
    assert not psutil.pid_exists(pid_of(workers))


def test_a_worker_killed_between_steps_fails_the_next_call(start) -> None:
    runner, workers = start()
    os.kill(pid_of(workers), signal.SIGKILL)
    workers._processes[0].wait(5)
    with pytest.raises(
        EngineDeadError, match=r"rank 1: its process has died \(signal 9\)"
    ) as raised:
        runner.execute(StepPlan(0, 1, 1))
    assert raised.value.rank_status == -signal.SIGKILL


def test_a_result_computed_while_a_rank_died_is_discarded(start) -> None:
    """On GPUs the group is aborted then, and what the device computed is anything."""

    class Unaware(RecordingRunner):
        def result(self):
            os.kill(pid_of(workers), signal.SIGKILL)
            died.wait(10)
            return super().result()

    died = threading.Event()
    runner, workers = start({}, Unaware())
    workers.watch(died.set)
    runner.execute(StepPlan(0, 1, 1))
    runner.sample()
    with pytest.raises(EngineDeadError, match="rank 1: its process has died"):
        runner.result()


def test_an_interrupted_call_ends_the_group(start) -> None:
    class Interrupted(RecordingRunner):
        def execute(self, plan):
            raise KeyboardInterrupt

    runner, _workers = start({}, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        runner.execute(StepPlan(0, 1, 1))
    with pytest.raises(EngineDeadError, match="a step was interrupted; make a new engine"):
        runner.sample()


def test_a_worker_that_does_not_end_is_killed(start, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("quire.runtime.executor.END_TIMEOUT_S", 0.1)
    calls = tmp_path / "calls"
    runner, workers = start({"hang_at": 0, "calls": str(calls)})
    runner.execute(StepPlan(0, 1, 1))
    wait_for_lines(calls, 2)
    workers.end()
    assert not psutil.pid_exists(pid_of(workers))


def test_the_watcher_tells_of_a_death_and_of_nothing_else(start) -> None:
    deaths = []
    _runner, workers = start(size=3)
    workers.watch(lambda: deaths.append("a worker"))
    os.kill(pid_of(workers), signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while not deaths and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert deaths == ["a worker"] and workers.has_lost_rank
    _other, others = start()
    others.watch(lambda: deaths.append("our own end"))
    others.end()
    time.sleep(0.05)
    assert deaths == ["a worker"] and not others.has_lost_rank


def test_a_build_that_fails_on_rank_0_ends_the_others() -> None:
    workers = Workers(COMMAND, {}, 1)  # alone, so that the group meets without processes of torch
    with (
        pytest.raises(CheckpointError, match="no such file"),
        first_rank(workers, torch.device("cpu")) as group,
    ):
        assert (group.rank, group.size, group.least(4)) == (0, 1, 4)
        raise CheckpointError("no such file")
    assert not workers.rendezvous.parent.exists()


def test_a_build_that_breaks_off_tells_which_rank_is_to_blame(make_workers, monkeypatch) -> None:
    class Group:
        def __init__(self, *_arguments, **_options):
            raise RuntimeError("the others didn't come")

    monkeypatch.setattr("quire.runtime.executor.ProcessGroup", Group)
    with (
        pytest.raises(CheckpointError, match="rank 1: weights are missing"),
        first_rank(make_workers({"fail": "weights are missing"}), torch.device("cpu")),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="the others didn't come"),
        first_rank(make_workers(), torch.device("cpu")),
    ):
        pass


def test_a_shared_folder_is_locked_until_the_last_rank_has_ended(tmp_path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        workers = Workers(COMMAND, {}, 3, lock.fileno())
    with (tmp_path / "lock").open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert len(workers.moves) == 2
        workers.end()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert all(sock.fileno() < 0 for sock in workers.moves)
