"""The process ends at each system call in turn; what then lies on disk is found, or is a miss."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles, KilledError, disk_bytes
from tests.tiers.disk.left_open import nothing_left_open
from tests.tiers.disk.store_world import (
    OTHER,
    Opened,
    check_tails,
    name_of,
    names_in,
    read,
    write,
)

from quire.tiers.disk.store import REWRITTEN_SHARE

BUDGET, SEGMENT = 40_000, 8_000
NUMBERS = range(60)


def leftovers(path: Path) -> None:
    """Segments of another namespace."""
    opened = Opened(path, BUDGET, SEGMENT, FaultyFiles(), OTHER)
    write(opened.store, range(1000, 1020))
    opened.close()


def history(path: Path, files: FaultyFiles) -> list[Opened]:
    """A first process that ends unsealed, and a second that fills the budget several times; those
    that it had opened are returned even if it is killed."""
    opened: list[Opened] = []
    try:
        opened.append(Opened(path, BUDGET, SEGMENT, files))
        opened[-1].store.prepare_to_write()
        write(opened[-1].store, range(10))
        opened[-1].close(seals=False)
        opened.append(Opened(path, BUDGET, SEGMENT, files))
        store = opened[-1].store
        store.prepare_to_write()
        for begin in range(10, 60, 5):
            write(store, range(begin, begin + 5))
            read(store, names_in(store, (3, 11, 12, begin)))
        opened[-1].close()
    except KilledError:
        pass
    return opened


def num_calls(path: Path) -> int:
    files = FaultyFiles()
    leftovers(path)
    opened = history(path, files)
    assert files.kill_at is None and opened[-1].store.num_rewritten > 0
    assert not list((path / OTHER.hex()).parent.glob(OTHER.hex())), "others go first"
    assert files.calls["unlink"] > 5 and files.calls["sync_data"] > 3
    return files.num_calls


def test_a_kill_at_any_call_loses_only_what_was_not_written(quick_path: Path) -> None:
    total = num_calls(quick_path / "whole")
    for kill_at in range(1, total + 1):
        path = quick_path / str(kill_at)
        leftovers(path)
        files = FaultyFiles()
        files.kill_at = kill_at
        dead = history(path, files)
        assert files.is_dead
        files.release()
        known = names_in(dead[-1].store, NUMBERS) if len(dead) else []
        after_death = Opened(path, BUDGET, SEGMENT, FaultyFiles())
        store = after_death.store
        found = names_in(store, NUMBERS)
        assert set(known) <= set(found), kill_at
        assert all(read(store, found)), kill_at
        check_tails(store, NUMBERS)
        store.prepare_to_write()
        write(store, range(100, 130))
        assert all(read(store, names_in(store, range(100, 130))))
        after_death.close()
        assert store.used_bytes == disk_bytes(path) <= BUDGET + SEGMENT * REWRITTEN_SHARE
        assert not list(path.rglob("*.new"))


def test_the_budget_holds_after_each_call(quick_path: Path) -> None:
    leftovers(quick_path)
    files = FaultyFiles()
    seen = []
    files.after = lambda: seen.append(disk_bytes(quick_path))
    history(quick_path, files)
    assert max(seen) <= BUDGET + SEGMENT * REWRITTEN_SHARE
    assert max(seen) > BUDGET - SEGMENT, "the history fills the budget"


def test_a_smaller_budget_than_before_is_kept_from_the_first_write_on(tmp_path: Path) -> None:
    leftovers(tmp_path)
    opened = Opened(tmp_path, BUDGET, SEGMENT)
    write(opened.store, range(20))
    opened.close()
    assert disk_bytes(tmp_path) > 20_000
    smaller = Opened(tmp_path, 20_000, 4_000)
    smaller.store.prepare_to_write()
    assert 0 < disk_bytes(tmp_path) <= 20_000
    kept = names_in(smaller.store, range(20))
    assert kept == [payload for payload in kept if read(smaller.store, [payload])[0]]
    smaller.close()


EXIT = """
import os, sys
from pathlib import Path
from quire.core.memory.tiers.contract import StoreOrder
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.store import SegmentStore

class Ending(Files):
    left = int(sys.argv[2])
    def pwritev(self, descriptor, buffers, offset):
        self.left -= 1
        if not self.left:
            os.pwrite(descriptor, b"".join(map(bytes, buffers))[:700], offset)
            os._exit(9)
        return super().pwritev(descriptor, buffers, offset)

import hashlib
folder = CacheFolder.open(Path(sys.argv[1]), Ending())
store = SegmentStore(folder, b"namespace of one", 40000, 8000)
store.prepare_to_write()
for number in range(30):
    name = number.to_bytes(16, "big")
    payload = hashlib.shake_128(name + bytes([0])).digest(1000)
    store.append([StoreOrder(number, 0, 0, name)], [memoryview(payload)])
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_writes", [5, 15])
def test_a_process_that_is_gone_has_let_go_of_the_folder(tmp_path: Path, num_writes: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path), str(num_writes)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 9, ended.stderr
    written = [name_of(int(line)) for line in ended.stdout.split()]
    opened = Opened(tmp_path, BUDGET, SEGMENT)
    assert written and all(read(opened.store, written))
    opened.store.prepare_to_write()
    opened.close()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    with nothing_left_open():
        history(tmp_path, FaultyFiles())
