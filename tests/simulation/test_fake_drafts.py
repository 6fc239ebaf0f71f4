"""The fake runner verifies drafts as `core.step` says, and refuses plans that misuse them."""

import numpy as np
import pytest
from tests.simulation.test_fake_runner import MODEL, PARAMS, admit, launch, make, plan

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import Chunk, EditKind, RowFork, StepPlan, TableEdit
from quire.simulation.fakes.fake_model import branch_salt, extend, fingerprints_of
from quire.simulation.fakes.fake_runner import FakeRunner

PROMPT = (5, 6, 7)


def following(count: int) -> tuple[int, ...]:
    """The tokens that the model samples after PROMPT."""
    fingerprint, found = int(fingerprints_of(PROMPT)[-1]), []
    for _ in range(count):
        found.append(MODEL.next_token(fingerprint, branch_salt(PARAMS.seed, 0)))
        fingerprint = extend(fingerprint, found[-1])
    return tuple(found)


def started() -> FakeRunner:
    """Row 0 has PROMPT and one token, and room for 12."""
    runner = make()
    launch(runner, plan(0, 1, 3, admit=[admit(0, list(PROMPT), (0, 1, 2))], chunks=[Chunk(0, 3)]))
    assert runner.result().token_ids == [following(1)]
    return runner


def verifying(step_id: int, drafts: tuple[int, ...]) -> StepPlan:
    return plan(step_id, 1, 1 + len(drafts), chunks=[Chunk(0, 1 + len(drafts), drafts)])


@pytest.mark.parametrize("num_right", range(4))
def test_a_row_samples_up_to_the_first_wrong_draft(num_right: int) -> None:
    runner, known = started(), following(8)
    drafts = [*known[1:4]]
    if num_right < 3:
        drafts[num_right] += 1
    launch(runner, verifying(1, tuple(drafts)))
    assert runner.result().token_ids == [known[1 : 2 + num_right]]
    assert runner.rows.live[0].num_tokens == 5 + num_right
    assert runner.rows.live[0].num_computed == 4 + num_right
    launch(runner, plan(2, 1, 1))
    assert runner.result().token_ids == [(known[2 + num_right],)]


def test_rejected_drafts_are_written_so_that_no_other_row_can_read_them_unnoticed() -> None:
    runner, known = started(), following(4)
    launch(runner, verifying(1, (known[1] + 1, 9)))
    assert runner.result().token_ids == [known[1:2]]
    tokens = [*PROMPT, known[0], known[1], 77]
    other = admit(1, tokens, (0, 1), computed=5)  # its fifth token was a rejected draft
    launch(runner, plan(2, 1, 1, release=[0], admit=[other]))
    with pytest.raises(AssertionError, match="row 1 reads a wrong token 4"):
        runner.result()


def test_masks_apply_to_the_positions_of_drafts() -> None:
    runner, known = started(), following(2)
    runner.execute(verifying(1, (known[1], 9)))
    allowed = np.zeros(126, dtype=np.uint8)
    everything = bytes(allowed + 255)
    allowed[1] = 1 << 3
    runner.sample({0: [everything, bytes(allowed), everything]})
    first, *others = runner.result().token_ids[0]
    if first == known[1]:  # of the tokens that a mask allows, the model chooses by other numbers
        assert others == [11]


def test_a_row_waits_while_its_drafts_are_in_flight() -> None:
    known = following(4)
    for change in (
        {"num_tokens": 1},
        {"num_tokens": 2, "chunks": [Chunk(0, 2, (1,))]},
        {"num_rows": 2, "forks": [RowFork(1, 0, PARAMS, 1)], "chunks": [Chunk(0, 0)]},
        {"table_edits": [TableEdit(0, 0, EditKind.TRUNCATE, 2)], "chunks": [Chunk(0, 0)]},
    ):
        runner = started()
        launch(runner, verifying(1, known[1:3]))
        with pytest.raises(AssertionError, match=r"in flight"):
            launch(runner, plan(2, **{"num_rows": 1, "num_tokens": 1, **change}))


def test_a_row_that_was_given_away_gets_no_tokens_of_the_drafts() -> None:
    runner, known = started(), following(5)
    launch(runner, verifying(1, known[1:4]))
    other = admit(0, [9, 9], (5, 6))
    launch(runner, plan(2, 1, 2, release=[0], admit=[other], chunks=[Chunk(0, 2)]))
    assert runner.result().token_ids == [known[1:5]]
    row = runner.rows.live[0]
    assert row.num_tokens == 3 and row.num_drafts == 0


def test_impossible_drafts_are_refused() -> None:
    known = following(3)
    with pytest.raises(AssertionError, match="does not end with its drafts"):
        launch(started(), plan(1, 1, 3, chunks=[Chunk(0, 3, (known[1],))]))
    with pytest.raises(AssertionError, match="has no slot for its new tokens"):
        launch(started(), verifying(1, (1,) * 9))
    ahead = make()
    prompt = admit(0, list(PROMPT), (0, 1, 2))
    launch(ahead, plan(0, 1, 3, admit=[prompt], chunks=[Chunk(0, 3)]))
    with pytest.raises(AssertionError, match="drafts of row 0, whose last token is in flight"):
        launch(ahead, verifying(1, known[1:2]))


def with_states() -> FakeRunner:
    """Row 0 has PROMPT and one token, room for 12, and a state."""
    groups = KVGroup((0,), KVKind.FULL, 64), KVGroup((1,), KVKind.STATE, 64, num_state_blocks=1)
    runner = FakeRunner(groups, 8, 4, max_num_rows=2, max_num_tokens=40, model=MODEL)
    admission = admit(0, list(PROMPT), (0, 1, 2))._replace(block_tables=((0, 1, 2), (3,)))
    launch(runner, plan(0, 1, 3, admit=[admission], chunks=[Chunk(0, 3)]))
    assert runner.result().token_ids == [following(1)]
    return runner


@pytest.mark.parametrize("num_right", range(4))
def test_a_state_is_that_before_the_drafts(num_right: int) -> None:
    runner, known = with_states(), following(8)
    drafts = [*known[1:4]]
    if num_right < 3:
        drafts[num_right] += 1
    launch(runner, verifying(1, tuple(drafts)))
    assert runner.result().token_ids == [known[1 : 2 + num_right]]
    assert runner.rows.live[0].num_tokens == 5 + num_right
    assert runner.rows.live[0].num_computed == 4
    count = 1 + num_right
    launch(runner, plan(2, 1, count, chunks=[Chunk(0, count)] if num_right else []))
    assert runner.result().token_ids == [(known[2 + num_right],)]


def test_a_state_that_has_drafts_in_it_is_noticed() -> None:
    runner, known = with_states(), following(8)
    drafts = known[1], known[2] + 1
    launch(runner, verifying(1, drafts))
    runner.result()
    salts = runner.store._page_salts(1, 1)
    swallowed = fingerprints_of([*PROMPT, known[0], *drafts])[-1]
    runner.store._slots.reshape(-1, 4)[3] = swallowed ^ salts[0]
    launch(runner, plan(2, 1, 2, chunks=[Chunk(0, 2)]))
    with pytest.raises(AssertionError, match="goes on from a wrong state"):
        runner.result()
