"""Log-probabilities, ranks and best tokens against numpy in fp64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.sampling import NativeSampling
from quire.sampling.host import logprobs
from quire.sampling.host.sampler import Sampler, SamplingRows


def by_definition(line: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """log-softmax in fp64, and all tokens from best to worst."""
    line = line.astype(np.float64)
    normaliser = line.max() + np.log(np.exp(line - line.max()).sum())
    return line - normaliser, sorted(range(len(line)), key=lambda token: (-line[token], token))


@settings(max_examples=60, deadline=None)
@given(
    salt=st.integers(0, 1 << 30),
    vocab_size=st.integers(1, 50),
    num_top=st.lists(st.integers(0, 25), min_size=1, max_size=5),
    grid=st.sampled_from([1e-6, 1.0]),
)
def test_equals_the_definition(
    native: NativeSampling | None, salt: int, vocab_size: int, num_top: list[int], grid: float
) -> None:
    rng = np.random.default_rng(salt)
    lines = (np.round(rng.normal(size=(len(num_top), vocab_size)) * 3 / grid) * grid).astype("f4")
    token_ids = rng.integers(0, vocab_size, len(num_top))
    entries = logprobs.token_logprobs(torch.from_numpy(lines), token_ids, num_top, native=native)
    for line, token_id, k, entry in zip(lines, token_ids.tolist(), num_top, entries, strict=True):
        expected, order = by_definition(line)
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-5)
        assert entry.rank == 1 + int((line > line[token_id]).sum())
        assert list(entry.top_token_ids) == order[:k]
        assert entry.top_logprobs == pytest.approx(expected[order[:k]], abs=1e-5)


def test_zero_and_minus_zero_are_equal() -> None:
    lines = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0]])
    assert logprobs.top_token_ids(lines, 5).tolist() == [[0, 1, 2, 3, 4]]


def test_many_lines_are_handled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = torch.from_numpy(np.random.default_rng(0).normal(size=(23, 7)).astype("f4"))
    token_ids = np.arange(23) % 7
    whole = logprobs.token_logprobs(lines, token_ids, [3] * 23)
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", 30)
    assert logprobs.token_logprobs(lines, token_ids, [3] * 23) == whole


def test_prompt_logprobs_are_for_the_tokens_that_follow(native: NativeSampling | None) -> None:
    sampler = Sampler(SamplingRows(1, 9), native)
    lines = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 9)).astype("f4"))
    following = np.array([8, 0, 3, 3], dtype=np.int32)
    entries = sampler.prompt_logprobs(lines, following, 2)
    assert [entry.token_id for entry in entries] == [8, 0, 3, 3]
    assert entries[2].logprob == pytest.approx(float(lines.log_softmax(1)[2, 3]), abs=1e-6)
    assert all(len(entry.top_token_ids) == 2 for entry in entries)
    assert all(type(entry.token_id) is int for entry in entries)
    assert sampler.prompt_logprobs(lines[:0], following[:0], 2) == []


def test_a_nan_stays_a_nan(native: NativeSampling | None) -> None:
    lines = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 2.0, 1.0]])
    broken, sound = logprobs.token_logprobs(lines, np.array([0, 1]), [2, 2], native=native)
    assert np.isnan(broken.logprob)
    assert sound.top_token_ids == (1, 2)


def test_entries_of_chosen_lines(native: NativeSampling | None) -> None:
    lines = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 9)).astype("f4"))
    whole = logprobs.token_logprobs(lines, np.arange(5), [4] * 5, native=native)
    some = logprobs.token_logprobs(
        lines, np.array([3, 1]), [4, 4], lines=np.array([3, 1]), native=native
    )
    assert some == [whole[3], whole[1]]
