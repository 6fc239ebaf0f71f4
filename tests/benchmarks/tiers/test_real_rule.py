"""The three ways of deciding that are compared on a real engine do what they say."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.tiers.real_rule import FixedTime, keep, run
from benchmarks.tiers.slow_disk import ThrottledFiles, use_files

from quire.tiers.disk.files import Files
from quire.tiers.disk.folder import CacheFolder

PROMPTS = [list(range(1, 100)), list(range(101, 180))]


@pytest.fixture(autouse=True)
def _own_files_afterwards() -> Iterator[None]:
    own = CacheFolder.open
    yield
    setattr(CacheFolder, "open", staticmethod(own))  # noqa: B010


def test_kept_prompts_are_found_by_loading_and_not_by_computing(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    keep(None, folder, PROMPTS)
    _, computed = run(None, folder, float("inf"), "compute", PROMPTS)
    _, loaded = run(None, folder, float("inf"), "load", PROMPTS)
    _, ruled = run(None, folder, float("inf"), "rule", PROMPTS)
    assert computed == [0, 0]
    whole_blocks = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert all(found >= most for found, most in zip(loaded, whole_blocks, strict=True))
    assert all(found in (0, most) for found, most in zip(ruled, loaded, strict=True))


def test_a_fixed_time_learns_nothing() -> None:
    fixed = FixedTime(3.0)
    fixed.observe(512, 512 * 256, 1.0)
    assert fixed.predict_s(0, 1000) == 3.0


def test_the_files_that_were_given_last_are_used(tmp_path: Path) -> None:
    first, second = ThrottledFiles(1e9), Files()
    for number, files in enumerate((first, second)):
        use_files(files)
        folder = CacheFolder.open(tmp_path / str(number))
        assert folder.files is files
        folder.close()
