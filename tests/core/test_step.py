"""What a plan says about its step as a whole."""

from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, RowAdmission, RowFork, StepPlan


def test_chunks_compute_or_pause_rows() -> None:
    chunks = Chunk(4, 7), Chunk(2, 0), Chunk(5, 3, (11, 12)), Chunk(1, 0)
    plan = StepPlan(9, 6, 12, chunks=chunks)
    assert plan.chunked_rows == (4, 5) and plan.paused_rows == (2, 1)
    assert (plan.num_prefill_tokens, plan.num_drafts) == (7, 2)


def test_a_step_only_decodes_if_no_row_enters_leaves_or_has_a_chunk() -> None:
    params = DecodingParams(8)
    admission = RowAdmission(0, [3, 4], 2, 0, ((0,),), params)
    assert StepPlan(1, 2, 2).only_decodes
    for change in (
        {"admit": (admission,)},
        {"release": (0,)},
        {"forks": (RowFork(1, 0, params, 1),)},
        {"chunks": (Chunk(0, 0),)},
    ):
        assert not StepPlan(1, 2, 2, **change).only_decodes


def test_a_plan_with_own_tokens_keeps_those_of_its_admissions() -> None:
    token_ids = [3, 4]
    plan = StepPlan(1, 1, 2, admit=(RowAdmission(0, token_ids, 2, 0, ((0,),), DecodingParams(8)),))
    own = plan.with_own_tokens()
    token_ids.append(5)
    assert own.admit[0].token_ids == [3, 4] and plan.admit[0].token_ids == [3, 4, 5]
    empty = StepPlan(2, 1, 1)
    assert empty.with_own_tokens() is empty
