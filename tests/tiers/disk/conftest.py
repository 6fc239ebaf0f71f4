"""A folder in memory for tests that remove thousands of files, which takes long on some disks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles

from quire.tiers.disk.native_files import NativeFiles


@pytest.fixture(params=["python", "native"])
def each_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are read by Python, and by the native library."""
    if request.param == "python":
        return
    library = request.getfixturevalue("native_library")
    monkeypatch.setattr(FaultyFiles, "native", NativeFiles(library))


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """As `tmp_path`, on a file system in memory where there is one."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
