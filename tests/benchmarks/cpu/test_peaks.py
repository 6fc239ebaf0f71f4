"""The sources of the peaks compile with the kernels' headers, and every precision has a rate."""

import pytest
from benchmarks.cpu import peaks

from quire.kernels.cpu import build


def test_every_precision_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = (build.supported_isas() or ("portable",))[-1]
    flags = tuple("-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS)
    monkeypatch.setattr(build, "COMMON_FLAGS", flags)
    monkeypatch.setattr(peaks, "NUM_STEPS", 1000)
    rates = peaks.peak_ops_s(isa, 1)
    assert rates.keys() == set(peaks.PRECISIONS)
    assert all(rate > 1e6 for rate in rates.values()), rates
