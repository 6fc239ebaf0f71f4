"""The largest steps: that they are legal, as large as allowed, and run on a real runner."""

import dataclasses

import pytest
from tests.pooling_folders import make_bert

from quire.assembly.build import build_engine
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import Chunk, Runner, StepPlan, StepResult, TokenMasks
from quire.runtime.calibration import RunnerShape
from quire.runtime.profile_run import ProfileRun

FULL = KVGroup((0,), KVKind.FULL, 64)
STATE = KVGroup((0,), KVKind.STATE, 64, num_state_blocks=3)
SHAPE = RunnerShape(
    num_rows=6,
    max_num_tokens=50,
    max_model_len=100,
    groups=(FULL, FULL),
    num_blocks=0,
    block_size=16,
    vocab_size=30,
)


@pytest.mark.parametrize(
    ("changes", "chunks", "num_blocks"),
    [
        ({}, [45, 1, 1, 1, 1, 1], 8),
        ({"groups": (FULL,)}, [45, 1, 1, 1, 1, 1], 4),
        ({"groups": (FULL, STATE)}, [45, 1, 1, 1, 1, 1], 4 + 3),
        ({"max_num_tokens": 6}, [1] * 6, 4),
        ({"max_num_tokens": 300}, [99, 99, 99, 1, 1, 1], 14),
        ({"max_num_tokens": 10_000}, [99] * 6, 14),
        ({"num_rows": 1, "max_num_tokens": 1}, [1], 4),
        ({"max_model_len": 2}, [1] * 6, 2),
        ({"block_size": 128}, [45, 1, 1, 1, 1, 1], 2),
    ],
)
def test_steps_are_as_large_as_rows_and_lengths_allow(
    changes: dict[str, int], chunks: list[int], num_blocks: int
) -> None:
    shape = dataclasses.replace(SHAPE, **changes)
    steps = ProfileRun(shape, max_logprobs=4)
    *prompts, decodes, mixed = [*steps.plans(), None][: 4 if max(chunks) > 1 else 2]
    assert len(prompts) == (2 if max(chunks) > 1 else 0)
    for plan in prompts:
        assert plan.chunks == tuple(Chunk(row, size) for row, size in enumerate(chunks) if size > 1)
        assert plan.num_tokens == sum(chunks) <= shape.max_num_tokens
    assert decodes.num_tokens == decodes.num_rows == shape.num_rows
    assert decodes.chunks == ()
    assert steps.num_blocks == num_blocks
    all_sizes = [*[chunks] * len(prompts), [1] * len(chunks)]
    if mixed is not None:
        assert mixed.chunks == (Chunk(0, 2),)
        all_sizes.append([2] + [1] * (len(chunks) - 1))
    for plan, sizes in zip(steps.plans(), all_sizes, strict=True):
        assert len(plan.release) == (shape.num_rows if plan.step_id > 1 else 0)
        assert plan.num_tokens == sum(sizes) <= shape.max_num_tokens
        check_rows(plan, shape, num_blocks, sizes)


def check_rows(plan: StepPlan, shape: RunnerShape, num_blocks: int, sizes: list[int]) -> None:
    """Each row reaches its end there, has place for what it samples, and writes a block once."""
    for row, size in zip(plan.admit, sizes, strict=True):
        assert len(row.token_ids) == shape.max_model_len - 1 == row.num_computed_tokens + size
        assert max(row.token_ids) < shape.vocab_size
        own: set[int] = set()
        for table, group in zip(row.block_tables, shape.groups, strict=True):
            if group is STATE:
                assert len(set(table)) == len(table) == 3 and own.isdisjoint(table)
                assert set(table) <= set(range(num_blocks))
                continue
            assert len(table) * shape.block_size >= shape.max_model_len
            assert set(table) <= set(range(num_blocks)) and own.isdisjoint(table)
            own |= set(table)
            first = row.num_computed_tokens // shape.block_size
            written = table[first : (shape.max_model_len - 2) // shape.block_size + 1]
            assert len(set(written)) == len(written), "a row writes a block twice"


def test_all_memory_hungry_options_are_on_and_prompts_have_logprobs() -> None:
    plans = ProfileRun(SHAPE, max_logprobs=4).plans()
    params = [new.params for plan in plans for new in plan.admit]
    assert all(
        options.temperature and options.top_k and options.top_p < 1 and options.min_p
        for options in params
    )
    assert all(options.presence_penalty and options.repetition_penalty != 1 for options in params)
    assert {options.logprobs for options in params} == {4}
    num_prompt_logprobs = [options.prompt_logprobs for options in params]
    # Only the second step is launched kernel by kernel for their sake.
    assert num_prompt_logprobs == [*[None] * 6, 4, *[None] * 17]


def test_steps_that_pool_are_measured_beside_the_graph_of_the_largest() -> None:
    shape = dataclasses.replace(SHAPE, max_num_tokens=200, max_model_len=300)
    plans = ProfileRun(shape, 0, generates=False).plans()
    assert [plan.num_tokens for plan in plans] == [200, 192, 6, 7]
    small = dataclasses.replace(SHAPE, max_num_tokens=8)
    assert [plan.num_tokens for plan in ProfileRun(small, 0, False).plans()] == [8, 6, 6, 7]


class Runs(Runner):
    """Counts what is called; fails in the step of that number."""

    def __init__(self, failing_step: int = 0) -> None:
        self.calls: list[str] = []
        self._failing_step = failing_step

    def execute(self, plan: StepPlan) -> None:
        self.calls.append("execute")
        if plan.step_id == self._failing_step:
            raise RuntimeError("no")

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.calls.append("sample")

    def result(self) -> StepResult:
        self.calls.append("result")
        return StepResult(0, (), ())

    def reset(self) -> None:
        self.calls.append("reset")


def test_the_rows_are_dropped_whatever_happens() -> None:
    runner = Runs()
    ProfileRun(SHAPE, 0).run(runner)
    assert runner.calls == ["execute", "sample", "result"] * 4 + ["reset"]
    runner = Runs(failing_step=2)
    with pytest.raises(RuntimeError, match="no"):
        ProfileRun(SHAPE, 0).run(runner)
    assert runner.calls == ["execute", "sample", "result", "execute", "reset"]


def test_a_real_runner_carries_them_out() -> None:
    engine = build_engine(
        {"num_blocks": 12, "max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 40}
    )
    runner = engine._runner
    shape = dataclasses.replace(SHAPE, num_rows=3, max_num_tokens=40, max_model_len=96)
    steps = ProfileRun(dataclasses.replace(shape, groups=(FULL,), vocab_size=4096), max_logprobs=3)
    results: list[StepResult] = []
    for plan in steps.plans():
        runner.execute(plan)
        runner.sample()
        results.append(runner.result())
    largest, prompts, decodes, mixed = results
    assert sorted(mixed.rows) == sorted(largest.rows) == [0, 1, 2]
    assert sorted(prompts.rows) == sorted(decodes.rows) == [0, 1, 2]
    assert len(prompts.prompt_logprobs[0]) == 37 and set(prompts.logprobs) == {0, 1, 2}
    assert all(len(entries[0].top_token_ids) == 3 for entries in decodes.logprobs.values())


def test_a_model_that_predicts_no_tokens_is_asked_for_vectors(tmp_path) -> None:
    make_bert(tmp_path)
    engine = build_engine({"model": str(tmp_path), "num_blocks": 16, "max_num_seqs": 2})
    shape = dataclasses.replace(
        SHAPE, num_rows=2, max_num_tokens=64, max_model_len=64, groups=(FULL,)
    )
    steps = ProfileRun(shape, max_logprobs=4, generates=False)
    results: list[StepResult] = []
    runner = engine._runner
    for plan in steps.plans():
        runner.execute(plan)
        runner.sample()
        results.append(runner.result())
    assert [len(result.pooled) for result in results] == [2, 2, 2, 2]
    assert not any(any(tokens) for result in results for tokens in result.token_ids)
