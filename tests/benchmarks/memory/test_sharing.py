"""What branches share: counted as it must be for parallel samples, and less than all for beams."""

from dataclasses import replace

import pytest
from benchmarks.memory import sharing as memory_sharing
from benchmarks.memory.load import Budget, MemoryLoad
from benchmarks.memory.sharing import (
    BEAMS,
    PARALLEL,
    Sharing,
    count_blocks,
    measure_sharing,
    share,
    text_requests,
)
from benchmarks.memory.study import simulated_engine

from quire.bench.workload import BenchRequest
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.errors import ConfigurationError
from quire.hub.model_folder import resolve_model_folder
from quire.text.tokenizer import Tokenizer

LOAD = MemoryLoad(num_prompts=6, input_mean=40, output_mean=20, max_model_len=256)


def make_engine() -> Engine:
    budget = Budget(num_slots=16 * 1000, max_num_seqs=64)
    return simulated_engine("paged", 256, budget, enable_prefix_caching=False)[0]


def expected_share(lengths: list[tuple[int, int]], width: int, size: int = 16) -> float:
    """From lengths alone: full prompt blocks are held once, and the last one until it is copied."""
    num_tables = num_held = 0
    for prompt_len, output_len in lengths:
        for num_computed in range(prompt_len, prompt_len + output_len - 1):
            num_blocks = -(-num_computed // size)
            is_prefill = num_computed == prompt_len
            num_common = num_blocks if is_prefill else prompt_len // size
            num_tables += width * num_blocks
            num_held += width * num_blocks - (width - 1) * num_common
    return 1 - num_held / num_tables


@pytest.mark.parametrize("width", [2, 3, 6])
def test_parallel_samples_share_their_full_prompt_blocks(width: int) -> None:
    lengths = [(5, 30), (16, 40), (100, 20), (33, 2)]
    requests = [
        BenchRequest(index, [index] * prompt_len, output_len)
        for index, (prompt_len, output_len) in enumerate(lengths)
    ]
    found = measure_sharing(make_engine(), requests, PARALLEL, width)
    assert found.share == pytest.approx(expected_share(lengths, width))
    assert (found.kind, found.width, found.num_requests) == (PARALLEL, width, 4)
    assert found.num_steps == 40


def test_blocks_are_counted_for_each_holder_and_once() -> None:
    engine = make_engine()
    engine.add(Request("r", range(40), DecodingParams(9), n=3))
    engine.step()
    assert count_blocks(engine.scheduler) == (9, 3)
    engine.step()
    assert count_blocks(engine.scheduler) == (9, 5)


def test_requests_that_leave_nothing_to_share_are_refused() -> None:
    requests = [BenchRequest(0, [1, 2], 1)]
    with pytest.raises(ConfigurationError, match="raise output_mean"):
        measure_sharing(make_engine(), requests, PARALLEL, 2)


def test_prompts_are_pieces_of_text_of_the_lengths_drawn() -> None:
    tokenizer = Tokenizer.from_folder(resolve_model_folder(None, None))
    requests = text_requests(LOAD, tokenizer)
    assert requests == text_requests(LOAD, tokenizer)
    assert sum(len(request.prompt_token_ids) for request in requests) == pytest.approx(
        6 * 40, abs=3
    )
    assert "def " in tokenizer.decode(
        [token for request in requests for token in request.prompt_token_ids]
    )


def test_there_is_room_for_all_branches_at_once() -> None:
    spec = Sharing(LOAD, branches=(2, 5))
    budget = spec.budget(6)
    assert budget.max_num_seqs == 30 and budget.block_size == 16
    assert budget.num_slots >= 5 * 6 * (40 + 20)


@pytest.mark.parametrize("only_model", [False, True])
def test_beams_share_more_than_parallel_samples(
    only_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_sharing, "_SIMULATED_PROMPTS", 20)
    spec = Sharing(
        replace(LOAD, sigma=0.2),
        branches=(2, 3),
        num_prompts=3,
        only_model=only_model,
        options={"dtype": "float32"},
    )
    found = {(request.kind, request.width): request for request in share(spec)}
    assert list(found) == [(PARALLEL, 2), (PARALLEL, 3), (BEAMS, 2), (BEAMS, 3)]
    for width in (2, 3):
        most = 1 - 1 / width
        assert 0 < found[PARALLEL, width].share < found[BEAMS, width].share < most
        assert found[BEAMS, width].num_requests == 3
        assert found[PARALLEL, width].num_requests == (3 if only_model else 20)
