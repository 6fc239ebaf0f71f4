"""The engine runs on contiguous reservations unchanged, and gives the same tokens as on pages."""

import pytest

from quire.assembly.build import build_engine
from quire.bench.baselines.contiguous import (
    KV_ALLOCATORS,
    PAGED,
    ContiguousKVCacheManager,
    contiguous,
    find_allocator,
)
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.errors import ConfigurationError, InvalidRequestError

OPTIONS = {"dtype": "float32", "num_blocks": 40, "max_num_seqs": 6, "max_model_len": 128}
PROMPTS = [list(range(5 + index, 30 + 11 * index)) for index in range(5)]

Tokens = dict[tuple[str, int], list[int]]


def run(engine: Engine) -> Tokens:
    """Greedy requests, and one with three samples; (request, branch) -> tokens."""
    for index, prompt in enumerate(PROMPTS):
        params = DecodingParams(10 + index, temperature=0.0)
        engine.add(Request(str(index), prompt, params))
    engine.add(Request("n", PROMPTS[0], DecodingParams(8, seed=4), n=3))
    found: Tokens = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            key = output.request_id, output.branch_index
            found.setdefault(key, []).extend(output.token_ids)
    assert engine.stats().num_held_blocks == 0
    return found


@pytest.fixture(scope="module")
def paged() -> Tokens:
    return run(build_engine(OPTIONS))


@pytest.mark.parametrize("allocator", [name for name in KV_ALLOCATORS if name != PAGED])
def test_tokens_do_not_depend_on_the_allocator(allocator: str, paged: Tokens) -> None:
    engine = build_engine(OPTIONS, kv_allocator=find_allocator(allocator))
    assert isinstance(engine.scheduler.memory, ContiguousKVCacheManager)
    assert run(engine) == paged
    assert [len(tokens) for tokens in paged.values()].count(8) == 3


def test_beams_are_refused_by_name() -> None:
    engine = build_engine(OPTIONS, kv_allocator=contiguous("oracle"))
    with pytest.raises(InvalidRequestError, match="KV allocator shares no blocks"):
        engine.add(Request("b", PROMPTS[0], DecodingParams(5, beam_width=2), n=2))
    assert not engine.has_work()


def test_a_memory_without_one_long_run_is_refused() -> None:
    options = {**OPTIONS, "max_model_len": 640}
    with pytest.raises(ConfigurationError, match="runs of at most 32"):
        build_engine(options, kv_allocator=contiguous("max"))


def test_options_that_ask_for_a_cache_are_refused() -> None:
    for more, text in (
        ({"enable_prefix_caching": True}, "enable_prefix_caching is True, but contiguous memory"),
        ({"eviction": "lru"}, "nothing is evicted"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            build_engine(OPTIONS | more, kv_allocator=contiguous("max"))
