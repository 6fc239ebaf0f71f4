"""Two ranks' shares of the disk tier, one of them behind a socket, as one tier."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk.faulty_files import FaultyFiles
from tests.tiers.disk.store_world import FINGERPRINT, OTHER, Opened, name_of, payload_of, write

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.errors import ConfigurationError, EngineDeadError
from quire.ipc import send
from quire.tiers.disk import io_limits
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder import CacheFolder, RankPart
from quire.tiers.disk.io_limits import Spent
from quire.tiers.disk.store import SegmentStore
from quire.tiers.rank_messages import ClearTier, MovesEnded, RankPages, TierOpened, ToRank0
from quire.tiers.rank_service import RankService
from quire.tiers.ranks import RankedTiers, RankLink

SIZE, NUM_BLOCKS = 4096, 16
FINGERPRINTS = [FINGERPRINT, OTHER]
PATIENCE_S = 60.0


def bytes_of(rank: int, number: int) -> np.ndarray:
    """A rank's share of a content."""
    return np.frombuffer(payload_of(name_of(number), SIZE, rank), np.uint8)


class Ranks:
    """Rank 0's tier in this thread and rank 1's service in another, over one folder. A content of
    number n lies in block n, unless a test says otherwise."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        """files: of rank 1."""
        self.storages = [np.zeros((NUM_BLOCKS, SIZE), np.uint8) for _ in FINGERPRINTS]
        self.path, self.files = path, files or Files()
        self.num_calls = 0
        self.ends: dict[int, bool] = {}
        self._next_id = 0
        self.folder = CacheFolder.open(path)
        self.others_folder = CacheFolder.join(path, os.dup(self.folder.lock_descriptor), self.files)
        changed = threading.Event()
        self.ours, self.theirs = socket.socketpair()
        self.service = RankService(self.theirs, FINGERPRINTS[1], self.open_other)
        self.thread = threading.Thread(target=self.service.run, daemon=True)
        self.thread.start()
        self.link = RankLink(1, self.ours)
        assert self.link.description == FINGERPRINTS[1]
        self.local = self.open(self.folder, 0, changed.set)
        self.link.open(FINGERPRINTS, changed.set)
        self.tiers = RankedTiers(self.local, [self.link], lambda: self.num_calls, changed)

    def open(self, folder: CacheFolder, rank: int, wake_up: Callable[[], None]) -> DiskTier:
        folder.part = RankPart(rank, 2, frozenset(FINGERPRINTS))
        budget, storage = DiskBudget(64 << 20), self.storages[rank]
        return DiskTier(folder, FINGERPRINTS[rank], budget, storage, [SIZE], wake_up)

    def open_other(self, descriptions: list[bytes], wake_up: Callable[[], None]) -> DiskTier:
        assert descriptions == FINGERPRINTS
        self.other = self.open(self.others_folder, 1, wake_up)
        return self.other

    def call(self) -> None:
        """A call that both ranks make."""
        self.num_calls += 1
        self.service.count_call()

    def order(self, *, stores: Sequence[int] = (), loads: Sequence[int] = ()) -> list[int]:
        """Orders for contents of these numbers. Returns their ids."""
        found: list[list[StoreOrder | LoadOrder]] = [[], []]
        for numbers, kind, orders in ((stores, StoreOrder, found[0]), (loads, LoadOrder, found[1])):
            for number in numbers:
                self._next_id += 1
                orders.append(kind(self._next_id, number % NUM_BLOCKS, 0, name_of(number)))
                for rank, storage in enumerate(self.storages):
                    content = bytes_of(rank, number) if kind is StoreOrder else 0xEE
                    storage[number % NUM_BLOCKS] = content
        self.tiers.start(*found)  # type: ignore[arg-type]
        return [order.order_id for orders in found for order in orders]

    def wait(self, order_ids: Sequence[int]) -> list[bool]:
        """Until these have ended; how they did."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.have_ended(order_ids):
            assert time.monotonic() < until_s, "an order has not ended"
            self.tiers.wait(0.2)
        return [self.ends[order_id] for order_id in order_ids]

    def have_ended(self, order_ids: Sequence[int]) -> bool:
        for end in self.tiers.ended():
            assert end.order_id not in self.ends, "each ends once"
            self.ends[end.order_id] = end.is_done
        return all(order_id in self.ends for order_id in order_ids)

    def store(self, *numbers: int) -> list[bool]:
        return self.wait(self.order(stores=numbers))

    def load(self, *numbers: int) -> list[bool]:
        """What is done is checked in both ranks."""
        done = self.wait(self.order(loads=numbers))
        for number, is_done in zip(numbers, done, strict=True):
            for rank, storage in enumerate(self.storages):
                assert not is_done or (storage[number % NUM_BLOCKS] == bytes_of(rank, number)).all()
        return done

    def close(self) -> None:
        self.tiers.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made = []

    def make(files: Files | None = None) -> Ranks:
        made.append(Ranks(tmp_path, files))
        return made[-1]

    yield make
    for ranks in made:
        ranks.theirs.close()
        ranks.ours.close()


def test_a_content_is_kept_and_comes_back_in_all_ranks(make: Callable[..., Ranks]) -> None:
    ranks = make()
    assert ranks.store(1, 2, 3) == [True] * 3
    assert ranks.load(1, 3) == [True] * 2
    counts = ranks.tiers.counts()["disk"]
    assert counts["stores_done"] == 3 and counts["loads_done"] == 2
    assert counts["stored_bytes"] == 2 * 3 * SIZE and counts["is_reading"]
    ranks.close()
    again = make()
    assert all(again.tiers.find(0, name_of(number)) for number in (1, 2, 3))
    assert again.load(2, 1) == [True, True]
    assert 0 < again.tiers.load_s([(0, b"name")] * 4) < 60
    again.tiers.clear()
    assert not again.tiers.find(0, name_of(1))
    assert again.store(1) == [True]
    again.close()


def test_nothing_is_touched_before_the_rank_has_made_the_calls(make: Callable[..., Ranks]) -> None:
    ranks = make()
    assert ranks.store(1) == [True]
    ranks.num_calls += 1  # rank 0 has made a call in which rank 1 still is
    stored, loaded = ranks.order(stores=[2], loads=[1])
    late = bytes_of(1, 7)
    until_s = time.monotonic() + PATIENCE_S
    while not (ranks.storages[0][1] == bytes_of(0, 1)).all():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert not ranks.have_ended([stored]) and not ranks.have_ended([loaded])
    assert (ranks.storages[1][1] == 0xEE).all()
    ranks.storages[1][2] = late  # which the call ends with
    ranks.service.count_call()
    assert ranks.wait([stored, loaded]) == [True, True]
    assert (ranks.storages[1][1] == bytes_of(1, 1)).all()
    ranks.wait(ranks.order(loads=[2]))
    assert (ranks.storages[1][2] == late).all()
    ranks.close()


@pytest.mark.parametrize("how", ["dropped", "damaged", "evicted"])
def test_a_block_that_one_rank_lacks_is_a_miss_and_is_dropped(
    how: str, make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_limits, "FIRST_PAUSE_S", 0.05)
    files = FaultyFiles()
    ranks = make(files)
    if how == "dropped":
        files.errors["pwritev"] = OSError(5, "no")
        assert ranks.store(1, 2) == [False, False]
        files.errors.clear()
        assert not ranks.tiers.find(0, name_of(1)), "rank 0 has it, and that is of no use"
        until_s = time.monotonic() + PATIENCE_S
        while not ranks.tiers.takes_stores:  # after a pause
            assert time.monotonic() < until_s
            time.sleep(0.01)
    else:
        assert ranks.store(1, 2, 3) == [True] * 3
    if how == "damaged":
        (path,) = ranks.other.store.path.glob("*.seg")
        data = bytearray(path.read_bytes())
        data[data.index(bytes_of(1, 1).tobytes())] ^= 1
        path.write_bytes(data)
    if how == "evicted":
        ranks.other.store.index.forget_all()
    if how != "dropped":
        assert ranks.tiers.find(0, name_of(1))
        assert ranks.load(1) == [False]
        assert ranks.load(2) == [how == "damaged"]
    assert not ranks.tiers.find(0, name_of(1))
    assert ranks.store(1) == [True], "it is stored again where it lacks"
    assert ranks.load(1) == [True]
    ranks.close()


def test_a_cancelled_load_ends_undone_and_keeps_its_block(make: Callable[..., Ranks]) -> None:
    ranks = make()
    assert ranks.store(1) == [True]
    ranks.num_calls += 1
    order_ids = ranks.order(loads=[1])
    ranks.tiers.cancel(order_ids)
    ranks.service.count_call()
    ranks.wait(order_ids)
    assert ranks.tiers.find(0, name_of(1)) and ranks.load(1) == [True]
    ranks.close()


def test_with_a_rank_all_its_orders_end(make: Callable[..., Ranks]) -> None:
    ranks = make()
    assert ranks.store(1) == [True]
    ranks.num_calls += 1  # so that rank 1 never begins
    order_ids = ranks.order(stores=[2], loads=[1])
    assert not ranks.have_ended(order_ids)
    ranks.theirs.shutdown(socket.SHUT_RDWR)
    assert ranks.wait(order_ids) == [False, False]
    assert not ranks.tiers.takes_stores
    assert ranks.tiers.load_s([(0, b"name")]) == float("inf")
    assert ranks.store(3) == [False]
    began_s = time.monotonic()
    ranks.tiers.close()
    assert time.monotonic() - began_s < 30


def test_a_rank_that_is_gone_or_can_not_open_its_tier_is_named() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(EngineDeadError, match="rank 1: its process has died"):
        RankLink(1, ours)

    def refuse(_: object, __: object) -> DiskTier:
        raise ConfigurationError("too small")

    ours, theirs = socket.socketpair()
    service = RankService(theirs, b"pages", refuse)
    threading.Thread(target=service.run, daemon=True).start()
    with ours, theirs, pytest.raises(ConfigurationError, match="rank 2: too small"):
        RankLink(2, ours).open([b"", b"pages"], lambda: None)


def test_the_folder_is_free_when_all_ranks_have_let_go(tmp_path: Path) -> None:
    first = CacheFolder.open(tmp_path)
    second = CacheFolder.join(tmp_path, os.dup(first.lock_descriptor))
    first.close()
    with pytest.raises(ConfigurationError, match="is in use by process"):
        CacheFolder.open(tmp_path)
    second.close()
    CacheFolder.open(tmp_path).close()


def test_the_daily_budget_is_kept_for_all_ranks_together(tmp_path: Path) -> None:
    folder = CacheFolder.open(tmp_path)
    folder.part = RankPart(1, 2)
    folder.write_spent(Spent(300, 5.0))
    assert folder.read_spent() is None, "the first rank does so"
    folder.part = RankPart(0, 2)
    folder.write_spent(Spent(100, 5.0))
    assert folder.read_spent() == Spent(100, 5.0)
    folder.part = RankPart()
    assert folder.read_spent() == Spent(200, 5.0)
    folder.close()


def test_ranks_never_remove_what_another_one_counts(tmp_path: Path) -> None:
    """Two ranks beside segments of two old namespaces: within the budget at every time, and each
    old segment goes once."""
    segment_bytes, num_bytes = 40_000, 1000
    for number, old in enumerate((b"an old namespace", b"another old one.")):
        opened = Opened(tmp_path, segment_bytes=segment_bytes, fingerprint=old)
        write(opened.store, range(200 * number, 200 * number + 200))
        opened.close()
    num_old = sum(path.stat().st_size for path in tmp_path.glob("*/*.seg"))
    first = CacheFolder.open(tmp_path)
    folders = [first, CacheFolder.join(tmp_path, os.dup(first.lock_descriptor))]
    budget_bytes = num_old + 4 * segment_bytes
    stores = []
    for rank, folder in enumerate(folders):
        folder.part = RankPart(rank, 2, frozenset(FINGERPRINTS))
        store = SegmentStore(folder, FINGERPRINTS[rank], budget_bytes // 2, segment_bytes)
        stores.append(store)
        store.prepare_to_write()
    assert sum(store.used_bytes for store in stores) == num_old
    for turn in range(120):
        for store in stores:
            write(store, range(10 * turn, 10 * turn + 10), num_bytes)
        used = sum(path.stat().st_size for path in tmp_path.glob("*/*.seg"))
        assert used <= sum(store.used_bytes for store in stores) <= budget_bytes
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        fingerprint.hex() for fingerprint in FINGERPRINTS
    }
    newest = [name_of(number) for number in range(1100, 1200) if number % 5]
    for store in stores:
        assert all(store.index.find(0, name) for name in newest)
        store.seal()
        store.close()
    for folder in folders:
        folder.close()


def test_ends_that_come_in_any_order_are_told_once(make: Callable[..., Ranks]) -> None:
    ranks = make()
    ranks.store(*range(12))
    order_ids = ranks.order(loads=range(12))
    ranks.tiers.cancel(order_ids[::2])
    done = ranks.wait(order_ids)
    for number, is_done in enumerate(done):
        assert is_done or number % 2 == 0
        if is_done:
            assert (ranks.storages[1][number] == bytes_of(1, number)).all()
    assert ranks.tiers.ended() == []
    ranks.close()


def test_a_rank_is_gone_once_all_was_received_that_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it said before would end orders that have ended with the rank."""
    gate, take = threading.Event(), RankLink._handle

    def take_later(link: RankLink, news: ToRank0) -> None:
        gate.wait()
        take(link, news)

    monkeypatch.setattr(RankLink, "_handle", take_later)
    ours, theirs = socket.socketpair()
    for message in (RankPages(b""), TierOpened(), MovesEnded([1], [], [])):
        send(theirs, message)
    link = RankLink(1, ours)
    link.open([b""], lambda: None)
    theirs.close()
    link.send(ClearTier())
    assert not link.is_gone and not link.ended
    gate.set()
    assert link.wait_closed(PATIENCE_S) and link.is_gone
    assert list(link.ended) == [MovesEnded([1], [], [])]
    ours.close()
