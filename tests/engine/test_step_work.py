"""Bytes and operations of a step, against counts token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduling.cost_model import StepLoad
from quire.engine.step_work import AttentionWork, ExpertWork, MachineRates, StepWork

DENSE = StepWork(
    layer_bytes=10_000,
    head_bytes=3_000,
    token_bytes=50,
    state_bytes=700,
    token_operations=20_000,
    head_operations=6_000,
    attention=(AttentionWork(None, 40, 90),),
)
CONTEXTS = st.lists(st.integers(1, 500), max_size=6)
CHUNKS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), max_size=4)


def load_of(decodes: list[int], chunks: list[tuple[int, int]]) -> StepLoad:
    load = StepLoad(len(decodes), sum(decodes))
    for computed, new in chunks:
        load = load.with_chunk(computed, new)
    return load


@settings(max_examples=50, deadline=None)
@given(CONTEXTS, CHUNKS, st.integers(0, 5))
def test_a_dense_model_s_work_is_exact(decodes, chunks, num_sampled):
    found = DENSE.of(load_of(decodes, chunks), num_sampled)
    num_tokens = len(decodes) + sum(new for _, new in chunks)
    num_bytes = 10_000 + 3_000 * (num_sampled > 0) + 50 * num_tokens
    num_bytes += 700 * (len(decodes) + len(chunks))
    operations = 20_000 * num_tokens + 6_000 * num_sampled
    for context in decodes:
        num_bytes += 40 * context
        operations += 90 * context
    for computed, new in chunks:
        num_bytes += 40 * (computed + new)
        operations += 90 * sum(computed + at + 1 for at in range(new))
    assert found == (num_bytes, operations)


@settings(max_examples=50, deadline=None)
@given(CONTEXTS, CHUNKS, st.integers(1, 400))
def test_a_window_s_estimate_is_not_below_what_is_seen(decodes, chunks, window):
    windowed = DENSE._replace(attention=(AttentionWork(window, 40, 90),))
    num_bytes, operations = windowed.of(load_of(decodes, chunks), 0)
    most_bytes, most_operations = DENSE.of(load_of(decodes, chunks), 0)
    seen = sum(min(context, window) for context in decodes)
    read = sum(min(computed, window) + new for computed, new in chunks)
    fixed = DENSE._replace(attention=()).of(load_of(decodes, chunks), 0)[0]
    assert fixed + 40 * (seen + min(read, sum(map(sum, chunks)))) <= num_bytes <= most_bytes
    assert operations <= most_operations


def test_equal_contexts_make_windows_exact() -> None:
    windowed = DENSE._replace(attention=(AttentionWork(100, 1, 1), AttentionWork(None, 0, 0)))
    plain = DENSE._replace(attention=()).of(StepLoad(3, 3 * 250), 0)
    assert windowed.of(StepLoad(3, 3 * 250), 0) == (plain[0] + 300, plain[1] + 300)


def test_few_tokens_read_few_experts_and_many_read_all() -> None:
    mixture = DENSE._replace(attention=(), experts=(ExpertWork(64_000, 2 / 8),))
    plain = DENSE._replace(attention=())

    def experts(num_tokens: int) -> float:
        load = StepLoad(num_tokens, num_tokens)
        return mixture.of(load, 0)[0] - plain.of(load, 0)[0]

    assert experts(1) == pytest.approx(64_000 * 2 / 8)
    assert experts(2) == pytest.approx(64_000 * (1 - (6 / 8) ** 2))
    assert experts(200) == pytest.approx(64_000)


def test_logits_of_prompts_take_the_head_as_well() -> None:
    load = StepLoad().with_chunk(0, 8)
    asked = StepLoad().with_chunk(0, 8, wants_logprobs=True)
    plain, more = DENSE.of(load, 0), DENSE.of(asked, 0)
    assert more == (plain[0] + 3_000, plain[1] + 8 * 6_000)


def test_the_floor_is_the_slower_of_the_two() -> None:
    rates = MachineRates(bytes_per_s=1e3, operations_per_s=1e6)
    assert rates.floor_s(5e3, 1e6) == 5.0
    assert rates.floor_s(5e3, 7e6) == 7.0
