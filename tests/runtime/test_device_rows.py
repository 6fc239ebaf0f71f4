"""DeviceRows against the slow model of the same rows; what a static step is padded with."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runtime.device_path import LINK, TensorsOnly
from tests.runtime.slow_rows import BLOCK_SIZE, NUM_ROWS, SlowRows, admit, fork, slots

from quire.attention.interface import GroupBatch, MixedSize
from quire.core.content_spans import ContentSpan
from quire.core.sampling_params import DecodingParams
from quire.core.step import HOLE_BLOCK, Chunk, EditKind, StepPlan, TableEdit, TokenEdit
from quire.runtime.batch import RowBatch, StepBatch
from quire.runtime.device_rows import DeviceRows


class Unread:
    """A sample whose values nobody on the host may ask for."""

    def fetch(self):
        raise AssertionError("the host waits for the device")


def make_rows(
    static_sizes: tuple[int, ...] = (), num_groups: int = 1, mixed_sizes: tuple[int, ...] = ()
) -> DeviceRows:
    host = RowBatch(
        num_rows=NUM_ROWS,
        max_model_len=64,
        max_num_tokens=64 * NUM_ROWS,
        num_groups=num_groups,
        block_size=BLOCK_SIZE,
    )
    return DeviceRows(host, LINK, static_sizes, mixed_sizes, TensorsOnly())


def step_of(rows: DeviceRows, plan: StepPlan) -> StepBatch:
    rows.change(plan)
    step = rows.build(plan)
    assert (step.gather is None) == (step.static_size == 0)
    if step.gather is not None:
        step.gather()
    return step


def sample(rows: DeviceRows, step: StepBatch, token_ids: list[int]) -> None:
    """As a device's sampler: the values go into the history, where the host doesn't look."""
    places = rows.history.num_tokens[step.sample_rows]
    lines = torch.from_numpy(step.sample_rows)
    rows.history.token_ids[lines, torch.from_numpy(places).long()] = torch.tensor(
        token_ids, dtype=torch.int32
    )
    rows.store_sampled(step.sample_rows, Unread())


def unpadded(step: StepBatch) -> StepBatch:
    """The step as a host's, after a look at its padding."""
    count, batch = len(step.rows), step.attention
    if not step.static_size:
        assert len(batch.rows) == count
        return step
    if batch.mixed is not None:
        end = sum(batch.query_lens_list)
        plain = TensorsOnly().unpacked(batch)  # checks the padding, too
        assert len(step.token_ids) == len(step.positions) == step.static_size >= end
        assert plain.query_lens_list == batch.query_lens_list == step.num_new_tokens.tolist()
        assert plain.context_lens_list == batch.context_lens_list
        return replace(step, attention=plain)
    assert batch.num_decodes == count == len(batch.query_lens_list)
    assert step.static_size == len(batch.rows) == len(step.token_ids)
    assert batch.query_start.tolist() == list(range(step.static_size + 1))
    assert not batch.context_lens[count:].any() and not batch.rows[count:].any()
    assert not step.positions[count:].any()
    assert all((group.slot_mapping[count:] == -1).all() for group in batch.groups)
    groups = tuple(
        GroupBatch(group.block_tables, group.slot_mapping[:count]) for group in batch.groups
    )
    return replace(step, attention=replace(batch, rows=batch.rows[:count], groups=groups))


@pytest.mark.parametrize(
    ("static_sizes", "mixed_sizes"),
    [((), ()), ((1, 2, 4, 8), ()), ((1, 2, 4, 8), (16, 64))],
    ids=["eager", "static", "mixed"],
)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps_equal_a_slow_model(
    seed: int, static_sizes: tuple[int, ...], mixed_sizes: tuple[int, ...]
) -> None:
    rng = random.Random(seed)
    rows = make_rows(static_sizes, 2, mixed_sizes)
    slow = SlowRows(rng, decode_share=0.5)
    num_joined = num_static = num_mixed = 0
    for step_id in range(40):
        step = step_of(rows, slow.random_plan(step_id))
        num_static += step.static_size > 0
        num_mixed += step.attention.mixed is not None
        num_joined += len(step.joined_lines)
        plain = unpadded(step)
        # A device's sample index leaves out the joining rows, whose logits are copies.
        joined = plain.sample_index[plain.joined_lines]
        sampled = slow.check(replace(plain, sample_index=torch.cat([plain.sample_index, joined])))
        new = [rng.randrange(1000) for _ in sampled]
        sample(rows, step, new)
        for row, token_id in zip(sampled, new, strict=True):
            slow.tokens[row].append(token_id)
    assert num_joined > 0
    assert (num_static > 0) == bool(static_sizes)
    assert (num_mixed > 0) == bool(mixed_sizes)


def test_a_steps_inputs_are_what_the_device_sampled() -> None:
    rows = make_rows()
    start = StepPlan(0, 1, 3, admit=(admit(2, [5, 6, 7], (1,)),), chunks=(Chunk(2, 3),))
    step = step_of(rows, start)
    assert step.token_ids.tolist() == [5, 6, 7]
    for token_id in (42, 43):
        sample(rows, step, [token_id])
        step = step_of(rows, StepPlan(1, 1, 1))
        assert step.token_ids.tolist() == [token_id]
        assert step.token_ids.dtype is step.positions.dtype is torch.int64
    assert rows.history.token_ids[2, :5].tolist() == [5, 6, 7, 42, 43]


@pytest.mark.parametrize("static_sizes", [(), (4,)], ids=["eager", "static"])
def test_a_step_of_the_same_rows_is_the_last_one_with_new_numbers(
    static_sizes: tuple[int, ...],
) -> None:
    rows = make_rows(static_sizes)
    start = (admit(0, [5, 6], (1,)), admit(3, [7, 8, 9], (2,)))
    chunks = (Chunk(0, 2), Chunk(3, 3))
    sample(rows, step_of(rows, StepPlan(0, 2, 5, admit=start, chunks=chunks)), [40, 50])
    first = step_of(rows, StepPlan(1, 2, 2))
    sample(rows, first, [41, 51])
    step = step_of(rows, StepPlan(2, 2, 2))
    assert step is first
    assert step.token_ids[:2].tolist() == [41, 51] and step.positions[:2].tolist() == [3, 4]
    slots_of_rows = [1 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 4]
    assert step.attention.groups[0].slot_mapping[:2].tolist() == slots_of_rows
    assert step.attention.context_lens_list == step.attention.context_lens[:2].tolist() == [4, 5]
    sample(rows, step, [42, 52])
    # A pause changes the step's rows, and padding overwrites its buffers.
    paused = step_of(rows, StepPlan(3, 2, 1, chunks=(Chunk(3, 0),)))
    assert paused.token_ids[:1].tolist() == [42] and paused.rows.tolist() == [0]
    sample(rows, paused, [43])
    if static_sizes:
        rows.build_padding(4)
    assert step_of(rows, StepPlan(4, 2, 2)).token_ids[:2].tolist() == [43, 52]


def test_a_fork_has_the_tokens_that_only_the_device_knows() -> None:
    rows = make_rows(num_groups=2)
    start = admit(1, list(range(50, 61)), (1, 2), (11, 12))
    step = step_of(rows, StepPlan(0, 1, 11, admit=(start,), chunks=(Chunk(1, 11),)))
    sample(rows, step, [61])
    plan = StepPlan(
        1,
        3,
        3,
        forks=(fork(4, 1), fork(0, 4)),
        token_edits=(TokenEdit(1, 11, (99,)),),
        table_edits=(TableEdit(4, 0, EditKind.REPLACE, 1, (5,)),),
    )
    step = step_of(rows, plan)
    assert step.rows.tolist() == [0, 1, 4]
    assert step.token_ids.tolist() == [61, 99, 61]
    expected = [[1, 2], [1, 2], [1, 5]]
    assert step.attention.groups[0].block_tables[step.attention.rows, :2].tolist() == expected
    assert step.attention.groups[1].block_tables[4, :2].tolist() == [11, 12]


def test_a_step_with_a_content_is_not_static() -> None:
    """Its content may have a single token, and its id is the model's."""
    host = RowBatch(
        num_rows=NUM_ROWS,
        max_model_len=64,
        max_num_tokens=64,
        num_groups=1,
        block_size=BLOCK_SIZE,
        content_token_id=3,
    )
    rows = DeviceRows(host, LINK, (1, 2))
    span = ContentSpan(1, 1, "a", in_one_step=True)
    new = admit(0, [5, 6, 7], (1,), content_spans=(span,))
    first = step_of(rows, StepPlan(0, 1, 1, admit=(new,), chunks=(Chunk(0, 1),)))
    assert first.static_size == 1 and first.attention.visible_ends is None
    second = step_of(rows, StepPlan(1, 1, 1, chunks=(Chunk(0, 1),)))
    assert second.static_size == 0 and second.content_pieces == [("a", 0, 1, 0)]
    assert second.token_ids.tolist() == [3]
    assert second.attention.visible_ends.tolist() == [2] == second.attention.visible_ends_list
    third = step_of(rows, StepPlan(2, 1, 1, chunks=(Chunk(0, 1),)))
    assert third.static_size == 1 and third.token_ids.tolist() == [7]


def test_a_row_admitted_and_forked_in_one_plan_is_copied_before_its_edit() -> None:
    rows = make_rows()
    plan = StepPlan(
        0,
        2,
        4,
        admit=(admit(3, [7, 8], (1,)),),
        forks=(fork(5, 3),),
        token_edits=(TokenEdit(3, 1, (9,)),),
        chunks=(Chunk(3, 2), Chunk(5, 2)),
    )
    assert step_of(rows, plan).token_ids.tolist() == [7, 9, 7, 8]


def test_a_tail_that_is_dropped_leaves_what_is_before_it() -> None:
    rows = make_rows()
    start = StepPlan(0, 1, 4, admit=(admit(0, list(range(10)), (1, 2)),), chunks=(Chunk(0, 4),))
    step_of(rows, start)
    plan = StepPlan(1, 1, 2, token_edits=(TokenEdit(0, 6, ()),), chunks=(Chunk(0, 2),))
    step = step_of(rows, plan)
    assert step.token_ids.tolist() == [4, 5]
    sample(rows, step, [42])
    plan = StepPlan(2, 1, 3, token_edits=(TokenEdit(0, 6, (7, 8, 9)),), chunks=(Chunk(0, 3),))
    assert step_of(rows, plan).token_ids.tolist() == [7, 8, 9]


def test_table_edits_reach_the_device() -> None:
    rows = make_rows(num_groups=2)
    tokens = list(range(40))
    start = admit(3, tokens, (1, 2, 3, 4, 5), (6, 7, 8, 9, 10))
    edits = (
        TableEdit(3, 0, EditKind.REPLACE, 1, (20, 21)),
        TableEdit(3, 0, EditKind.REPLACE, 1, (30,)),
        TableEdit(3, 1, EditKind.HOLE, 0, (HOLE_BLOCK, HOLE_BLOCK)),
        TableEdit(3, 0, EditKind.TRUNCATE, 4),
        TableEdit(3, 0, EditKind.APPEND, 4, (22,)),
    )
    plan = StepPlan(0, 1, 40, admit=(start,), table_edits=edits, chunks=(Chunk(3, 40),))
    groups = step_of(rows, plan).attention.groups
    assert groups[0].block_tables[3, :5].tolist() == [1, 30, 21, 4, 22]
    assert groups[1].block_tables[3, :5].tolist() == [HOLE_BLOCK, HOLE_BLOCK, 8, 9, 10]
    assert groups[0].slot_mapping.tolist() == slots((1, 30, 21, 4, 22), range(40))


def decoding(rows: DeviceRows, count: int) -> StepBatch:
    """A step in which so many new rows decode."""
    admissions = tuple(
        admit(row, [10 + row] * (row + 1), (row,), num_computed_tokens=row) for row in range(count)
    )
    return step_of(rows, StepPlan(0, count, count, admit=admissions))


def test_static_steps_lie_in_the_same_memory() -> None:
    rows = make_rows(static_sizes=(2, 4))

    def places(step: StepBatch) -> list[int]:
        batch = step.attention
        tensors = [step.token_ids, step.positions, batch.query_start, batch.context_lens]
        tensors += [batch.rows, batch.groups[0].slot_mapping, batch.groups[0].block_tables]
        return [tensor.data_ptr() for tensor in tensors]

    first = decoding(rows, 3)
    assert first.static_size == 4
    assert first.token_ids.tolist() == [10, 11, 12, 10]  # of padding: whatever is first of all
    assert first.attention.context_lens.tolist() == [1, 2, 3, 0]
    sample(rows, first, [1, 2, 3])
    before = places(first)
    second = step_of(rows, StepPlan(1, 3, 3))
    assert places(second) == before == places(rows.build_padding(4))
    assert second.attention.context_lens.tolist() == [0, 0, 0, 0]
    sample(rows, second, [4, 5, 6])
    other = step_of(rows, StepPlan(2, 2, 2, release=(1,), chunks=(Chunk(0, 1),)))
    assert other.static_size == 2
    assert not set(places(other)[:-1]) & set(before)


@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 0)])
def test_the_least_static_size_that_fits_is_taken(count: int, size: int) -> None:
    assert decoding(make_rows(static_sizes=(4, 2)), count).static_size == size


def test_a_paused_row_is_not_in_a_static_step_and_a_chunk_has_none() -> None:
    rows = make_rows(static_sizes=(2, 4))
    sample(rows, decoding(rows, 3), [1, 2, 3])
    step = step_of(rows, StepPlan(1, 3, 2, chunks=(Chunk(1, 0),)))
    assert (step.static_size, step.rows.tolist()) == (2, [0, 2])
    assert step.token_ids.tolist() == [1, 3]
    new = admit(5, [1, 2], (9,))
    step = step_of(
        rows, StepPlan(2, 4, 3, admit=(new,), chunks=(Chunk(0, 0), Chunk(2, 0), Chunk(5, 2)))
    )
    assert (step.static_size, step.attention.num_decodes) == (0, 1)


def test_mixed_steps_of_a_size_lie_in_the_same_memory_unless_prompts_have_logprobs() -> None:
    rows = make_rows(mixed_sizes=(4, 8))
    places = []
    for row, (num_tokens, size) in enumerate([(2, 4), (4, 4), (5, 8), (3, 4), (9, 0)]):
        new = admit(row, list(range(num_tokens)), (row, row))
        chunks = tuple(Chunk(other, 0) for other in range(row))
        plan = StepPlan(
            row, row + 1, num_tokens, admit=(new,), chunks=(*chunks, Chunk(row, num_tokens))
        )
        step = step_of(rows, plan)
        assert step.static_size == size
        mixed = step.attention.mixed
        assert (mixed is None) == (size == 0)
        if size == 4:
            assert mixed is not None and mixed.size == MixedSize(4, NUM_ROWS, 64)
            places.append((step.positions.data_ptr(), mixed.words.data_ptr()))
    assert len(places) == 3 and len(set(places)) == 1
    params = DecodingParams(max_tokens=2, prompt_logprobs=1)
    new = admit(5, [1, 2, 3], (9,))._replace(params=params)
    chunks = (*(Chunk(other, 0) for other in range(5)), Chunk(5, 3))
    step = step_of(rows, StepPlan(5, 6, 3, admit=(new,), chunks=chunks))
    assert step.prompt_logprob_spans and (step.static_size, step.attention.mixed) == (0, None)


def test_a_step_of_padding_alone_writes_and_reads_nothing() -> None:
    rows = make_rows(static_sizes=(4,), num_groups=2)
    step = rows.build_padding(4)
    assert (step.static_size, step.attention.num_decodes) == (4, 0)
    assert step.attention.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.attention.context_lens.tolist() == step.positions.tolist() == [0] * 4
    assert [group.slot_mapping.tolist() for group in step.attention.groups] == [[-1] * 4] * 2
    assert step.attention.rows_list == step.attention.context_lens_list == []


def test_all_parts_of_an_upload_are_aligned() -> None:
    step = decoding(make_rows(static_sizes=(3,), num_groups=2), 3)
    batch = step.attention
    tensors = [step.positions, batch.query_start, batch.context_lens, batch.rows]
    tensors += [group.slot_mapping for group in batch.groups]
    first = step.positions.data_ptr()
    assert {(tensor.data_ptr() - first) % 128 for tensor in tensors} == {0}


def test_reset_waits_and_drops_all_rows(monkeypatch) -> None:
    rows = make_rows()
    waited = []
    monkeypatch.setattr(type(LINK), "synchronize", lambda self: waited.append(self))
    decoding(rows, 2)
    rows.reset()
    assert waited == [LINK]
    assert decoding(rows, 2).token_ids.tolist() == [10, 11]


def test_prompt_tokens_are_known_to_the_host() -> None:
    rows = make_rows()
    decoding(rows, 3)
    assert rows.prompt_token_ids(2, 1, 2).tolist() == [12, 12]
    assert np.array_equal(rows.num_prompt_tokens[:3], [1, 2, 3])
