"""Measures a disk tier in a folder of its own, which is gone afterwards."""

from pathlib import Path

import pytest

from quire.errors import ConfigurationError
from quire.planning import disk_bench
from quire.planning.disk_bench import measure_disk


def test_speeds_are_measured_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_bench, "TOTAL_BYTES", 1 << 20)
    monkeypatch.setattr(disk_bench, "NUM_ROUNDS", 2)
    found = measure_disk(tmp_path / "kept", 16 << 10)
    for speed in (found.alone, found.beside):
        assert speed.latency_s >= 0.0
        assert 0.0 < speed.seconds(1 << 20) < disk_bench.LIMIT_S
    assert 0.0 < found.store_s_per_byte < 1e-3
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file' can't be measured: File exists"):
        measure_disk(tmp_path / "file", 16 << 10)


def test_moves_that_take_too_long_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_bench, "LIMIT_S", -1.0)
    with pytest.raises(ConfigurationError, match="can't be measured: moves took more than -1 s"):
        measure_disk(tmp_path, 16 << 10)
    assert list(tmp_path.iterdir()) == []
