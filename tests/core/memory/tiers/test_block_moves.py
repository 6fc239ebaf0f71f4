"""What is learned from steps of how long prompts take."""

import pytest
from tests.core.harness import make_groups, make_sequence
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.tiers.block_moves import BlockMoves
from quire.core.sequence import Sequence

TOKEN_S, STEP_S = 30e-6, 7e-3


def make() -> tuple[BlockMoves, list[Sequence]]:
    config = KVCacheConfig(make_groups(1), 16, 4, True, b"secret", tiers=SlowTiers())
    memory = KVCacheManager(config)
    assert memory.moves is not None
    sequences = [make_sequence(memory, [1, 2, 3]) for _ in range(65)]
    for sequence in sequences:
        sequence.num_computed_tokens = 2048
    return memory.moves, sequences


def test_steps_in_which_all_rows_decode_say_nothing_of_prompts() -> None:
    moves, (prompt, *rows) = make()
    for step_id in range(4):
        moves.launch(step_id, {prompt: 2048, rows[0]: 1})
        moves.observe(step_id, STEP_S + 2048 * TOKEN_S)
    found_s = moves.loads.compute_time.predict_s(0, 2048)
    assert found_s == pytest.approx(STEP_S + 2048 * TOKEN_S, rel=0.01)
    for step_id in range(4, 200):
        moves.launch(step_id, dict.fromkeys(rows, 1))
        moves.observe(step_id, STEP_S + 64 * TOKEN_S)
    assert moves.loads.compute_time.predict_s(0, 2048) == found_s
    moves.launch(200, dict.fromkeys(rows, 1) | {prompt: 1000})
    moves.observe(200, STEP_S + 1064 * TOKEN_S)
    assert moves.loads.compute_time.predict_s(0, 2048) != found_s


def test_drafts_beside_a_prompt_count_as_tokens_behind_their_row() -> None:
    moves, (prompt, row, *_) = make()
    row.draft_token_ids = (5,) * 7
    moves.launch(0, {row: 1, prompt: 1000})
    row.draft_token_ids, row.num_computed_tokens = (), row.num_computed_tokens + 7
    moves.launch(1, {row: 8, prompt: 1000})
    assert moves._steps[0] == moves._steps[1]
    row.draft_token_ids = (5,) * 7
    moves.launch(2, {row: 1})
    assert list(moves._steps) == [1], "a step of decodes and drafts says nothing of prompts"


def test_nothing_is_kept_of_steps_whose_time_is_not_known() -> None:
    moves, (prompt, *_) = make()
    for step_id in range(100):
        moves.launch(step_id, {prompt: 100})
    assert list(moves._steps) == [98, 99]
    moves.observe(99, 1.0)
    moves.observe(97, 1.0)
    assert list(moves._steps) == [98]
