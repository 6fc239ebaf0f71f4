"""The loop without a model: requests in and out, failures of steps, aborts, the trace."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.content_spans import ContentSpan
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.scheduling.invariants import check_idle
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import ConstantPacer
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.stats import StatsLog
from quire.errors import InvalidRequestError, PromptTooLongError, RequestNeverFitsError
from quire.observability.step_trace import StepTrace, read_step_trace
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_runner import FakeRunner, Faults

GROUPS = (KVGroup((0,), KVKind.FULL, 64),)
LIMITS = ModelLimits(vocab_size=1000, max_model_len=100)
MODEL = FakeModel(vocab_size=1000)


def make_engine(*, num_blocks: int = 40, faults: Faults | None = None, clock=lambda: 0.0) -> Engine:
    memory = KVCacheManager(KVCacheConfig(GROUPS, num_blocks, 8, True, b"secret"))
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    runner = FakeRunner(
        GROUPS, num_blocks, 8, max_num_rows=8, max_num_tokens=100, model=MODEL, faults=faults
    )
    return Engine(scheduler, runner, LIMITS, clock=clock)


def request(
    name: str, length: int = 10, max_tokens: int = 12, n: int = 1, start: int = 1
) -> Request:
    return Request(
        name, list(range(start, start + length)), DecodingParams(max_tokens=max_tokens), n
    )


def run(engine: Engine) -> dict[tuple[str, int], list[SequenceOutput]]:
    found: dict[tuple[str, int], list[SequenceOutput]] = {}
    for _ in range(1000):
        if not engine.has_work():
            check_idle(engine.scheduler)
            return found
        for output in engine.step():
            found.setdefault((output.request_id, output.branch_index), []).append(output)
    raise AssertionError("the engine did not end")


def test_contents_are_refused_by_an_engine_without_an_encoder():
    engine = make_engine()
    spans = (ContentSpan(2, 4, "ab" * 16),)
    with pytest.raises(InvalidRequestError, match="this model takes text only"):
        engine.add(replace(request("image"), content_spans=spans))
    assert not engine.has_work()


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_every_branch_is_answered_as_if_alone() -> None:
    engine = make_engine()
    requests = [request("a", n=3), request("b", 30, 40, start=200), request("c", 1, 1)]
    for wanted in requests:
        engine.add(wanted)
    found = run(engine)
    assert len(found) == 5
    for wanted in requests:
        for branch in range(wanted.n):
            expected = MODEL.expected_output(wanted, branch, LIMITS.max_model_len)
            assert tokens(found[wanted.request_id, branch]) == list(expected.token_ids)
            assert found[wanted.request_id, branch][-1].finish_reason is expected.finish_reason


def test_the_ledger_is_told_while_branches_share_their_prompt() -> None:
    """Two branches of 16 prompt tokens, in blocks of 8; two steps later each has a block more."""
    engine = make_engine()
    engine.add(request("a", length=16, n=2))
    assert engine.memory_report().free_bytes == 40 * 64
    for _ in range(2):
        engine.step()
    report = engine.memory_report()
    assert report.saved_bytes == 2 * 64 and report.total_bytes == 40 * 64
    assert report.useful_bytes == (16 + 2) * 8 and report.unfilled_bytes == 2 * 7 * 8
    found = engine.block_map()
    assert [len(use.owners) for use in found.blocks if use.owners].count(2) == 2
    owners = {owner for use in found.blocks for owner in use.owners}
    assert owners == {("a", 0), ("a", 1)} and len(found.blocks) == 40
    assert engine.block_map(38, 10).blocks == found.blocks[38:]
    run(engine)
    assert engine.memory_report().useful_share is None


def test_a_step_that_fails_once_changes_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(
        faults=Faults(execute_fails_at=frozenset({3}), sample_fails_at=frozenset({6}))
    )
    requests = [request("a"), request("b", 20, start=100)]
    for wanted in requests:
        engine.add(wanted)
    with caplog.at_level(logging.ERROR):
        found = run(engine)
    assert "a step failed" in caplog.text
    for wanted in requests:
        expected = MODEL.expected_output(wanted, 0, LIMITS.max_model_len)
        assert tokens(found[wanted.request_id, 0]) == list(expected.token_ids)
    assert engine.stats().num_failed_steps == 2


def test_a_request_that_makes_every_step_fail_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(faults=Faults(poison_token_id=999))
    good = [request("a"), request("b", 20, start=100)]
    bad = Request("bad", [5, 999, 6], DecodingParams(max_tokens=5))
    for wanted in (good[0], bad, good[1]):
        engine.add(wanted)
    found = run(engine)
    last = found["bad", 0][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and "the forward pass fails with this request" in last.error
    for wanted in good:
        expected = MODEL.expected_output(wanted, 0, LIMITS.max_model_len)
        assert tokens(found[wanted.request_id, 0]) == list(expected.token_ids)


@pytest.mark.parametrize("method", ["execute", "sample", "result"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, AssertionError, TypeError])
def test_an_interrupted_step_leaves_a_working_engine(
    monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException]
) -> None:
    engine = make_engine()
    requests = [request("a"), request("b", 20, start=100)]
    for wanted in requests:
        engine.add(wanted)
    engine.step()

    def interrupt(*args: object) -> None:
        raise error("not the request's fault")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, method, interrupt)
        with pytest.raises(error, match="not the request's fault"):
            engine.step()
    found = run(engine)  # ends with the check that nothing is held
    for wanted in requests:
        expected = MODEL.expected_output(wanted, 0, LIMITS.max_model_len)
        assert tokens(found[wanted.request_id, 0]) == list(expected.token_ids)[1:]


def test_abort_of_a_branch_leaves_the_others() -> None:
    engine = make_engine()
    engine.add(request("a", n=2, max_tokens=30))
    engine.step()
    engine.abort("a", 0)
    found = run(engine)
    assert ("a", 0) not in found
    assert found["a", 1][-1].finish_reason is not None


def test_abort_frees_all_at_once_and_forgets_the_id() -> None:
    engine = make_engine()
    engine.add(request("a", n=2))
    engine.step()
    assert engine.stats().num_held_blocks > 0
    engine.abort("a")
    assert engine.stats().num_held_blocks == 0
    assert not engine.has_work()
    engine.abort("a")
    engine.abort("never heard of")
    engine.add(request("a"))
    assert run(engine)["a", 0]


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (Request("x", [], DecodingParams(max_tokens=1)), InvalidRequestError, "empty"),
        (Request("x", [1000], DecodingParams(max_tokens=1)), InvalidRequestError, "1000"),
        (Request("x", [1] * 100, DecodingParams(max_tokens=1)), PromptTooLongError, "100 tokens"),
        (Request("in use", [1], DecodingParams(max_tokens=1)), InvalidRequestError, "in use"),
    ],
)
def test_a_refused_request_changes_nothing(bad: Request, kind: type, message: str) -> None:
    engine = make_engine()
    engine.add(request("in use"))
    with pytest.raises(kind, match=message):
        engine.add(bad)
    assert engine.stats().num_waiting == 1
    assert set(run(engine)) == {("in use", 0)}


def test_a_request_too_large_for_the_pool_is_refused_with_all_its_branches() -> None:
    engine = make_engine(num_blocks=5)
    with pytest.raises(RequestNeverFitsError, match="7 KV blocks, but the pool has 5"):
        engine.add(request("a", 20, 30, n=3))
    assert not engine.has_work()


def test_the_pacer_is_told_how_long_each_step_took() -> None:
    class Recorder(ConstantPacer):
        def __init__(self) -> None:
            self.observed: list[tuple[int, float]] = []

        def observe(self, step_id: int, seconds: float) -> None:
            self.observed.append((step_id, seconds))

    engine = make_engine(clock=time.perf_counter)
    engine.scheduler.pacer = recorder = Recorder()
    engine.add(request("a", max_tokens=5))
    started_s = time.perf_counter()
    run(engine)
    assert [step_id for step_id, _ in recorder.observed] == [0, 1, 2, 3, 4]
    assert all(seconds > 0 for _, seconds in recorder.observed)
    assert sum(seconds for _, seconds in recorder.observed) < time.perf_counter() - started_s


def test_the_trace_has_a_line_per_step(tmp_path: Path) -> None:
    engine = make_engine(clock=time.perf_counter)
    with StepTrace(tmp_path / "steps.jsonl") as trace:
        engine.trace = trace
        engine.add(request("a", 40, 6))
        engine.add(request("b", 40, 6, start=300))
        run(engine)
    records = list(read_step_trace(tmp_path / "steps.jsonl"))
    assert len(records) == engine.stats().num_steps
    assert sum(record.num_prefill_tokens for record in records) == 80
    assert records[0].num_tokens == 64 and records[0].num_rows == 2
    assert all(record.schedule_s > 0 and record.apply_s > 0 for record in records)
    assert all(record.elapsed_s > record.schedule_s + record.wait_s for record in records)
    assert records[-1].num_blocks_used == 0


def test_the_log_line_comes_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter(range(10_000))
    engine = make_engine(clock=lambda: next(seconds) / 4)
    engine.stats_log = StatsLog()
    engine.add(request("a", 10, 60))
    with caplog.at_level(logging.INFO, logger="quire"):
        run(engine)
    lines = [record.getMessage() for record in caplog.records]
    assert 3 <= len(lines) <= 20
    assert "1 running, 0 waiting" in lines[0] and "tokens/s generated" in lines[0]


# ---- resumed requests ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 11])
def test_a_resumed_request_gets_exactly_what_it_lacks(num_steps: int) -> None:
    params = DecodingParams(12, logprobs=2, prompt_logprobs=1, min_tokens=4, end_token_ids=(0,))
    asked = [Request(f"r{index}", [5, 6, 7 + index], params, n=3) for index in range(2)]
    first, second = make_engine(), make_engine()
    for wanted in asked:
        first.add(wanted)
    had: dict[tuple[str, int], list[SequenceOutput]] = {}
    for _ in range(num_steps):
        for output in first.step():
            had.setdefault((output.request_id, output.branch_index), []).append(output)
    for wanted in asked:
        outputs = [had.get((wanted.request_id, index), []) for index in range(3)]
        branches = {
            index: tokens(found)
            for index, found in enumerate(outputs)
            if not (found and found[-1].finish_reason)
        }
        if branches:
            second.add(wanted.resume(branches, has_output=any(outputs), elapsed_s=0.0))
    rest = run(second)
    for wanted in asked:
        for index in range(3):
            key = wanted.request_id, index
            expected = MODEL.expected_output(wanted, index, LIMITS.max_model_len)
            outputs = had.get(key, []) + rest.get(key, [])
            assert tokens(outputs) == list(expected.token_ids)
            assert outputs[-1].finish_reason is expected.finish_reason
            entries = [entry for output in outputs for entry in output.logprobs or ()]
            assert tuple(entries) == expected.logprobs
            told = [output.prompt_logprobs is not None for output in outputs]
            assert told == [True] + [False] * (len(told) - 1)


def test_equal_branches_share_again_and_a_fork_gets_an_unused_index() -> None:
    engine = make_engine()
    resumed = tuple(ResumedBranch(index, ids) for index, ids in [(0, (7,)), (2, (7,)), (3, (8,))])
    engine.add(Request("r", list(range(1, 17)), DecodingParams(6), n=5, resumed=resumed))
    assert {output.branch_index for output in engine.step()} == {0, 2}, "computed once for both"
    assert {output.branch_index for output in engine.step()} == {0, 2, 3}
    assert engine.memory_report().saved_bytes >= 2 * 64, "the prompt's two blocks, at least"
    assert engine.fork("r", 2) == 5
    run(engine)


def test_a_branch_that_can_not_go_on_is_refused() -> None:
    engine = make_engine()
    resumed = (ResumedBranch(0, (1, 2, 3)),)
    with pytest.raises(InvalidRequestError, match="after 3 tokens, but ends with 3"):
        engine.add(Request("r", [1], DecodingParams(3), resumed=resumed))
    assert not engine.has_work()
