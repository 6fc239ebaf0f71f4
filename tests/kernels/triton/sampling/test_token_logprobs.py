"""Log-probabilities, ranks and best tokens by kernels, against `sampling.logprobs`."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.core.step import TokenLogprobs
from quire.kernels.triton.sampling.scan_logits import TILE, Scan, scan_logits
from quire.kernels.triton.sampling.token_logprobs import HEADER, LogprobQueries, token_logprobs
from quire.sampling.host import logprobs as reference

INF = float("inf")


def by_kernels(
    logits: torch.Tensor, lines: list[int], token_ids: list[int], num_top: list[int]
) -> list[TokenLogprobs]:
    scan = Scan.empty(logits.shape, logits.device)
    scan_logits(logits, scan)
    width = max(num_top)
    out = torch.empty((len(lines), HEADER + 2 * width), dtype=torch.int32)
    line, token, top = (
        torch.tensor(values, dtype=torch.int32) for values in (lines, range(len(lines)), num_top)
    )
    given = torch.tensor(token_ids, dtype=torch.int32)
    token_logprobs(logits, scan, LogprobQueries(line, token, top), given, out)
    values = out.view(torch.float32)
    return [
        TokenLogprobs(
            token_ids[i],
            float(values[i, 0]),
            int(out[i, 1]),
            tuple(out[i, HEADER : HEADER + k].tolist()),
            tuple(values[i, HEADER + width : HEADER + width + k].tolist()),
        )
        for i, k in enumerate(num_top)
    ]


def assert_equal(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """The reference takes its logarithm in fp32, and torch sums in another order."""
    for mine, other in zip(found, expected, strict=True):
        assert mine[0] == other[0] and mine[2:4] == other[2:4]
        assert (mine[1], *mine[4]) == pytest.approx((other[1], *other[4]), rel=1e-6, abs=2e-6)
        assert mine.logprob <= 0.0


@pytest.mark.parametrize("vocab_size", [3, 301, TILE + 77])
def test_entries_of_lines_that_differ(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((4, vocab_size), generator=generator) * 4
    logits[1] = logits[1].round()  # many tie
    logits[2] = 0.0  # all do
    logits[3, 1:] = -INF
    lines, top = [3, 1, 1, 2, 0], [2, 0, 3, 3, 3]
    token_ids = [0, 2, 1, vocab_size - 1, vocab_size // 2]
    expected = reference.token_logprobs(logits, np.array(token_ids), top, lines=np.array(lines))
    assert_equal(by_kernels(logits, lines, token_ids, top), expected)


def test_all_tokens_in_order() -> None:
    """Picked from several groups in turn, and among equals up to the last."""
    logits = torch.randn((1, 130), generator=torch.Generator().manual_seed(5)).mul(3).round()
    logits[0, 7::20] = -INF
    expected = reference.token_logprobs(logits, np.array([9]), [130])
    assert_equal(by_kernels(logits, [0], [9], [130]), expected)


def test_a_nan_stays_one_and_touches_no_other_line() -> None:
    logits = torch.randn((2, 40), generator=torch.Generator().manual_seed(6))
    alone = by_kernels(logits[1:].contiguous(), [0], [3], [2])
    logits[0, 4] = float("nan")
    broken, other = by_kernels(logits, [0, 1], [3, 3], [2, 2])
    assert np.isnan([broken.logprob, *broken.top_logprobs]).all()
    assert other == alone[0]
