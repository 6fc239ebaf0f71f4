"""The runner on the embedded model: the contract of core.step, without any scheduler."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quire.attention.backends import select
from quire.attention.kv_format import KVFormat
from quire.core.sampling_params import DecodingParams
from quire.core.step import (
    BlockCopy,
    Chunk,
    EditKind,
    RowAdmission,
    StepPlan,
    TableEdit,
)
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.checkpoints.loader import load_model
from quire.models.registry import load_config
from quire.runtime.batch import RowBatch
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows

PROMPT = [1, 600, 700, 800, 900, 1000, 1100, 1200, 1300, 1400]
GREEDY = DecodingParams(max_tokens=20, temperature=0.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    config = load_config(EMBEDDED_MODEL)
    return load_model(EMBEDDED_MODEL, config, dtype=torch.float32, device=CPU, max_model_len=128)


@pytest.fixture
def runner(model) -> ModelRunner:
    backend = select("cpu")
    layout = plan_layout(model.attention_specs, type(backend), 8, KVFormat.plain(torch.float32))
    rows = RowBatch(num_rows=4, max_model_len=128, max_num_tokens=64, num_groups=1, block_size=8)
    sampler = Sampler(SamplingRows(4, model.vocab_size))
    return ModelRunner(
        model, backend, KVCache(layout, 16, CPU), rows, HostStepSampler(sampler, rows.history)
    )


def admission(row: int, blocks: tuple[int, ...], params=GREEDY, tokens=PROMPT) -> RowAdmission:
    return RowAdmission(row, tokens, len(tokens), 0, (blocks,), params)


def run(runner: ModelRunner, plan: StepPlan):
    runner.execute(plan)
    runner.sample()
    return runner.result()


def start(runner: ModelRunner, params=GREEDY):
    plan = StepPlan(0, 1, 10, admit=(admission(2, (3, 5), params),), chunks=(Chunk(2, 10),))
    return run(runner, plan)


def decode(runner: ModelRunner, count: int) -> list[int]:
    return [run(runner, StepPlan(step, 1, 1)).token_ids[0][0] for step in range(1, count + 1)]


def test_chunks_give_the_same_tokens_as_the_whole_prompt(runner, model) -> None:
    whole = [start(runner).token_ids[0][0], *decode(runner, 6)]
    runner.reset()
    parts = StepPlan(0, 1, 4, admit=(admission(0, (6, 7)),), chunks=(Chunk(0, 4),))
    assert run(runner, parts).rows == ()
    assert run(runner, StepPlan(1, 1, 5, chunks=(Chunk(0, 5),))).token_ids == ()
    chunked = [run(runner, StepPlan(2, 1, 1)).token_ids[0][0], *decode(runner, 6)]
    assert chunked == whole


def test_a_row_samples_only_when_its_gap_is_closed(runner) -> None:
    result = run(
        runner,
        StepPlan(
            7,
            2,
            13,
            admit=(admission(0, (0, 1)), admission(1, (2, 3))),
            chunks=(Chunk(0, 10), Chunk(1, 3)),
        ),
    )
    assert (result.step_id, list(result.rows), len(result.token_ids)) == (7, [0], 1)


def test_a_copied_block_continues_as_the_original(runner) -> None:
    first = start(runner).token_ids[0][0]
    expected = decode(runner, 3)
    runner.reset()
    start(runner)
    # A second row takes the first block as it is and a copy of the second one.
    fork = RowAdmission(0, [*PROMPT, first], len(PROMPT), 10, ((3, 9),), GREEDY)
    plan = StepPlan(1, 1, 1, release=(2,), admit=(fork,), copies=(BlockCopy(5, 9),))
    assert [run(runner, plan).token_ids[0][0], *decode(runner, 2)] == expected


def test_a_table_grows_by_edit(runner) -> None:
    start(runner)
    decode(runner, 6)  # 16 tokens computed: the next needs a third block
    expected = StepPlan(9, 1, 1, table_edits=(TableEdit(2, 0, EditKind.APPEND, 2, (11,)),))
    assert len(run(runner, expected).token_ids) == 1


def test_logprobs_and_prompt_logprobs_are_the_models_own(runner, model) -> None:
    params = DecodingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1)
    result = start(runner, params)
    prompt, new = result.prompt_logprobs[2], result.logprobs[2]
    assert [entry.token_id for entry in prompt] == PROMPT[1:]
    assert len(new) == 1 and new[0].rank == 1
    assert new[0].top_logprobs[0] == new[0].logprob >= new[0].top_logprobs[1]
    assert all(entry.logprob <= 0 and len(entry.top_token_ids) == 1 for entry in prompt)
    total = sum(math.exp(entry.logprob) for entry in prompt)
    assert 0 < total < len(prompt)


def test_a_grammar_mask_binds_its_row(runner) -> None:
    allowed = 777
    mask = bytearray(512)
    mask[allowed // 8] |= 1 << (allowed % 8)
    runner.execute(StepPlan(0, 1, 10, admit=(admission(2, (3, 5)),), chunks=(Chunk(2, 10),)))
    runner.sample({2: [bytes(mask)]})
    assert runner.result().token_ids == [(allowed,)]


def test_nan_in_one_rows_logits_fails_that_row_alone(runner, monkeypatch) -> None:
    plain = runner._forward.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        logits[0] = math.nan
        return logits

    monkeypatch.setattr(runner._forward, "logits", broken)
    plan = StepPlan(
        0,
        2,
        20,
        admit=(admission(0, (0, 1)), admission(1, (2, 3))),
        chunks=(Chunk(0, 10), Chunk(1, 10)),
    )
    result = run(runner, plan)
    assert list(result.rows) == [1]
    assert "NaN" in result.failed[0]


def test_a_row_that_failed_is_computed_once_more_where_the_next_step_was_under_way(
    runner, monkeypatch
) -> None:
    plain, broken_lines = runner._forward.logits, [0]

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        while broken_lines:
            logits[broken_lines.pop()] = math.nan
        return logits

    monkeypatch.setattr(runner._forward, "logits", broken)
    admissions = (admission(0, (0, 1)), admission(1, (2, 3)))
    runner.execute(StepPlan(0, 2, 20, admit=admissions, chunks=(Chunk(0, 10), Chunk(1, 10))))
    runner.sample()
    runner.execute(StepPlan(1, 2, 2))
    runner.sample()
    first, second = runner.result(), runner.result()
    assert (list(first.rows), list(first.failed)) == ([1], [0])
    assert (list(second.rows), list(second.failed)) == ([0, 1], [])
    runner.reset()
    assert start(runner).token_ids == first.token_ids
    assert decode(runner, 1) == list(second.token_ids[1])


def test_execute_and_sample_alternate(runner) -> None:
    with pytest.raises(AssertionError, match="no executed step"):
        runner.sample()
    plan = StepPlan(0, 1, 10, admit=(admission(2, (3, 5)),), chunks=(Chunk(2, 10),))
    runner.execute(plan)
    with pytest.raises(AssertionError, match="was not sampled"):
        runner.execute(StepPlan(1, 1, 1))


def test_results_may_be_fetched_a_step_late(runner) -> None:
    expected = [start(runner).token_ids[0][0], *decode(runner, 3)]
    runner.reset()
    plan = StepPlan(0, 1, 10, admit=(admission(2, (3, 5)),), chunks=(Chunk(2, 10),))
    found = []
    for step_id in range(1, 4):
        runner.execute(plan)
        runner.sample()
        plan = StepPlan(step_id, 1, 1)
        if step_id > 1:
            found.append(runner.result())
    runner.execute(plan)
    runner.sample()
    found += [runner.result(), runner.result()]
    assert [result.step_id for result in found] == [0, 1, 2, 3]
    assert [result.token_ids[0][0] for result in found] == expected
    with pytest.raises(AssertionError, match="no sampled step"):
        runner.result()


class Timer:
    """See `StepTimer`; of each step so many."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def begin(self) -> None:
        self.done.append("begin")

    def end(self) -> None:
        self.done.append("end")

    def wait(self) -> tuple[float, float]:
        self.done.append("wait")
        return 3.0, 1.0


def test_the_result_of_a_step_that_samples_nothing_waits_for_the_device_too(runner) -> None:
    runner._timer = timer = Timer()
    runner.execute(StepPlan(0, 1, 4, admit=(admission(2, (3, 5)),), chunks=(Chunk(2, 4),)))
    runner.sample()
    assert timer.done == ["begin", "end"]
    assert list(runner.result().rows) == []
    assert timer.done == ["begin", "end", "wait"]
    assert (runner.timing.device_s, runner.timing.launching_s) == (3.0, 1.0)


def test_each_part_of_a_step_has_the_runners_gpu_as_the_current_one(runner, monkeypatch) -> None:
    """Which GPU is the current one, each thread has for itself: here a step of another thread."""
    current: list[int] = []
    is_current = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    def watched(function):
        def call(*args):
            is_current.append((function.__name__, list(current)))
            return function(*args)

        return call

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(runner, "_device", torch.device("cuda", 1))
    for owner, name in ((runner._rows, "build"), (runner._sampler, "sample")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    start(runner)
    runner.reset()
    assert is_current == [("build", [1]), ("sample", [1])] and current == []
