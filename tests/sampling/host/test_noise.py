"""The noise: equal to the published generator, fixed for ever, and random enough."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.host import noise

MASK = (1 << 64) - 1
SEEDS = st.integers(0, MASK)


def splitmix64(seed: int, index: int) -> int:
    """Output number `index` of the published generator, in Python integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key_of(seed: int, branch: int, position: int) -> np.ndarray:
    return noise.row_keys(np.array([noise.stream(seed, branch)]), np.array([position]))


def chi_square_bound(degrees: int, z: float = 4.0) -> float:
    """What a chi-square variable exceeds about once in 30,000 (Wilson and Hilferty, 1931)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + z * math.sqrt(spread)) ** 3


def test_the_reference_above_is_the_published_generator() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, i) for i in range(3)] == published


@given(SEEDS, st.integers(0, 1023), st.integers(0, 1 << 31), st.integers(0, 1 << 18))
def test_equals_the_chain_in_python_integers(
    seed: int, branch: int, position: int, token_id: int
) -> None:
    key = splitmix64(splitmix64(splitmix64(seed, 0), branch), position)
    assert int(key_of(seed, branch, position)[0]) == key
    bits = splitmix64(key, token_id) >> 12
    uniform = noise.uniforms(np.array([key], dtype=np.uint64), np.array([token_id]))[0]
    assert uniform == (2 * bits + 1) / 2**53
    assert 0.0 < uniform < 1.0
    expected = -math.log(-math.log1p(-uniform))
    assert noise.gumbel(np.array([uniform]))[0] == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    ("seed", "branch", "position", "token_id", "key", "uniform"),
    [
        (42, 3, 1000, 0, 0x80688F0F7C3F3091, "0x1.adf6a490c1521p-1"),
        (42, 3, 1000, 1, 0x80688F0F7C3F3091, "0x1.3f998ed4945a4p-3"),
        (42, 3, 1000, 4095, 0x80688F0F7C3F3091, "0x1.047149da827cep-2"),
        (42, 3, 1000, 151935, 0x80688F0F7C3F3091, "0x1.d82d1727ac47ap-2"),
        (MASK, 0, 0, 7, 0xFC042709560421DA, "0x1.aa3e07d0bea42p-2"),
    ],
)
def test_golden_values(
    seed: int, branch: int, position: int, token_id: int, key: int, uniform: str
) -> None:
    """These may never change: a resumed request would go on with other tokens."""
    keys = key_of(seed, branch, position)
    assert int(keys[0]) == key
    assert noise.uniforms(keys, np.array([token_id]))[0] == float.fromhex(uniform)


def test_the_ends_of_the_noise_are_finite() -> None:
    ends = np.array([0.5, 2.0**52 - 0.5]) * 2.0**-52
    largest, smallest = noise.gumbel(ends)
    assert largest == pytest.approx(53 * math.log(2), rel=1e-12)
    assert -3.7 < smallest < -3.5


@settings(max_examples=40, deadline=None)
@given(st.lists(SEEDS, min_size=1, max_size=5), st.integers(1, 300), st.integers(0, MASK))
def test_torch_equals_numpy_for_all_tokens_and_for_some(
    seeds: list[int], width: int, salt: int
) -> None:
    keys = np.array(seeds, dtype=np.uint64)
    exact = noise.uniforms(keys[:, None], np.arange(width)[None, :])
    whole = noise.coarse_uniforms(keys, noise.vocabulary_counters(width))
    np.testing.assert_allclose(whole.double().numpy() * 2.0**-52, exact, rtol=2.0**-22)
    token_ids = np.random.default_rng(salt).integers(0, width, (len(keys), 3))
    some = noise.coarse_uniforms(keys, noise.token_counters(torch.from_numpy(token_ids)))
    rows = np.arange(len(keys))[:, None]
    assert torch.equal(some, whole[torch.from_numpy(rows), torch.from_numpy(token_ids)])
    assert np.array_equal(noise.uniforms(keys[:, None], token_ids), exact[rows, token_ids])


def axes() -> dict[str, np.ndarray]:
    """200,000 uniforms along each of the four things that the noise depends on."""
    count = 200_000
    index = np.arange(count)
    streams_by_seed = np.array([noise.stream(seed, 0) for seed in range(2000)])
    streams_by_branch = np.array([noise.stream(99, branch) for branch in range(2000)])
    one_key = np.repeat(key_of(5, 0, 17), count)
    by_position = noise.row_keys(np.repeat(noise.stream(5, 0), count), index)
    few_tokens = np.arange(100)[None, :]
    position = np.zeros(2000, dtype=np.int64)
    return {
        "token": noise.uniforms(one_key, index),
        "position": noise.uniforms(by_position, np.zeros(count, dtype=np.int64)),
        "seed": noise.uniforms(
            noise.row_keys(streams_by_seed, position)[:, None], few_tokens
        ).T.ravel(),
        "branch": noise.uniforms(
            noise.row_keys(streams_by_branch, position)[:, None], few_tokens
        ).T.ravel(),
    }


@pytest.mark.parametrize(("axis", "values"), axes().items())
def test_uniform_along_each_axis(axis: str, values: np.ndarray) -> None:
    num_bins = 1000
    counts = np.bincount((values * num_bins).astype(int), minlength=num_bins)
    expected = len(values) / num_bins
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(num_bins - 1)


@pytest.mark.parametrize(("axis", "values"), axes().items())
@pytest.mark.parametrize("lag", [1, 2, 16, 1000])
def test_neighbours_along_each_axis_are_independent(
    axis: str, values: np.ndarray, lag: int
) -> None:
    centred = values - 0.5
    correlation = (centred[lag:] * centred[:-lag]).mean() * 12.0
    assert abs(correlation) < 4.5 / math.sqrt(len(values) - lag)
    cells = (values[lag:] * 16).astype(int) * 16 + (values[:-lag] * 16).astype(int)
    counts = np.bincount(cells, minlength=256)
    expected = len(cells) / 256
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(255)


def test_one_changed_bit_changes_half_of_the_bits() -> None:
    values = np.arange(64 * 500, dtype=np.uint64).reshape(500, 64)
    flipped = noise.mix(values ^ (np.uint64(1) << np.arange(64, dtype=np.uint64)))
    changed = np.unpackbits((noise.mix(values) ^ flipped).view(np.uint8)).mean()
    assert abs(changed - 0.5) < 0.003


def test_the_counters_of_a_vocabulary_are_kept() -> None:
    assert noise.vocabulary_counters(77) is noise.vocabulary_counters(77)
