"""One line of JSON a step, in order, whole when flushed or closed."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import ConfigurationError
from quire.observability.step_trace import (
    STEP_LOGGER,
    StepRecord,
    StepTrace,
    log_step,
    read_step_trace,
)

RECORD = StepRecord(
    step_id=0,
    num_rows=3,
    num_tokens=18,
    num_prefill_tokens=16,
    num_waiting=2,
    schedule_s=1.5e-5,
    build_s=2e-5,
    plan_s=1e-5,
    forward_s=0.25,
    sample_s=0.001,
    wait_s=0.002,
    apply_s=1e-5,
    elapsed_s=0.26,
    num_blocks_used=7,
    num_preemptions=1,
)


def test_records_are_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    records = [replace(RECORD, step_id=step_id) for step_id in range(5)]
    with StepTrace(path) as trace:
        for record in records:
            trace.write(record)
    assert list(read_step_trace(path)) == records


def test_a_line_is_plain_json_with_the_names_of_the_record(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with StepTrace(path) as trace:
        trace.write(RECORD)
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {
        name: getattr(RECORD, name) for name in StepRecord.__dataclass_fields__
    }


def test_lines_are_buffered_until_flushed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with StepTrace(path) as trace:
        trace.write(RECORD)
        assert path.read_text() == ""
        trace.flush()
        assert list(read_step_trace(path)) == [RECORD]


def test_an_older_trace_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("old\n")
    StepTrace(path).close()
    assert path.read_text() == ""


def test_closing_twice_is_fine_and_writing_afterwards_is_a_bug(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps.jsonl")
    trace.close()
    trace.close()
    with pytest.raises(AssertionError, match="closed"):
        trace.write(RECORD)


def test_an_error_inside_still_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with pytest.raises(KeyError), StepTrace(path) as trace:
        trace.write(RECORD)
        raise KeyError
    assert list(read_step_trace(path)) == [RECORD]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere/steps.jsonl.*No such file"):
        StepTrace(tmp_path / "nowhere" / "steps.jsonl")


def test_a_step_is_one_log_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, STEP_LOGGER.name):
        log_step(RECORD)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, STEP_LOGGER.name):
        log_step(RECORD)
    (line,) = caplog.records
    assert "step 0: 3 rows, 18 tokens (16 of them prefill), 2 waiting, 7 blocks" in line.message
    assert "260.00 ms" in line.message and "forward 250.00" in line.message
    assert "wait 2.00, apply 0.01" in line.message
    assert line.__dict__["fields"]["num_blocks_used"] == 7
