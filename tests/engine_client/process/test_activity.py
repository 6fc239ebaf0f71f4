"""What one process writes and another reads after its death."""

import os
import subprocess
import sys

import pytest

from quire.engine_client.process.activity import (
    NUM_BYTES,
    Activity,
    ActivityRecord,
    Doing,
    make_shared_memory,
)

NUM_PACE_BYTES = 16
"""The bytes before the activity, which any bytes can be."""

WRITER = """
import os, signal, sys
from quire.engine_client.process.activity import ActivityRecord

record = ActivityRecord(int(sys.argv[1]))
record.compute({"a", "b"}, 0.1)
record.record_request("c")
record.compute(None, 0.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_activity_record_outlives_a_kill() -> None:
    fd = make_shared_memory()
    try:
        record = ActivityRecord(fd)
        assert record.read() == Activity(Doing.LOADING)
        subprocess.run([sys.executable, "-c", WRITER, str(fd)], pass_fds=(fd,), check=False)
    finally:
        os.close(fd)
    assert record.read() == Activity(Doing.COMPUTING, frozenset({"a", "b"}))


def test_each_thing_that_is_done_replaces_the_one_before() -> None:
    record = ActivityRecord()
    record.compute(["with\nbreaks", "and \N{SNOWMAN}", ""], 0.1)
    assert record.read() == (Doing.COMPUTING, {"with\nbreaks", "and \N{SNOWMAN}", ""})
    record.idle()
    assert record.read() == (Doing.IDLE, frozenset())
    record.plan()
    assert record.read() == (Doing.PLANNING, None)
    record.record_request("x" * 100)
    assert record.read() == (Doing.TAKING_IN, {"x" * 100})
    record.compute(None, 0.0)
    assert record.read() == (Doing.COMPUTING, {"with\nbreaks", "and \N{SNOWMAN}", ""})
    record.compute([], 0.0)
    assert record.read() == (Doing.COMPUTING, frozenset())


def test_too_many_request_ids_are_recorded_as_all() -> None:
    record = ActivityRecord()
    record.compute([f"{index:0128}" for index in range(NUM_BYTES // 128)], 0.0)
    found = record.read()
    assert found == (Doing.COMPUTING, None) and found.concerns("anybody")
    record.compute([f"{index:0100}" for index in range(1024)], 0.0)
    found = record.read()
    assert found.concerns(f"{1023:0100}") and not found.concerns("anybody")


@pytest.mark.parametrize(
    "written",
    [b"\xff" * 64, b"\x04\0\0\0\x05\0\0\0\xc1\xc1\xc1\xc1\xc1", b"\x04\0\0\0\x02\0\0\0\x92\xa1"],
)
def test_nonsense_stands_for_all(written: bytes) -> None:
    record = ActivityRecord()
    record._memory[NUM_PACE_BYTES : NUM_PACE_BYTES + len(written)] = written
    assert record.read() == (Doing.COMPUTING, None)
