"""Continuous and static batches on one engine: the tokens asked for, no more, and the same ones."""

from itertools import pairwise
from pathlib import Path

import pytest

from quire.assembly.build import build_engine
from quire.bench.contenders import (
    MEMORY_FIGURES,
    ContinuousBatches,
    StaticBatches,
    batches,
    check_lengths,
)
from quire.bench.ledger import STEPS_PER_SAMPLE
from quire.bench.workload import BenchRequest, LengthSpec, WorkloadSpec, make_requests
from quire.core.memory.memory_report import PARTS, MemoryReport
from quire.core.request import FinishReason, SequenceOutput
from quire.engine.engine import Engine
from quire.errors import ConfigurationError, StepFailedError
from quire.observability.step_trace import StepTrace, read_step_trace


@pytest.fixture
def requests(engine: Engine, small_load: WorkloadSpec) -> list[BenchRequest]:
    return make_requests(small_load, engine.limits.vocab_size, 0)


def test_continuous_batches_give_exactly_the_tokens_asked_for(
    engine: Engine, requests: list[BenchRequest]
) -> None:
    record = ContinuousBatches(engine).run(requests)
    asked = [request.output_len for request in requests]
    assert [len(timeline.token_ids) for timeline in record.timelines] == asked
    assert [len(timeline.token_times_s) for timeline in record.timelines] == asked
    prompts = [len(request.prompt_token_ids) for request in requests]
    assert [timeline.num_prompt_tokens for timeline in record.timelines] == prompts
    assert engine.stats().num_held_blocks == 0


@pytest.mark.parametrize("width", [1, 3, 6])
def test_static_batches_give_the_same_tokens(
    engine: Engine, requests: list[BenchRequest], width: int
) -> None:
    expected = ContinuousBatches(engine).run(requests)
    record = StaticBatches(engine, width).run(requests)
    assert [timeline.token_ids for timeline in record.timelines] == [
        timeline.token_ids for timeline in expected.timelines
    ]
    assert record.memory["max_concurrent_requests"] == width
    assert engine.stats().num_held_blocks == 0


def test_a_static_batch_computes_until_its_longest_is_done(
    engine: Engine, requests: list[BenchRequest]
) -> None:
    """And the next batch begins only then."""
    before = engine.stats().num_steps
    record = StaticBatches(engine, 3).run(requests)
    longest = [max(one.output_len for one in batch) for batch in batches(requests, 3)]
    assert engine.stats().num_steps - before == sum(longest)
    groups = [record.timelines[first : first + 3] for first in range(0, len(requests), 3)]
    for early, late in pairwise(groups):
        last = max(one.token_times_s[-1] for one in early)
        assert last < min(one.token_times_s[0] for one in late)


def test_all_requests_arrive_at_the_start(engine: Engine, requests: list[BenchRequest]) -> None:
    for contender in (ContinuousBatches(engine), StaticBatches(engine, 2)):
        record = contender.run(requests)
        assert len({timeline.arrival_s for timeline in record.timelines}) == 1
        for timeline in record.timelines:
            assert timeline.arrival_s < timeline.token_times_s[0]
            assert timeline.token_times_s == sorted(timeline.token_times_s)
            assert timeline.e2el_s <= record.duration_s


def test_memory_figures(engine: Engine, requests: list[BenchRequest]) -> None:
    memory = ContinuousBatches(engine).run(requests).memory
    assert tuple(memory) == MEMORY_FIGURES
    assert memory["max_concurrent_requests"] == 6
    assert memory["prefix_hit_rate"] == 0.0 and memory["num_preemptions"] == 0
    mean, peak = memory["mean_kv_use"], memory["peak_kv_use"]
    assert mean is not None and peak is not None and 0 < mean < peak < 1


def test_drafts_are_counted_per_run(requests: list[BenchRequest]) -> None:
    engine = build_engine({"dtype": "float32", "speculation": "ngram", "ngram_min_match": 1})
    found = [ContinuousBatches(engine).run(requests).memory for _ in range(2)]
    stats = engine.stats()
    for name in ("num_drafts", "num_accepted_drafts"):
        assert sum(memory[name] or 0 for memory in found) == getattr(stats, name)
    for memory in found:
        assert (memory["draft_tokens_a_step"] is None) == (memory["num_drafts"] == 0)


def test_the_ledger_is_sampled_over_the_run(
    engine: Engine, requests: list[BenchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[MemoryReport] = []

    def report() -> MemoryReport:
        taken.append(Engine.memory_report(engine))
        return taken[-1]

    monkeypatch.setattr(engine, "memory_report", report)
    num_steps = engine.stats().num_steps
    memory = ContinuousBatches(engine).run(requests).memory
    num_steps = engine.stats().num_steps - num_steps
    assert len(taken) == -(-num_steps // STEPS_PER_SAMPLE)
    assert memory["mean_kv_useful_bytes"] == sum(entry.useful_bytes for entry in taken) / len(taken)
    total = sum(memory[f"mean_kv_{part}_bytes"] or 0 for part in PARTS)
    assert total == pytest.approx(taken[0].total_bytes)
    assert taken[0].useful_bytes > 0


def test_preemptions_are_counted_per_run() -> None:
    load = WorkloadSpec(
        num_prompts=6, input=LengthSpec(4, 4, 4), output=LengthSpec(56, 56, 56), sigma=0.0
    )
    tight = build_engine(
        {"dtype": "float32", "num_blocks": 6, "max_model_len": 64, "speculation": "off"}
    )
    requests = make_requests(load, tight.limits.vocab_size, 0)
    contender = ContinuousBatches(tight)
    first, second = (contender.run(requests).memory for _ in range(2))
    # Before anything has ended, the scheduler takes these outputs for shorter than they are.
    assert first["num_preemptions"] and first["num_recomputed_tokens"]
    assert second["num_preemptions"] is not None and second["num_recomputed_tokens"] is not None
    stats = tight.stats()
    assert stats.num_preemptions == first["num_preemptions"] + second["num_preemptions"]
    recomputed = first["num_recomputed_tokens"] + second["num_recomputed_tokens"]
    assert stats.num_recomputed_tokens == recomputed
    assert first["peak_kv_use"] == 1.0


def test_a_shared_prefix_is_hit_within_a_run_and_not_from_the_run_before(engine: Engine) -> None:
    load = WorkloadSpec(
        num_prompts=12,
        input=LengthSpec(8, 4, 16),
        output=LengthSpec(2, 1, 4),
        shared_prefix_tokens=64,
    )
    requests = make_requests(load, engine.limits.vocab_size, 0)
    first = ContinuousBatches(engine).run(requests).memory["prefix_hit_rate"]
    again = ContinuousBatches(engine).run(requests).memory["prefix_hit_rate"]
    assert first == again
    # All but one find the 64 tokens: five of the first six follow the first block by block.
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    assert first == pytest.approx(11 * 64 / num_prompt_tokens)
    assert StaticBatches(engine, 2).run(requests).memory["prefix_hit_rate"] == 0.0


def test_batches_that_do_not_fit_are_detected(engine: Engine, requests: list[BenchRequest]) -> None:
    assert StaticBatches(engine, 6).fits(requests)
    assert not StaticBatches(engine, 7).fits(requests)  # max_num_seqs is 6
    long = [BenchRequest(index, [1] * 240, 10) for index in range(6)]
    assert not StaticBatches(engine, 6).fits(long)  # 6 * 16 blocks, of 95
    assert StaticBatches(engine, 4).fits(long)


def test_the_longest_of_a_batch_must_fit_every_row(engine: Engine) -> None:
    pair = [BenchRequest(0, [1] * 250, 2), BenchRequest(1, [1] * 4, 40)]
    assert StaticBatches(engine, 1).fits(pair)
    assert not StaticBatches(engine, 2).fits(pair)  # 250 + 40 is above max_model_len, 256


def test_only_the_traced_contender_writes_steps(
    engine: Engine, requests: list[BenchRequest], tmp_path: Path
) -> None:
    with StepTrace(tmp_path / "steps.jsonl") as trace:
        before = engine.stats().num_steps
        ContinuousBatches(engine, trace).run(requests)
        num_steps = engine.stats().num_steps - before
        StaticBatches(engine, 2).run(requests)
        ContinuousBatches(engine).run(requests)
    records = list(read_step_trace(tmp_path / "steps.jsonl"))
    assert len(records) == num_steps
    assert max(record.num_rows for record in records) == 6


def test_a_failing_request_ends_the_measurement(
    engine: Engine, requests: list[BenchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SequenceOutput("0", 0, (), 0, FinishReason.ERROR, error="NaN in the logits")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: [failed])
        with pytest.raises(StepFailedError, match="request 0 failed: NaN in the logits"):
            ContinuousBatches(engine).run(requests)
    for request in requests:
        engine.abort(str(request.index))
    assert not engine.has_work()


def test_a_request_that_would_be_cut_short_is_refused(requests: list[BenchRequest]) -> None:
    longest = max(request.num_tokens for request in requests)
    check_lengths(requests, longest)
    with pytest.raises(ConfigurationError, match=f"has {longest} tokens .* lower input_max"):
        check_lengths(requests, longest - 1)


def test_batches_keep_the_order_and_every_request(requests: list[BenchRequest]) -> None:
    found = list(batches(requests, 3))
    assert [len(batch) for batch in found] == [3, 3, 1]
    assert [request for batch in found for request in batch] == requests
