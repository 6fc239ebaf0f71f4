"""The made-up model: scalar and vector forms agree, and it depends on what it should."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import FinishReason, Request
from quire.core.sampling_params import DecodingParams
from quire.simulation.fakes.fake_model import (
    MASK,
    FakeModel,
    branch_salt,
    extend,
    fake_logprobs,
    fingerprints_of,
    mix,
    mix_array,
)

token_lists = st.lists(st.integers(0, 2**31), min_size=1, max_size=60)
words = st.lists(st.integers(0, MASK), min_size=1, max_size=20)


def request(prompt: list[int], n: int = 1, **params: object) -> Request:
    return Request("r", prompt, DecodingParams(**{"max_tokens": 12, **params}), n=n)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None, database=None)
@given(token_lists)
def test_fingerprints_at_once_equal_those_one_by_one(token_ids: list[int]) -> None:
    fingerprint, expected = 0, []
    for token_id in token_ids:
        fingerprint = extend(fingerprint, token_id)
        expected.append(fingerprint)
    assert fingerprints_of(token_ids).tolist() == expected


@settings(max_examples=50, deadline=None, database=None)
@given(words)
def test_vectors_equal_scalars(values: list[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    assert mix_array(array).tolist() == [mix(value) for value in values]


@pytest.mark.parametrize("other", [[1, 2, 4], [2, 1, 3], [1, 2], [0, 1, 2, 3], [1, 2, 3, 0]])
def test_different_prefixes_have_different_fingerprints(other: list[int]) -> None:
    assert fingerprints_of([1, 2, 3])[-1] != fingerprints_of(other)[-1]


def test_the_output_depends_on_prompt_seed_and_branch_only() -> None:
    model = FakeModel(end_rate=0.0)
    base = model.expected_output(request([1, 2, 3], seed=5))
    assert base == model.expected_output(request([1, 2, 3], seed=5, temperature=0.3))
    others = [
        model.expected_output(request([1, 2, 4], seed=5)),
        model.expected_output(request([1, 2, 3], seed=6)),
        model.expected_output(request([1, 2, 3], seed=5), branch_index=1),
    ]
    assert len({output.token_ids for output in [base, *others]}) == 4
    assert branch_salt(1, 0) != branch_salt(0, 1)


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_end_tokens_come_as_often_as_asked(rate: float) -> None:
    model = FakeModel(vocab_size=100, end_rate=rate)
    draws = fingerprints_of(list(range(4000)))
    tokens = np.array([model.next_token(draw, 0) for draw in draws.tolist()])
    assert abs(float((tokens == model.end_token_id).mean()) - rate) < 0.02
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 100


@pytest.mark.parametrize(
    ("params", "reason", "count"),
    [
        ({}, FinishReason.LENGTH, 12),
        ({"end_token_ids": (0,)}, FinishReason.STOP, 1),
        ({"stop_token_ids": (0,)}, FinishReason.STOP, 1),
        ({"end_token_ids": (0,), "min_tokens": 4}, FinishReason.STOP, 4),
        ({"end_token_ids": (0,), "min_tokens": 12}, FinishReason.STOP, 12),
        ({"end_token_ids": (7,)}, FinishReason.LENGTH, 12),
    ],
)
def test_how_outputs_end(params: dict[str, Any], reason: FinishReason, count: int) -> None:
    output = FakeModel(end_rate=1.0).expected_output(request([5], **params))
    assert (output.finish_reason, len(output.token_ids)) == (reason, count)


def test_the_models_length_ends_it_too() -> None:
    output = FakeModel(end_rate=0.0).expected_output(request([5] * 6), max_model_len=10)
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 4)


def test_log_probabilities_are_those_of_each_position() -> None:
    model = FakeModel(end_rate=0.0)
    prompt = [4, 5, 6]
    output = model.expected_output(request(prompt, logprobs=2, prompt_logprobs=1, max_tokens=3))
    prefixes = [int(value) for value in fingerprints_of([*prompt, *output.token_ids])]
    assert output.prompt_logprobs == (
        fake_logprobs(prefixes[0], 5, 1),
        fake_logprobs(prefixes[1], 6, 1),
    )
    assert output.logprobs == tuple(
        fake_logprobs(prefixes[2 + index], token_id, 2)
        for index, token_id in enumerate(output.token_ids)
    )
    plain = model.expected_output(request(prompt, max_tokens=3))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_a_made_up_entry_looks_like_a_real_one(num_top: int) -> None:
    entry = fake_logprobs(123, 7, num_top)
    assert (entry.token_id, len(entry.top_token_ids), len(entry.top_logprobs)) == (
        7,
        num_top,
        num_top,
    )
    assert entry.rank >= 1 and entry.logprob <= 0
    assert entry == fake_logprobs(123, 7, num_top) != fake_logprobs(124, 7, num_top)


def test_a_fork_gets_what_follows_the_tokens_that_it_was_forked_with() -> None:
    model = FakeModel(end_rate=0.0)
    whole = model.expected_output(request([4, 5], seed=3), branch_index=1)
    rest = model.expected_output(
        request([4, 5], seed=3), branch_index=1, forked_token_ids=whole.token_ids[:5]
    )
    assert rest.token_ids == whole.token_ids[5:]
    assert rest.finish_reason is FinishReason.LENGTH
    other = model.expected_output(
        request([4, 5], seed=3), branch_index=2, forked_token_ids=whole.token_ids[:5]
    )
    assert other.token_ids != rest.token_ids and len(other.token_ids) == 7


def test_a_fork_counts_the_tokens_that_it_was_forked_with_as_its_own() -> None:
    model, asked = FakeModel(end_rate=1.0), request([5], stop_token_ids=(0,), min_tokens=4)
    assert len(model.expected_output(asked, forked_token_ids=(1, 2)).token_ids) == 2
    assert len(model.expected_output(asked, forked_token_ids=(1, 2, 3, 4, 5)).token_ids) == 1
    longest = model.expected_output(request([5] * 6), 0, 10, forked_token_ids=(1, 2))
    assert len(longest.token_ids) == 2


@settings(max_examples=50, deadline=None, database=None)
@given(st.integers(0, MASK), st.integers(1, 6), st.sampled_from([2, 5, 1000]))
def test_candidates_are_distinct_best_first_and_a_function_of_the_prefix(
    fingerprint: int, count: int, vocab_size: int
) -> None:
    model = FakeModel(vocab_size, end_rate=0.5)
    found = model.beam_candidates(fingerprint, count)
    token_ids, logprobs = (
        [candidate[0] for candidate in found],
        [candidate[1] for candidate in found],
    )
    assert len(set(token_ids)) == len(found) == min(count, vocab_size - 1)
    assert all(0 <= token_id < vocab_size for token_id in token_ids)
    assert logprobs == sorted(logprobs, reverse=True) and logprobs[0] <= 0
    assert found == model.beam_candidates(fingerprint, count)


def test_end_tokens_are_among_the_candidates_as_often_as_asked() -> None:
    model = FakeModel(end_rate=0.1)
    found = [
        [token_id for token_id, _ in model.beam_candidates(mix(index), 3)] for index in range(4000)
    ]
    places = [token_ids.index(0) for token_ids in found if 0 in token_ids]
    assert 320 < len(places) < 480 and set(places) == {0, 1, 2}


def test_beams_are_the_best_chains_of_candidates() -> None:
    """With one token to choose, the search is the list of the best candidates."""
    model = FakeModel(end_rate=0.0)
    (prefix,) = fingerprints_of([5, 6])[-1:].tolist()
    found = model.expected_beams(request([5, 6], max_tokens=1, beam_width=3))
    assert [output.token_ids for output in found] == [
        (token_id,) for token_id, _ in model.beam_candidates(prefix, 3)
    ]
    assert all(output.finish_reason is FinishReason.LENGTH for output in found)
    longer = model.expected_beams(request([5, 6], max_tokens=9, beam_width=3), max_model_len=7)
    assert [len(output.token_ids) for output in longer] == [5, 5, 5]
    sums = [output.cumulative_logprob for output in longer]
    assert sums == sorted(sums, reverse=True)


def test_greedy_is_a_beam_of_one() -> None:
    model = FakeModel(end_rate=0.0)
    (only,) = model.expected_beams(request([5, 6], max_tokens=6, beam_width=1))
    tokens = [5, 6]
    for _ in range(6):
        tokens.append(model.beam_candidates(int(fingerprints_of(tokens)[-1]), 1)[0][0])
    assert only.token_ids == tuple(tokens[2:])
