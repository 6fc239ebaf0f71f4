"""What one step plans: budget, chunks, admission, the words of the plan, and what comes of it."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.step import Chunk, EditKind, StepPlan, StepResult, TableEdit
from quire.errors import ConfigurationError, RequestNeverFitsError, SchedulerStalledError
from quire.simulation.fakes.fake_model import FakeModel


def computed_by(plan: StepPlan) -> dict[int, int]:
    """Row -> tokens, of the rows that a plan names."""
    return {chunk.row: chunk.num_new_tokens for chunk in plan.chunks}


# ---- configuration and admission ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "budget", "message"),
    [
        (0, 10, "max_num_seqs is 0, but must be at least 1"),
        (8, 7, "max_num_batched_tokens is 7, below max_num_seqs, 8"),
    ],
)
def test_a_config_that_cannot_work_is_refused(rows: int, budget: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SchedulerConfig(rows, budget)


def test_an_idle_scheduler_plans_nothing() -> None:
    harness = Harness()
    assert harness.scheduler.schedule(0.0) is None
    assert not harness.scheduler.has_unfinished


def test_the_first_plan_admits_with_all_that_a_row_needs() -> None:
    harness = Harness()
    sequence = harness.add("a", [1, 2, 3, 4, 5], 3)
    plan = harness.launch()
    (admission,) = plan.admit
    assert (admission.row, admission.num_prompt_tokens, admission.num_computed_tokens) == (0, 5, 0)
    assert list(admission.token_ids) == [1, 2, 3, 4, 5]
    assert admission.block_tables == ((0, 1),)
    assert admission.params is sequence.params
    assert (plan.step_id, plan.num_rows, plan.num_tokens) == (0, 1, 5)
    assert plan.chunks == (Chunk(0, 5),)
    assert plan.release == plan.table_edits == plan.copies == ()


def test_rows_are_limited_and_the_lowest_free_one_is_taken() -> None:
    harness = Harness(max_num_seqs=2)
    for name in "abc":
        harness.add(name, 2, 1 if name == "a" else 9)
    plan = harness.step()  # "a" ends with it
    assert [admission.row for admission in plan.admit] == [0, 1]
    plan = harness.step()
    assert plan.release == (0,)
    assert [admission.row for admission in plan.admit] == [0]
    harness.run()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(10, 7, True), (10, 8, False)])
def test_requests_that_can_never_fit_are_refused_with_the_numbers(
    num_groups: int, prompt: int, max_tokens: int, fits: bool
) -> None:
    """16 slots: the 17th token is sampled, but never written."""
    harness = Harness(make_memory(num_blocks=4 * num_groups, num_groups=num_groups))
    if fits:
        harness.add("a", prompt, max_tokens)
        harness.run()
        return
    message = (
        rf"request 'a' may grow to 18 tokens and so need {5 * num_groups} KV blocks, but the pool"
        rf" has {4 * num_groups}; lower max_tokens, or give .* kv_cache_memory"
    )
    with pytest.raises(RequestNeverFitsError, match=message):
        harness.add("a", prompt, max_tokens)
    assert not harness.scheduler.has_unfinished


@pytest.mark.parametrize("prompt", [0, 512])
def test_a_sequence_without_room_for_a_token_is_our_own_mistake(prompt: int) -> None:
    with pytest.raises(AssertionError):
        Harness(make_memory(num_blocks=500)).add("a", prompt)


# ---- budget and chunks --------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    harness = Harness(budget=4)
    harness.add("a", 11, 3)
    plans = [harness.step() for _ in range(5)]
    assert [plan.num_tokens for plan in plans] == [4, 4, 3, 1, 1]
    assert [plan.chunks for plan in plans] == [
        (Chunk(0, 4),),
        (Chunk(0, 4),),
        (Chunk(0, 3),),
        (),
        (),
    ]
    assert len(harness.received["a"]) == 3


def test_decodes_come_before_chunks_whatever_their_rank() -> None:
    harness = Harness(budget=6, max_num_seqs=3)
    harness.add("long", 20, 2)
    harness.add("b", 2, 8)
    harness.step()
    assert harness.scheduler.running[0].num_computed_tokens == 6
    for _ in range(3):
        harness.step()
    harness.add("c", 2, 8)
    while harness.scheduler.has_unfinished:
        decoding = [
            sequence
            for sequence in harness.scheduler.running
            if sequence.num_tokens - sequence.num_computed_tokens == 1
        ]
        plan = harness.step()
        assert plan.num_tokens <= 6
        assert all(computed_by(plan).get(sequence.row or 0, 1) == 1 for sequence in decoding)


def test_chunks_go_by_rank_and_the_rest_of_the_budget_to_the_next() -> None:
    harness = Harness(budget=10)
    harness.add("a", 14, 2)
    harness.add("b", 9, 2)
    assert computed_by(harness.step()) == {0: 10}
    plan = harness.step()
    assert computed_by(plan) == {0: 4, 1: 6}
    assert plan.admit[0].num_computed_tokens == 0
    assert computed_by(harness.step()) == {1: 3}


def test_one_token_of_an_unfinished_prompt_is_named() -> None:
    """Unnamed rows decode: their input is their last token. This one's is not."""
    harness = Harness(budget=5)
    harness.add("a", 4, 3)
    harness.add("b", 3, 3)
    plan = harness.step()
    assert computed_by(plan) == {0: 4, 1: 1}
    harness.run()


def test_a_prompt_of_which_only_the_last_token_is_missing_decodes_implicitly() -> None:
    harness = Harness()
    harness.add("a", [1] * 9, 1)
    harness.step()
    harness.add("b", [1] * 9, 1)
    plan = harness.launch()
    assert plan.admit[0].num_computed_tokens == 8
    assert (plan.chunks, plan.num_tokens) == ((), 1)
    harness.run()


# ---- what a plan says ---------------------------------------------------------------------------


def plan_size(plan: StepPlan) -> int:
    """How many numbers a plan carries."""

    def size(part: object) -> int:
        return sum(map(size, part)) if isinstance(part, (tuple, list)) else 1

    return sum(size(getattr(plan, field.name)) for field in dataclasses.fields(plan))


@pytest.mark.parametrize("num_groups", [1, 3])
def test_nothing_in_a_plan_grows_with_the_context(num_groups: int) -> None:
    harness = Harness(make_memory(400, 4, num_groups), max_num_seqs=2)
    harness.add("a", 5, 300)
    harness.add("b", 9, 300)
    harness.step()
    plans = [harness.step() for _ in range(200)]
    sizes = [plan_size(plan) for plan in plans]
    edit = 5  # row, group, kind, first block, one block id
    assert max(sizes) <= 3 + 2 * num_groups * edit
    assert min(sizes) == 3
    assert sizes[4:100] == sizes[104:200], "equal far apart, block after block"
    assert all(plan.chunks == () and plan.num_tokens == 2 for plan in plans)


def test_tables_grow_by_one_block_at_block_edges_in_all_groups() -> None:
    harness = Harness(make_memory(num_groups=2))
    harness.add("a", 3, 7)
    plans = [harness.step() for _ in range(7)]
    edits = {plan.step_id: plan.table_edits for plan in plans if plan.table_edits}
    append = EditKind.APPEND
    assert edits == {
        2: (TableEdit(0, 0, append, 1, (2,)), TableEdit(0, 1, append, 1, (3,))),
        6: (TableEdit(0, 0, append, 2, (4,)), TableEdit(0, 1, append, 2, (5,))),
    }
    assert plans[0].admit[0].block_tables == ((0,), (1,))


def test_step_ids_count_up_by_one() -> None:
    harness = Harness()
    harness.add("a", 3, 5)
    assert [harness.step().step_id for _ in range(5)] == [0, 1, 2, 3, 4]


def test_a_result_out_of_order_is_refused() -> None:
    harness = Harness()
    harness.add("a", 3, 5)
    harness.launch()
    with pytest.raises(AssertionError, match="step 0 is before 7"):
        harness.scheduler.apply(StepResult(7, [], []))


# ---- what comes of it ---------------------------------------------------------------------------


def test_outputs_tell_tokens_hits_and_the_end() -> None:
    harness = Harness()
    harness.add("a", [1] * 9, 2)
    harness.run()
    harness.add("b", [1] * 9, 2)
    harness.launch()
    (first,) = harness.land()
    assert (first.request_id, first.branch_index, len(first.token_ids)) == ("b", 0, 1)
    assert (first.num_cached_tokens, first.finish_reason) == (8, None)
    assert (first.logprobs, first.prompt_logprobs, first.error) == (None, None, None)
    harness.step()
    assert harness.ended["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("end_ids", "stop_ids", "reason", "stop_reason"),
    [
        ((7,), (), FinishReason.STOP, None),
        ((), (7,), FinishReason.STOP, 7),
        ((7,), (7,), FinishReason.STOP, 7),
        ((), (), None, None),
    ],
)
def test_stop_reason_is_the_clients_token(
    end_ids: tuple[int, ...],
    stop_ids: tuple[int, ...],
    reason: FinishReason | None,
    stop_reason: int | None,
) -> None:
    harness = Harness()
    params = DecodingParams(5, end_token_ids=end_ids, stop_token_ids=stop_ids)
    harness.add("a", 3, params=params)
    plan = harness.launch()
    (output,) = harness.scheduler.apply(StepResult(plan.step_id, [0], [(7,)]))
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)


def test_several_tokens_of_one_step_end_at_the_first_end_token() -> None:
    harness = Harness()
    sequence = harness.add("a", 3, params=DecodingParams(9, end_token_ids=(7,), logprobs=0))
    plan = harness.launch()
    entries = ["one", "two", "three"]
    result = StepResult(plan.step_id, [0], [(5, 7, 6)], logprobs={0: entries})  # type: ignore[dict-item]
    (output,) = harness.scheduler.apply(result)
    assert (output.token_ids, output.logprobs) == ((5, 7), ["one", "two"])
    assert sequence.token_ids[3:] == [5, 7]


def test_log_probabilities_arrive_where_they_were_asked_for() -> None:
    harness = Harness(budget=4)
    params = DecodingParams(3, logprobs=2, prompt_logprobs=1, seed=5)
    harness.add("a", 11, params=params)
    harness.add("b", 3, 3)
    request, _ = harness.requests["a"]
    expected = harness.model.expected_output(request)
    outputs = []
    while harness.scheduler.has_unfinished:
        harness.launch()
        outputs += harness.land()
    of_a = [output for output in outputs if output.request_id == "a"]
    assert tuple(entry for output in of_a for entry in output.logprobs or ()) == expected.logprobs
    assert [output.prompt_logprobs for output in of_a] == [expected.prompt_logprobs, None, None]
    assert all(output.logprobs is None for output in outputs if output.request_id == "b")


def test_a_row_that_fails_ends_alone_and_publishes_nothing() -> None:
    harness = Harness()
    harness.add("bad", [1] * 9, 5)
    harness.add("good", [2] * 9, 3)
    plan = harness.launch()
    good = harness.runner.result()
    result = StepResult(plan.step_id, [1], [good.token_ids[1]], failed={0: "NaN in row 0"})
    outputs = harness.take_in(result)
    assert [
        (output.finish_reason, output.error) for output in outputs if output.request_id == "bad"
    ] == [(FinishReason.ERROR, "NaN in row 0")]
    assert len(harness.memory.cache) == 2, "only the blocks of the good one"
    harness.run()


def test_many_requests_with_end_tokens_in_little_memory() -> None:
    harness = Harness(make_memory(12), model=FakeModel(end_rate=0.05), budget=8)
    for index in range(30):
        params = DecodingParams(20, seed=index, end_token_ids=(0,), min_tokens=index % 4)
        harness.add(f"r{index}", 1 + index % 9, params=params)
    harness.run()
    assert {output.finish_reason for output in harness.ended.values()} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


def test_a_step_that_can_make_no_progress_raises() -> None:
    harness = Harness(make_memory(num_blocks=4))
    harness.add("a", 3, 5)
    harness.memory.pool.take(4)  # held by nothing that will give them back
    with pytest.raises(SchedulerStalledError, match="0 running, 1 waiting, 0 of 4 blocks free"):
        harness.scheduler.schedule(0.0)


def test_mask_that_is_ready_right_after_a_row_was_left_out_is_no_stall() -> None:
    class Constraint(SimpleNamespace):
        looks = itertools.chain([False], itertools.repeat(True))
        is_ready = property(lambda self: next(self.looks))

    harness = Harness()
    sequence = harness.add("a", 5, 12)
    harness.step()
    sequence.constraint = Constraint(
        error=None, ends_with_text=False, accept_token=lambda token_id: False
    )
    harness.scheduler.running_set.num_constrained += 1
    assert harness.scheduler.schedule(0.0) is None
    assert harness.run() > 0


def test_queue_time_is_counted_to_the_first_admission() -> None:
    harness = Harness()
    sequence = harness.add("a", 3, 5)
    sequence.arrival_s = 1.0
    harness.scheduler.schedule(3.5)
    assert harness.scheduler.admission.stats.queue_s == 2.5


# ---- rows that only decode ----------------------------------------------------------------------


def test_a_row_is_plain_up_to_the_end_of_its_slots_until_it_shares_or_loses_them() -> None:
    harness = Harness(make_memory(num_blocks=20, block_size=4))
    sequence = harness.add("a", 3, 40)
    ends = []
    for _ in range(4):
        harness.step()
        ends.append(sequence.plain_end)
    assert ends == [0, 4, 8, 8]
    child = harness.fork(sequence, 1)
    harness.step()
    assert child.row is not None and (sequence.plain_end, child.plain_end) == (0, 0)
    harness.step()
    harness.step()
    assert sequence.plain_end == sequence.num_slots == 12
    harness.scheduler.running_set.preempt(sequence, 0)
    assert sequence.plain_end == 0
    harness.run()


def test_the_output_of_a_plain_row_has_all_its_fields() -> None:
    harness = Harness()
    sequence = harness.add("a", 5, 9)
    harness.step()
    harness.launch()
    outputs = harness.land()
    assert outputs == [SequenceOutput("a", 0, (sequence.token_ids[-1],), 0)]
    assert isinstance(outputs[0], SequenceOutput) and outputs[0].ends_with_text is False
