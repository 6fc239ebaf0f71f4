"""Calibration runs stay within their bounds, cover them, and are drawn alike each time."""

from itertools import islice

import pytest

from quire.planning.calibration_runs import CalibrationRun, RunBounds, draw_runs

BOUNDS = RunBounds(num_rows=32, num_chunk_tokens=1024, context=2048, num_slots=16_000)
TINY = RunBounds(num_rows=1, num_chunk_tokens=8, context=20, num_slots=64)


def drawn(bounds: RunBounds, number: int = 200) -> list[CalibrationRun]:
    return list(islice(draw_runs(bounds), number))


@pytest.mark.parametrize("bounds", [BOUNDS, TINY])
def test_runs_stay_within_their_bounds(bounds: RunBounds) -> None:
    for run in drawn(bounds):
        most = max((len(wave) for wave in run.waves), default=0)
        assert 1 <= len(run.contexts) <= bounds.num_rows
        assert max(run.contexts) <= bounds.context
        assert len(run.contexts) + most <= max(bounds.num_rows, 2)
        assert all(cached + own <= 2 * bounds.context for wave in run.waves for cached, own in wave)
        assert 1 <= run.most_tokens <= max(4, bounds.num_chunk_tokens)
        assert sum(run.contexts) <= bounds.num_slots


def test_runs_cover_sizes_from_smallest_to_largest() -> None:
    runs = drawn(BOUNDS)
    sizes = [own for run in runs for wave in run.waves for _, own in wave]
    assert min(sizes) <= 4 and max(sizes) >= 1000
    assert {1, 31, 32} <= {len(run.contexts) for run in runs}
    assert max(max(run.contexts) for run in runs) == 2048
    assert any(cached for run in runs for wave in run.waves for cached, _ in wave)
    assert any(len(wave) > 1 for run in runs for wave in run.waves)


def test_every_draw_yields_equal_runs() -> None:
    assert drawn(BOUNDS) == drawn(BOUNDS)
