"""The restore benchmark runs, compares what came, and leaves nothing."""

from pathlib import Path

import pytest
from benchmarks.tiers import restore


def test_a_small_run_prints_each_page_and_the_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restore.main(
        [
            *("--folder", str(tmp_path), "--mib", "4", "--pages", "65536,4096"),
            *("--rounds", "1", "--records", "3000"),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "KiB" in line] == ["64", "4"]
    assert "index of 3000 records" in lines[-1]
    assert not list(tmp_path.iterdir())
