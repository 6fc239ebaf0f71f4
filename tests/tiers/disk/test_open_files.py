"""Files that readers share: few stay open, and none that was removed."""

import os
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles
from tests.tiers.disk.left_open import open_descriptors
from tests.tiers.disk.store_world import Opened, names_in, read, write

from quire.tiers.disk.files import Files
from quire.tiers.disk.open_files import MAX_OPEN, OpenFiles


def descriptors(folder: Path) -> list[str]:
    """Where descriptors of this process lead, of those in a folder."""
    return [target for _, target in open_descriptors() if target.startswith(str(folder))]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{number}.seg" for number in range(MAX_OPEN + 9)]
    for path in made:
        path.write_text(path.name)
    return made


def test_few_stay_open_and_the_last_ones_longest(paths: list[Path]) -> None:
    shared = OpenFiles(Files())
    for path in paths:
        with shared.reading(path) as descriptor:
            assert os.pread(descriptor, 99, 0).decode() == path.name
    assert sorted(descriptors(paths[0].parent)) == sorted(map(str, paths[-MAX_OPEN:]))
    with shared.reading(paths[0]), shared.reading(paths[-1]):
        shared.close()
        assert sorted(descriptors(paths[0].parent)) == sorted(map(str, (paths[0], paths[-1])))
    assert not descriptors(paths[0].parent)


def test_two_readers_have_one_descriptor(paths: list[Path]) -> None:
    shared = OpenFiles(Files())
    with shared.reading(paths[0]) as first, shared.reading(paths[0]) as second:
        assert first == second
    with pytest.raises(FileNotFoundError), shared.reading(paths[0].with_name("none")):
        pass
    shared.close()


def test_a_file_that_goes_while_it_is_opened_is_not_kept(paths: list[Path]) -> None:
    class Racing(Files):
        def open_to_read(self, path: Path) -> int:
            descriptor = super().open_to_read(path)
            path.unlink()
            shared.drop(path)
            return descriptor

    shared = OpenFiles(Racing())
    with shared.reading(paths[0]) as descriptor:
        assert os.pread(descriptor, 99, 0).decode() == paths[0].name
    assert not descriptors(paths[0].parent)


def test_evicted_segments_give_their_room_back(tmp_path: Path) -> None:
    opened = Opened(tmp_path, 40_000, 8_000, FaultyFiles())
    for number in range(1, 100):
        write(opened.store, [number])
        assert all(read(opened.store, names_in(opened.store, range(1, 100))))
        assert not [target for target in descriptors(tmp_path) if "deleted" in target]
    assert opened.store.num_rewritten > 0, "segments were evicted"
    opened.close()
    assert not descriptors(tmp_path)
