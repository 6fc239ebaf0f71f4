"""Samples by kernels, exactly those of `sampling.choice`; and the noise that they rest on."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quire.kernels.triton.sampling import gumbel_sample as sampling
from quire.kernels.triton.sampling.gumbel_noise import COARSE_ERROR, coarse_gumbel, row_key
from quire.kernels.triton.sampling.scan_logits import TILE, Scan, scan_logits
from quire.sampling.host import choice, noise

INF = float("inf")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """Of one line."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def draws_of(options: list[Options], seed: int) -> sampling.Draws:
    def column(name: str) -> np.ndarray:
        return np.array([getattr(line, name) for line in options])

    temperature = np.maximum(column("temperature"), choice.MIN_TEMPERATURE)
    temperature[column("temperature") == 0.0] = 0.0
    log_min_p = [math.log(line.min_p) if line.min_p else -INF for line in options]
    return sampling.Draws(
        torch.tensor([noise.stream(seed, 0).view(np.int64)] * len(options)),
        torch.from_numpy(temperature.astype(np.float32)),
        torch.tensor(log_min_p, dtype=torch.float32),
        torch.from_numpy(column("top_k").astype(np.int32)),
        torch.from_numpy(column("top_p")),
        any_sampled=bool((temperature > 0).any()),
        any_top_k=bool(column("top_k").any()),
        any_top_p=bool((column("top_p") < 1).any()),
    )


def sample(
    logits: torch.Tensor,
    options: list[Options],
    *,
    seed: int = 0,
    raw: torch.Tensor | None = None,
    **arguments: Any,
) -> sampling.Outcome:
    """Line i at position i + 1 of row i."""
    num_lines, vocab_size = logits.shape
    scan, raw_scan = Scan.empty(logits.shape, CPU), Scan.empty(logits.shape, CPU)
    scan_logits(logits, scan)
    scan_logits(logits if raw is None else raw, raw_scan)
    outcome = sampling.Outcome(
        torch.empty(num_lines, dtype=torch.int32),
        torch.empty(num_lines, dtype=torch.int32),
        torch.full((num_lines, num_lines), -7, dtype=torch.int32),
        torch.arange(num_lines),
        torch.arange(num_lines) + 1,
    )
    workspace = sampling.Workspace(num_lines, vocab_size, CPU)
    draws = draws_of(options, seed)
    sampling.gumbel_sample(logits, scan, raw_scan, draws, workspace, outcome, **arguments)
    return outcome


def expected(logits: torch.Tensor, options: list[Options], seed: int = 0) -> list[int]:
    """By `choice.sample`, line by line."""
    found = []
    for position, (line, of_line) in enumerate(zip(logits, options, strict=True), start=1):
        if of_line.temperature == 0.0:
            found.append(int(line.numpy().argmax()))
            continue
        draw = choice.Draw(
            noise.row_keys(np.array([noise.stream(seed, 0)]), np.array([position])),
            np.array([max(of_line.temperature, choice.MIN_TEMPERATURE)], np.float32),
            np.array([math.log(of_line.min_p) if of_line.min_p else -INF], np.float32),
            np.array([of_line.top_k]),
            np.array([of_line.top_p]),
        )
        own = line[None].clone()
        found.append(int(choice.sample(own, own.amax(1), draw)[0]))
    return found


CROWD = [
    Options(),
    Options(temperature=0.0),
    Options(temperature=0.6, top_k=20, top_p=0.95),
    Options(temperature=5.0, top_p=0.02),
    Options(min_p=0.05),
    Options(temperature=2.0, top_k=3),
    Options(temperature=1.3, min_p=0.01, top_k=50, top_p=0.5),
]


@pytest.mark.parametrize(
    ("vocab_size", "spread", "grid"),
    [(1, 1.0, None), (23, 3.0, None), (777, 1.0, 0.5), (TILE + 905, 2.0, None)],
)
def test_tokens_are_those_of_the_definition(
    vocab_size: int, spread: float, grid: float | None
) -> None:
    """On a grid many logits are equal, also with the k-th and the last of the nucleus."""
    logits = torch.from_numpy(np.random.default_rng(vocab_size).normal(size=(7, vocab_size)))
    logits = (logits * spread).float()
    if grid is not None:
        logits = torch.round(logits / grid) * grid
        logits[:, 5:400:7] = -INF
    outcome = sample(logits, CROWD, seed=vocab_size)
    assert outcome.token.tolist() == expected(logits, CROWD, vocab_size)
    assert outcome.state.tolist() == [sampling.SAMPLED] * 7


def test_scores_too_close_to_part_are_computed_exactly() -> None:
    """Here all of them, by a bound that is as wide; also where top_p makes others race again."""
    options = [Options(), Options(top_p=0.05), Options(temperature=0.0), Options(top_k=4)]
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 60))).float()
    outcome = sample(logits, options, too_close=1e9)
    assert outcome.token.tolist() == expected(logits, options)


def test_a_line_does_not_depend_on_its_neighbours_or_its_place() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(7, 301))).float()
    together = sample(logits, CROWD).token.tolist()
    others = [1, 2, 3, 4, 6]  # without top_k's widest, and with padding between the lines
    wide = torch.full((7, 320), float("nan"))
    wide[:, :301] = logits
    wide[[0, 5]] = 0.0
    again = sample(wide[:, :301], [CROWD[i] if i in others else Options() for i in range(7)])
    assert [again.token[i] for i in others] == [together[i] for i in others]


def test_tokens_are_written_to_the_history_and_never_beyond_it() -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(3, 50))).float()
    options = [Options(), Options(top_p=0.001), Options(temperature=0.0)]
    outcome = sample(logits, options)
    history = torch.full((3, 3), -7, dtype=torch.int32)
    history[0, 1], history[1, 2] = outcome.token[0], outcome.token[1]  # of 3 positions, not 3
    assert outcome.token_ids.tolist() == history.tolist()


def test_lines_without_a_token_say_why() -> None:
    logits = torch.zeros((4, 9))
    raw = logits.clone()
    raw[0, 3], raw[1, 4] = float("nan"), INF
    logits[2] = -INF
    options = [Options(), Options(temperature=0.0), Options(top_p=0.5), Options()]
    outcome = sample(logits, options, raw=raw)
    broken, empty = sampling.BROKEN, sampling.EMPTY
    assert outcome.state.tolist() == [broken, broken, empty, sampling.SAMPLED]
    assert outcome.token[:3].tolist() == [0, 0, 0]


def test_logits_of_another_kind_are_refused() -> None:
    scan = Scan.empty((2, 8), CPU)
    for logits in (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8, 2).t()):
        with pytest.raises(ValueError, match=r"must be \[R, V\] float32"):
            scan_logits(logits, scan)


@triton.jit
def noise_kernel(key_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    token_ids = tl.arange(0, N)
    key = row_key(tl.load(key_ptr), tl.load(key_ptr + 1))
    tl.store(out_ptr + token_ids, coarse_gumbel(key, token_ids))


def test_the_coarse_noise_errs_less_than_it_says() -> None:
    """A million of them; the largest comes from a uniform of about 1e-6."""
    count = 1 << 20
    found = torch.empty(count)
    stream = noise.stream(11, 3)
    noise_kernel[(1,)](torch.tensor([stream.view(np.int64), 5]), found, N=count)
    key = noise.row_keys(np.array([stream]), np.array([5]))
    exact = noise.gumbel(noise.uniforms(key, np.arange(count)))
    assert abs(found.numpy() - exact).max() < COARSE_ERROR / 4
