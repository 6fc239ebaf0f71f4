"""Native sampling against torch's (`sampling.choice`, `sampling.logprobs`), token for token, and
bitwise against itself over threads and neighbours. Vocabularies of more than one range of tokens
(16,384) are divided among threads where lines are few."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.pairwise import pairwise

from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.sampling import LOGPROB_ROW, SAMPLE_ROW, NativeSampling
from quire.kernels.options import NATIVE_KERNELS
from quire.sampling.host import choice, logprobs, noise

INF = float("inf")


@pytest.fixture(scope="module")
def sampling(kernels: NativeKernels) -> NativeSampling:
    return NativeSampling(kernels)


def random_logits(rng: np.random.Generator, num_lines: int, vocab_size: int) -> np.ndarray:
    """Spread from none to much; often on a grid, so that many are equal; some excluded."""
    lines = rng.normal(size=(num_lines, vocab_size)) * rng.choice([0.0, 0.3, 1.0, 5.0, 40.0])
    grid = rng.choice([0.0, 0.5, 4.0])
    if grid:
        lines = np.round(lines / grid) * grid
    for line in lines:
        line[rng.permutation(vocab_size)[: rng.choice([0, vocab_size // 2, vocab_size - 1])]] = -INF
    return lines.astype(np.float32)


def random_rows(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    """Options of all kinds; some rows are greedy."""
    rows = np.zeros(num_rows, SAMPLE_ROW)
    rows["stream"] = rng.integers(0, 1 << 63, num_rows)
    rows["position"] = rng.integers(0, 5000, num_rows)
    temperature = rng.choice([0.0, 1e-40, 1e-6, 0.1, 0.7, 1.0, 1.0, 3.0, 100.0], num_rows)
    low = np.where(temperature > 0.0, np.maximum(temperature, choice.MIN_TEMPERATURE), 0.0)
    rows["temperature"] = low
    rows["top_p"] = rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9], num_rows)
    top_k = rng.choice([0, 0, 0, 1, 2, 5, 50, 3000], num_rows)
    rows["top_k"] = np.where(top_k < vocab_size, top_k, 0)
    min_p = rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], num_rows)
    rows["log_min_p"] = np.log(min_p, where=min_p > 0.0, out=np.full(num_rows, -INF))
    return rows


def by_torch(logits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What `choice` takes, greedy rows apart."""
    token_ids = logits.argmax(axis=1)
    sampled = np.flatnonzero(rows["temperature"])
    draw = choice.Draw(
        noise.row_keys(rows["stream"], rows["position"]),
        *(rows[name].copy() for name in ("temperature", "log_min_p", "top_k", "top_p")),
    ).take(sampled)
    lines = torch.from_numpy(logits[sampled])
    token_ids[sampled] = choice.sample(lines, lines.amax(dim=1), draw)
    return token_ids


def run(sampling: NativeSampling, logits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    token_ids, largest = sampling.bind(rows).run(torch.from_numpy(logits), rows["position"])
    assert (largest == logits.max(axis=1)).all()
    return token_ids


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("num_lines", [1, 7])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000, 5003, 16384, 16385, 40007])
def test_tokens_are_those_of_torch(
    sampling: NativeSampling, num_lines: int, vocab_size: int
) -> None:
    rng = np.random.default_rng(vocab_size + num_lines)
    for _ in range(3 if vocab_size > 1000 else 30):
        logits = random_logits(rng, num_lines, vocab_size)
        rows = random_rows(rng, num_lines, vocab_size)
        assert run(sampling, logits, rows).tolist() == by_torch(logits, rows).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.8},
        {"log_min_p": np.log(0.1)},
    ],
)
def test_many_draws_are_those_of_torch(sampling: NativeSampling, options: dict[str, Any]) -> None:
    num_rows = 200
    rows = np.zeros(num_rows, SAMPLE_ROW)
    rows["position"], rows["temperature"], rows["top_p"] = np.arange(num_rows), 0.9, 1.0
    rows["log_min_p"] = -INF
    for name, value in options.items():
        rows[name] = value
    line = np.random.default_rng(1).normal(size=5003).astype(np.float32) * 3
    logits = np.repeat(line[None], num_rows, axis=0)
    expected = by_torch(logits, rows)
    assert run(sampling, logits, rows).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1, "the draws differ"


def test_a_line_is_the_same_with_any_threads_and_neighbours(
    library: NativeLibrary, kernels: NativeKernels
) -> None:
    rng = np.random.default_rng(3)
    logits, rows = random_logits(rng, 5, 40007), random_rows(rng, 5, 40007)
    queries = np.array([(line, line, 9) for line in range(5)], LOGPROB_ROW)
    lines = torch.from_numpy(np.where(np.isinf(logits), np.float32(-50.0), logits))
    expected = run(NativeSampling(kernels), logits, rows)
    values, tokens = NativeSampling(kernels).token_logprobs(lines, queries)
    for threads in (1, 3, 8):  # 8 threads divide each of the five lines
        other = NativeSampling(NativeKernels(library, kernels.isa, threads))
        assert run(other, logits, rows).tolist() == expected.tolist()
        again = other.token_logprobs(lines, queries)
        assert (again[0] == values).all()
        assert (again[1] == tokens).all()
    for i in range(5):
        only = slice(i, i + 1)
        assert run(NativeSampling(kernels), logits[only], rows[only])[0] == expected[i]
        alone = NativeSampling(kernels).token_logprobs(lines, queries[only])
        assert (alone[0][0] == values[i]).all()


def test_greedy_takes_the_lowest_of_equals_and_finds_nan(sampling: NativeSampling) -> None:
    for vocab_size in (3, 20, 20_000, 50_000):
        for places in ([1, 2], [vocab_size - 1], [0, vocab_size - 1], [vocab_size // 2]):
            line = np.zeros((1, vocab_size), np.float32)
            line[0, places] = 1.0
            greedy = np.zeros(1, SAMPLE_ROW)
            token_ids, largest = sampling.bind(greedy).run(torch.from_numpy(line), None)
            assert (token_ids[0], largest[0]) == (min(places), 1.0)
            line[0, places[-1]] = np.nan
            token_ids, largest = sampling.bind(greedy).run(torch.from_numpy(line), None)
            assert token_ids[0] == places[-1]
            assert np.isnan(largest[0])
            assert np.isnan(sampling.largest(torch.from_numpy(line))[0])


def test_no_finite_largest_logit(sampling: NativeSampling) -> None:
    rows = random_rows(np.random.default_rng(0), 3, 100)
    logits = np.zeros((3, 100), np.float32)
    logits[0], logits[1, 7], logits[2, 9] = -INF, INF, -np.nan
    token_ids, largest = sampling.bind(rows).run(torch.from_numpy(logits), rows["position"])
    assert token_ids.tolist() == [0, 7, 9]
    assert largest[:2].tolist() == [-INF, INF]
    assert np.isnan(largest[2])
    assert np.isnan(sampling.largest(torch.from_numpy(logits))[2])
    queries = np.array([(line, 0, 2) for line in range(3)], LOGPROB_ROW)
    assert np.isnan(sampling.token_logprobs(torch.from_numpy(logits), queries)[0][:, 0]).all()


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 1000, 40007])
@pytest.mark.parametrize("num_lines", [1, 6])
def test_logprobs_are_those_of_torch(
    sampling: NativeSampling, vocab_size: int, num_lines: int
) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(random_logits(rng, num_lines, vocab_size))
    token_ids = rng.integers(0, vocab_size, num_lines)
    num_top = rng.integers(0, min(vocab_size, 40) + 1, num_lines).tolist()
    ours = logprobs.token_logprobs(logits, token_ids, num_top, native=sampling)
    theirs = logprobs.token_logprobs(logits, token_ids, num_top)
    for entry, other in zip(ours, theirs, strict=True):
        assert entry.top_token_ids == other.top_token_ids
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        # Torch sums in fp32: over 40,007 tokens its results are 6e-6 off those in fp64.
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)


def test_logprobs_in_fp64(sampling: NativeSampling) -> None:
    line = np.random.default_rng(4).normal(size=(1, 151_936)).astype(np.float32) * 4
    wide = line[0].astype(np.float64)
    exact = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    queries = np.array([(0, 77, 20)], LOGPROB_ROW)
    values, tokens = sampling.token_logprobs(torch.from_numpy(line), queries)
    best = np.argsort(-wide, kind="stable")[:20]
    assert tokens[0].tolist() == [1 + int((wide > wide[77]).sum()), *best.tolist()]
    np.testing.assert_allclose(values[0], exact[[77, *best]], atol=2e-6)


def test_lines_may_lie_apart(sampling: NativeSampling) -> None:
    rng = np.random.default_rng(6)
    wide = torch.from_numpy(rng.normal(size=(4, 300)).astype(np.float32))
    rows, narrow = random_rows(rng, 4, 250), wide[:, :250]
    token_ids, _ = sampling.bind(rows).run(narrow, rows["position"])
    assert token_ids.tolist() == by_torch(narrow.numpy().copy(), rows).tolist()


def test_results_outlive_the_next_run(sampling: NativeSampling) -> None:
    call = sampling.bind(np.zeros(1, SAMPLE_ROW))
    first, _ = call.run(torch.tensor([[0.0, 1.0]]), None)
    call.run(torch.tensor([[1.0, 0.0]]), None)
    assert first.tolist() == [1]


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("num_lines", [1, 2, 7])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 1000, 16385, 40007])
def test_tokens_are_forbidden_whose_bit_is_not_set(
    sampling: NativeSampling, num_lines: int, vocab_size: int
) -> None:
    rng = np.random.default_rng(vocab_size + num_lines)
    logits = rng.normal(size=(num_lines + 2, vocab_size)).astype(np.float32)
    lines = rng.permutation(num_lines + 2)[:num_lines]
    words = rng.integers(0, 1 << 32, (num_lines, -(-vocab_size // 32))).astype(np.uint32)
    words[rng.random(words.shape) < 0.3] = 0
    words[rng.random(words.shape) < 0.3] = 0xFFFFFFFF
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    expected = logits.copy()
    expected[lines] = np.where(bits, logits[lines], -INF)
    sampling.forbid(torch.from_numpy(logits), lines, words)
    assert (logits == expected).all()


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("num_lines", [1, 2, 7])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 1000, 16385, 40007])
@pytest.mark.parametrize("seed", range(4))
def test_sampling_allowed_tokens_equals_sampling_after_masking(
    sampling: NativeSampling, num_lines: int, vocab_size: int, seed: int
) -> None:
    rng = np.random.default_rng([seed, vocab_size, num_lines])
    logits = random_logits(rng, num_lines, vocab_size)
    logits[rng.random(num_lines) < 0.2, rng.integers(vocab_size)] = rng.choice([np.nan, INF])
    lines = np.sort(rng.permutation(num_lines)[: rng.integers(1, num_lines + 1)])
    words = rng.integers(0, 1 << 32, (len(lines), -(-vocab_size // 32))).astype(np.uint32)
    words[rng.random(words.shape) < rng.choice([0.1, 0.9])] = rng.choice([0, 0xFFFFFFFF])
    rows = random_rows(rng, num_lines, vocab_size)
    call = sampling.bind(rows)
    before = sampling.largest(torch.from_numpy(logits))

    edited = torch.from_numpy(logits.copy())
    sampling.forbid(edited, lines, words)
    expected_ids, largest = call.run(edited, rows["position"])
    expected_largest = largest.copy()
    given = torch.from_numpy(logits.copy())
    token_ids, largest, raw_largest = call.run_allowed(given, rows["position"], lines, words)

    assert np.array_equal(raw_largest, before, equal_nan=True)
    assert np.array_equal(given, edited, equal_nan=True)
    whole = np.isfinite(before)
    assert np.array_equal(token_ids[whole], expected_ids[whole])
    assert np.array_equal(largest[whole], expected_largest[whole])
