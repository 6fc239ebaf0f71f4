"""The store: what is found, what is evicted first, what is written anew."""

import threading
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles, broken_disk, disk_bytes, full_disk
from tests.tiers.disk.store_world import (
    FINGERPRINT,
    OTHER,
    Opened,
    check_tails,
    name_of,
    names_in,
    order_of,
    payload_of,
    read,
    segments,
    write,
)

from quire.core.memory.tiers.contract import StoreOrder, Tail
from quire.errors import ConfigurationError
from quire.tiers.disk.files import Targets
from quire.tiers.disk.record import Record
from quire.tiers.disk.record_index import MAX_TAILS
from quire.tiers.disk.segment import pack_entries, unpack_entries
from quire.tiers.disk.store import segment_bytes_for

pytestmark = pytest.mark.usefixtures("each_reader")

BUDGET, SEGMENT = 40_000, 8_000


def test_written_blocks_are_found_by_the_next_process(tmp_path: Path) -> None:
    for number in range(2):  # sealed, then continued
        opened = Opened(tmp_path)
        sealed_bytes = disk_bytes(tmp_path)
        opened.store.prepare_to_write()
        assert number == 0 or disk_bytes(tmp_path) < sealed_bytes - 64, "the footer is cut off"
        write(opened.store, range(len(opened.store.index), len(opened.store.index) + 20))
        opened.close()
    again = Opened(tmp_path)
    names = names_in(again.store, range(40))
    assert len(names) == len(again.store.index) == 40
    assert all(read(again.store, names))
    check_tails(again.store, range(40))
    assert len(segments(tmp_path)) == 1, "a segment that has room is continued"
    again.close()


def test_reads_of_neighbours_are_one_call(tmp_path: Path) -> None:
    files = FaultyFiles()
    opened = Opened(tmp_path, files=files)
    write(opened.store, range(1, 30))
    names = names_in(opened.store, range(1, 30))
    before = files.calls["preadv"]
    assert all(read(opened.store, names[::-1]))
    assert files.calls["preadv"] == before + 1
    assert all(read(opened.store, [names[3], names[3]])), "one content into two blocks"
    opened.close()


def test_groups_have_names_of_their_own(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    name = name_of(1)
    payloads = [payload_of(name, size, group) for group, size in enumerate((300, 64, 1))]
    orders = [StoreOrder(group, 0, group, name) for group in range(3)]
    opened.store.append(orders, [memoryview(payload) for payload in payloads])
    for _ in range(2):
        for group, payload in enumerate(payloads):
            target = bytearray(len(payload))
            assert opened.store.read(
                [(group, name)], Targets.in_turn(target, [len(target)])
            ).done == [True]
            assert target == payload
        assert not opened.store.index.find(3, name)
        opened.close()
        opened = Opened(tmp_path)
    opened.close()


def test_a_tail_of_several_groups_is_one_tail(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    orders = [StoreOrder(group, 0, group, b"tail", b"parent", b"1234") for group in range(2)]
    opened.store.append(orders, [memoryview(b"a" * 64)] * 2)
    assert opened.store.index.tails(b"parent") == [Tail(b"1234", b"tail")]
    opened.close()


def test_a_parent_with_very_many_tails_lists_the_last(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    orders = [
        StoreOrder(number, 0, 0, name_of(number), b"prompt", number.to_bytes(4, "big"))
        for number in range(20_000)
    ]
    for begin in range(0, len(orders), 2000):
        opened.store.append(orders[begin : begin + 2000], [memoryview(b"a" * 8)] * 2000)
    opened.close()
    again = Opened(tmp_path)
    listed = again.store.index.tails(b"prompt")
    assert listed == [Tail(order.tokens, order.name) for order in orders[::-1][:MAX_TAILS]]
    again.close()


def test_the_oldest_go_first_and_what_was_loaded_is_kept(tmp_path: Path) -> None:
    opened = Opened(tmp_path, BUDGET, SEGMENT, FaultyFiles())
    store = opened.store
    for number in range(1, 200):
        write(store, [number])
        if store.index.find(0, name_of(2)):
            assert all(read(store, [name_of(2)]))
    found = names_in(store, range(1, 200))
    assert store.index.find(0, name_of(2)) and store.num_rewritten > 2
    assert found[1:] == names_in(store, range(200 - len(found) + 1, 200)), "else the newest"
    assert store.used_bytes > BUDGET - 2 * SEGMENT
    opened.close()
    assert store.used_bytes == disk_bytes(tmp_path)


def test_rewritten_blocks_are_bounded(tmp_path: Path) -> None:
    """With all records loaded, writing goes on; a segment brings at most a quarter of itself."""
    opened = Opened(tmp_path, BUDGET, SEGMENT, FaultyFiles())
    for number in range(1, 300):
        write(opened.store, [number])
        read(opened.store, names_in(opened.store, range(1, 300)))
    assert opened.store.index.find(0, name_of(299))
    assert 0 < opened.store.num_rewritten < 100
    opened.close()


def test_tails_keep_their_tokens_where_they_are_rewritten(tmp_path: Path) -> None:
    opened = Opened(tmp_path, BUDGET, SEGMENT, FaultyFiles())
    tail = order_of(5)
    for number in range(1, 100):
        write(opened.store, [number])
        if number >= 5:
            assert all(read(opened.store, [tail.name]))
    assert Tail(tail.tokens, tail.name) in opened.store.index.tails(tail.parent)
    check_tails(opened.store, range(100))
    opened.close()
    again = Opened(tmp_path, BUDGET, SEGMENT)
    check_tails(again.store, range(100))
    assert Tail(tail.tokens, tail.name) in again.store.index.tails(tail.parent)
    again.close()


def test_other_namespaces_go_first(tmp_path: Path) -> None:
    other = Opened(tmp_path, BUDGET, SEGMENT, FaultyFiles(), OTHER)
    write(other.store, range(1, 25))
    other.close()
    opened = Opened(tmp_path, BUDGET, SEGMENT, FaultyFiles())
    num_others = len(segments(tmp_path, OTHER))
    for number in range(1, 26):
        write(opened.store, [number])
        assert len(names_in(opened.store, range(1, 26))) == number
        num_others, before = len(segments(tmp_path, OTHER)), num_others
        assert num_others >= before - 1
    write(opened.store, range(26, 40))
    assert not (tmp_path / OTHER.hex()).exists(), "an empty namespace leaves no folder"
    opened.close()


def test_a_write_that_fails_is_undone(tmp_path: Path) -> None:
    files = FaultyFiles()
    opened = Opened(tmp_path, files=files)
    write(opened.store, [1])
    size = disk_bytes(tmp_path)
    written: list[object] = []

    def fails_in_the_middle(name: str, given: tuple[object, ...]) -> OSError | None:
        if name == "pwritev":
            written.append(given)
            return full_disk() if len(written) > 3 else None
        return None

    files.fails_when, files.most_bytes = fails_in_the_middle, 100
    with pytest.raises(OSError, match="No space"):
        write(opened.store, [2, 3])
    files.fails_when, files.most_bytes = FaultyFiles().fails_when, None
    assert disk_bytes(tmp_path) == size and not opened.store.index.find(0, name_of(2))
    write(opened.store, [2, 3])
    opened.close()
    again = Opened(tmp_path)
    assert all(read(again.store, [name_of(number) for number in (1, 2, 3)]))
    again.close()


def test_a_segment_that_cannot_be_cut_off_is_left_for_another(tmp_path: Path) -> None:
    files = FaultyFiles()
    opened = Opened(tmp_path, files=files)
    write(opened.store, [1])
    files.errors = {"pwritev": broken_disk(), "truncate": broken_disk()}
    with pytest.raises(OSError, match="Input/output"):
        write(opened.store, [2])
    files.errors = {}
    write(opened.store, [3])
    opened.close()
    assert len(segments(tmp_path)) == 2
    again = Opened(tmp_path)
    assert all(read(again.store, [name_of(1), name_of(3)]))
    again.store.prepare_to_write()
    again.close()


@pytest.mark.parametrize("call", ["sync_data", "pwritev", "sync_folder"])
def test_a_seal_that_fails_loses_nothing(tmp_path: Path, call: str) -> None:
    files = FaultyFiles()
    opened = Opened(tmp_path, files=files)
    write(opened.store, range(1, 4))
    files.errors[call] = broken_disk()
    with pytest.raises(OSError, match="Input/output"):
        opened.store.seal()
    files.errors = {}
    names = names_in(opened.store, range(1, 4))
    assert len(names) == 3 and all(read(opened.store, names))
    write(opened.store, [4])
    opened.close()
    again = Opened(tmp_path)
    assert all(read(again.store, [name_of(number) for number in range(1, 5)]))
    again.close()


def test_a_segment_that_cannot_be_gone_on_with_is_left_as_it_is(tmp_path: Path) -> None:
    """Else nothing would be written as long as it is there."""
    for numbers in (range(1, 5), range(6, 10)):
        opened = Opened(tmp_path, files=FaultyFiles())
        opened.store.seal()
        write(opened.store, numbers)
        opened.close(seals=False)
    first = segments(tmp_path)[0]
    files = FaultyFiles()
    files.fails_when = lambda name, given: (
        broken_disk() if name == "open_to_write" and given[0] == first else None
    )
    opened = Opened(tmp_path, files=files)
    with pytest.raises(OSError, match="Input/output"):
        opened.store.prepare_to_write()
    opened.store.prepare_to_write()
    write(opened.store, [20])
    names = names_in(opened.store, range(1, 21))
    assert len(names) == 9 and all(read(opened.store, names))
    assert opened.store.used_bytes >= sum(path.stat().st_size for path in segments(tmp_path))
    opened.close()


def test_eviction_goes_on_where_rewriting_cannot(tmp_path: Path) -> None:
    """On a full disk room comes from removing."""
    files = FaultyFiles()
    opened = Opened(tmp_path, BUDGET, SEGMENT, files)
    write(opened.store, range(1, 30))
    read(opened.store, names_in(opened.store, range(1, 30)))
    used = opened.store.used_bytes
    files.errors["pwritev"] = full_disk()
    for number in range(30, 60):
        with pytest.raises(OSError, match="No space"):
            write(opened.store, [number])
    assert opened.store.used_bytes <= used
    files.errors = {}
    write(opened.store, range(60, 90))
    assert opened.store.index.find(0, name_of(89))
    opened.close()


def test_readers_meet_eviction_and_rewriting(quick_path: Path) -> None:
    """Whatever the order of threads is: right bytes or a miss, and names that are gone are gone."""
    opened = Opened(quick_path, BUDGET, SEGMENT, FaultyFiles())
    store, is_over = opened.store, threading.Event()
    came = [0, 0]

    def keep_reading(index: int) -> None:
        while not is_over.is_set():
            names = names_in(store, range(1, 400))
            came[index] += sum(read(store, names))
            for parent in range(3):
                assert all(tail.tokens for tail in store.index.tails(name_of(parent)))

    threads = [threading.Thread(target=keep_reading, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 400):
        write(store, [number])
    while not all(came):
        assert all(thread.is_alive() for thread in threads)
    is_over.set()
    for thread in threads:
        thread.join()
    assert all(came) and store.damage.num_records == 0
    check_tails(store, range(1, 400))
    assert len(store.index) == len(names_in(store, range(1, 400)))
    opened.close()


def test_a_budget_that_is_too_small_is_refused() -> None:
    assert segment_bytes_for(20 << 30, 200_000) == 256 << 20
    assert segment_bytes_for(80 << 20, 200_000) == 10 << 20
    with pytest.raises(ConfigurationError, match="cache_size is 1000000 bytes"):
        segment_bytes_for(1_000_000, 200_000)


def test_entries_of_a_footer_come_back() -> None:
    records = [
        Record(3, b"x" * 18, b"p" * 16, b"\0\0\1\2", 64, 99, b"d" * 16),
        Record(255, b"n\0", b"", b"", 1 << 33, (1 << 32) - 1, bytes(16)),
        Record(0, b"\0", b"q", b"t" * 65535, 200, 1, b"e" * 16),
    ]
    assert unpack_entries(pack_entries(records), 3) == records


def test_a_store_that_nothing_was_written_to_leaves_nothing(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.store.prepare_to_write()
    opened.close()
    assert not (tmp_path / FINGERPRINT.hex()).exists()
