"""Windows, states and full groups in one pool: what sequences hold, free, keep and find again."""

import pytest
from tests.core.hybrid_serving import FULL, PAGE, Serving, state, tokens, window

from quire.core.memory.memory_report import memory_report
from quire.core.memory.state_snapshots import MIN_INTERVAL_TOKENS
from quire.core.scheduling import invariants
from quire.core.sequence import MissReason, SequenceState
from quire.core.step import HOLE_BLOCK, EditKind, StepResult

WINDOW = 10  # tokens, of blocks of 4


def held_by_window(serving: Serving) -> list[int]:
    """Blocks that each running sequence holds in the window's group, the last one."""
    return [
        sum(block != HOLE_BLOCK for block in sequence.block_tables[-1])
        for sequence in serving.scheduler.running
    ]


# ---- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lookahead_blocks", [0, 1])
@pytest.mark.parametrize("budget", [8, 24, 64])
def test_a_window_holds_two_blocks_more_than_itself_beside_what_is_computed(
    budget: int, num_lookahead_blocks: int
) -> None:
    serving = Serving(
        FULL, window(WINDOW), budget=budget, num_lookahead_blocks=num_lookahead_blocks
    )
    serving.add(tokens(300), max_tokens=60)
    most_decoding = 0
    while serving.scheduler.has_unfinished:
        plan = serving.plan()
        assert plan is not None
        in_flight = -(-plan.num_tokens // 4)
        for held in held_by_window(serving):
            assert held <= -(-WINDOW // 4) + 2 + in_flight
            if plan.num_tokens == 1:
                most_decoding = max(most_decoding, held)
        serving.answer(plan)
    assert 3 <= most_decoding <= 5
    invariants.check_idle(serving.scheduler)


def test_five_windows_of_six_layers_take_a_fifth_of_the_memory() -> None:
    """Windows of 1,024 tokens and 32k tokens of context: at most 0.21 of what all-full takes."""
    groups = [FULL, *[window(1024)] * 5]
    serving = Serving(*groups, num_blocks=6000, block_size=16, budget=2048)
    serving.add(tokens(32_000), max_tokens=40)
    while not serving.scheduler.running or serving.scheduler.running[0].num_output_tokens < 30:
        serving.step()
    report = memory_report(serving.memory, serving.scheduler.running)
    all_full = 6 * -(-32_030 // 16) * PAGE
    held = report.useful_bytes + report.unfilled_bytes + report.reserved_bytes
    assert held <= 0.21 * all_full


def test_holes_are_told_to_the_runner_and_only_once() -> None:
    serving = Serving(FULL, window(WINDOW), budget=16)
    sequence = serving.add(tokens(60))[0]
    holes: list[int] = []
    while serving.scheduler.has_unfinished:
        plan = serving.step()
        for edit in plan.table_edits:
            if edit.kind is EditKind.HOLE:
                assert edit.group == 1 and set(edit.block_ids) == {HOLE_BLOCK}
                first = edit.first_logical_block
                holes += range(first, first + len(edit.block_ids))
    assert holes == list(range(len(holes)))
    assert sequence.num_tokens == 64
    # Of 63 tokens 60 are published: the next of them sees 51 to 60.
    assert len(holes) == 51 // 4


def test_blocks_that_a_window_has_passed_are_evicted_first() -> None:
    serving = Serving(FULL, window(WINDOW), num_blocks=48, budget=16)
    long = serving.serve(tokens(64))
    passed = {block for block in serving.memory.pool.free_ids() if block in demoted(serving)}
    assert passed
    num_content = sum(key is not None for key in serving.memory.pool.content)
    num_blank = 48 - num_content
    assert set(serving.memory.pool.free_ids()[num_blank:][: len(passed)]) == passed
    serving.serve(tokens(4 * (num_blank + len(passed)) // 2 - 8, seed=2))
    again = serving.serve([*long.token_ids[:64], 5, 6, 7])
    assert again.num_cached_tokens >= 60, "the run at the prompt's end is still there"


def demoted(serving: Serving) -> set[int]:
    return serving.memory.pool.demoted


def test_a_hit_needs_the_window_of_its_end_only() -> None:
    serving = Serving(FULL, window(WINDOW))
    prompt = tokens(64)
    serving.serve(prompt)
    memory, pool = serving.memory, serving.memory.pool
    for block in sorted(demoted(serving)):
        key = pool.content[block]
        assert key is not None
        memory.cache.remove_run([key])
        pool.forget(block)
    again = serving.serve([*prompt, 1, 2, 3])
    assert 60 <= again.num_cached_tokens <= 65
    half = serving.serve([*prompt[:32], 1, 2, 3])
    assert half.num_cached_tokens == 0
    assert half.miss is not None and half.miss.reason is MissReason.PASSED
    third = serving.serve([*prompt[:32], 4, 5, 6])
    assert third.num_cached_tokens == 32, "the second left the run where they part"


def test_without_a_cache_passed_blocks_are_blank() -> None:
    serving = Serving(FULL, window(WINDOW), caching=False)
    serving.add(tokens(100), max_tokens=20)
    while serving.scheduler.has_unfinished:
        serving.step()
        assert all(key is None for key in serving.memory.pool.content)


def test_many_prompts_at_once_in_a_pool_that_holds_hardly_one() -> None:
    serving = Serving(FULL, window(WINDOW), num_blocks=42, budget=32)
    for seed in range(6):
        serving.add(tokens(100 + seed, seed), max_tokens=12, n=1 + seed % 2)
    serving.run()


# ---- states ---------------------------------------------------------------------------------


@pytest.fixture(params=[(FULL, state(3)), (FULL, window(WINDOW), state(3)), (state(2),)])
def recurrent(request: pytest.FixtureRequest) -> Serving:
    return Serving(*request.param)


def test_a_prompt_that_was_served_is_found_up_to_its_last_full_block(recurrent: Serving) -> None:
    prompt = tokens(43)
    assert recurrent.serve(prompt).num_cached_tokens == 0
    assert recurrent.serve(prompt).num_cached_tokens == 40
    assert recurrent.serve([*prompt[:41], 9, 9, 9]).num_cached_tokens == 40


def test_a_follow_up_goes_on_at_once() -> None:
    """Prompt and answer, all but the last token of which was computed."""
    for groups in [(FULL, state(3)), (FULL, window(WINDOW), state(3))]:
        serving = Serving(*groups)
        first = serving.serve(tokens(43), max_tokens=8)
        second = serving.serve([*first.token_ids, *tokens(30, seed=2)])
        assert second.num_cached_tokens == len(first.token_ids) - 1
        assert second.num_cached_tokens % 4 != 0


def test_a_prefix_that_was_seen_twice_hits_whatever_follows(recurrent: Serving) -> None:
    shared = tokens(32)
    assert recurrent.serve(shared + tokens(20, 2)).num_cached_tokens == 0
    second = recurrent.serve(shared + tokens(20, 3))
    assert second.num_cached_tokens == 0
    if recurrent.memory.growth.growing:  # else nothing says where they part
        assert second.miss is not None and second.miss.reason is MissReason.PASSED
        assert recurrent.serve(shared + tokens(20, 4)).num_cached_tokens == 32


def test_snapshots_stand_between_as_well(recurrent: Serving) -> None:
    prompt = tokens(3 * MIN_INTERVAL_TOKENS // 2)
    recurrent.serve(prompt)
    other = recurrent.serve([*prompt[: MIN_INTERVAL_TOKENS + 9], *tokens(20, 5)])
    assert other.num_cached_tokens == MIN_INTERVAL_TOKENS


def test_a_snapshot_is_whole_or_is_not() -> None:
    serving = Serving(FULL, state(3))
    prompt = tokens(43)
    serving.serve(prompt)
    pool, memory = serving.memory.pool, serving.memory
    pages = [block for block, key in enumerate(pool.content) if key is not None and key[0] == 1]
    assert len(pages) == 6, "at the prompt's end, and at the answer's"
    order = pool.free_ids()
    first = min(pages, key=order.index)
    taken = memory._take_blocks(order.index(first) + 1, serving.add(tokens(4, 9))[0])
    assert first in taken
    left = [block for block in pages if pool.content[block] is not None]
    assert len(left) in (0, 3), "the rest went with it"
    pool.release_all(taken)
    serving.run()


def test_branches_share_a_state_until_they_write() -> None:
    serving = Serving(FULL, state(3))
    branches = serving.add(tokens(21), max_tokens=6, n=3)
    while branches[2].state is not SequenceState.RUNNING:
        serving.step()
    pages = {tuple(branch.block_tables[1]) for branch in branches}
    plan = serving.step()
    after = {tuple(branch.block_tables[1]) for branch in branches}
    assert len(pages) == 1 and len(after) == 3
    replaced = [edit for edit in plan.table_edits if edit.kind is EditKind.REPLACE]
    assert sum(len(edit.block_ids) for edit in replaced if edit.group == 1) == 2 * 3
    assert serving.run()


def test_a_step_that_fails_leaves_snapshots_alone() -> None:
    serving = Serving(FULL, state(3), budget=16)
    sequence = serving.add(tokens(60), max_tokens=20)[0]
    while sequence.num_output_tokens < 3:
        serving.step()
    assert serving.plan() is not None
    serving.scheduler.recover(None)
    invariants.check_scheduler(serving.scheduler)
    assert sequence.num_computed_tokens == 0, "its state is unknown"
    plan = serving.plan()
    assert plan is not None
    assert plan.admit[0].num_computed_tokens == 56, "the snapshot at its prompt's end"
    serving.answer(plan)
    serving.run()


def test_a_sequence_that_ends_during_its_last_step_leaves_its_state() -> None:
    """With overlap, the step that computes the end token is in flight when the end is known."""
    serving = Serving(FULL, state(3))
    ends = {"end_token_ids": tuple(range(500)), "min_tokens": 6}
    sequence = serving.add(tokens(21), max_tokens=50, **ends)[0]
    while sequence.num_output_tokens < 5:
        serving.step()
    last = serving.plan()
    assert last is not None
    ahead = serving.plan()
    assert ahead is not None and sequence.num_computed_tokens == len(sequence.token_ids) + 1
    serving.answer(last)
    assert sequence.is_finished and serving.memory.leaving == [sequence]
    length = len(sequence.token_ids)
    step = serving.scheduler._in_flight[0]
    serving.scheduler.apply(StepResult(ahead.step_id, [*step.plain.rows, *step.rows], [(1,)]))
    invariants.check_idle(serving.scheduler)
    follow_up = serving.serve([*sequence.token_ids, 3, 4, 5])
    assert follow_up.num_cached_tokens == length


def test_a_sequence_that_ends_in_a_failed_step_leaves_nothing_of_that_step() -> None:
    """Not even the block that the step was to copy for it."""
    serving = Serving(FULL, state(3))
    first = serving.add(tokens(5), max_tokens=20, n=2)[0]
    while first.num_output_tokens < 1:
        serving.step()
    plan = serving.plan()
    assert plan is not None and plan.copies
    serving.scheduler.abort(first)
    assert serving.memory.leaving == [first]
    serving.scheduler.recover(None)
    invariants.check_scheduler(serving.scheduler)
    assert not serving.memory.leaving
    contents = serving.memory.pool.content
    assert all(contents[copy.target] is None for copy in plan.copies)
    serving.run()


def test_a_sequence_preempted_at_a_snapshot_continues_from_it() -> None:
    """The step that computed up to there ended while it had no row."""
    serving = Serving(FULL, state(3), budget=16)
    sequence = serving.add(tokens(41), max_tokens=4)[0]
    while sequence.num_computed_tokens < 32:
        serving.step()
    plan = serving.plan()
    assert plan is not None and sequence.num_computed_tokens == 40, "its prompt's last full block"
    serving.scheduler.running_set.preempt_alone(sequence, 0)
    serving.answer(plan)
    assert sequence.num_computed_tokens == 40 and sequence.block_tables[1], "it keeps its state"
    serving.run()


def test_requests_beyond_the_pool_are_served_in_turn(recurrent: Serving) -> None:
    groups = recurrent.memory.config.groups
    growth = recurrent.memory.growth
    serving = Serving(*groups, num_blocks=growth.most_to_hold(130), budget=32)
    for seed in range(7):
        serving.add(tokens(90 + seed, seed % 3), max_tokens=20 + seed, n=1 + seed % 3)
    serving.run()
