"""Contents that are known by their names, and stores of them."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quire.core.memory.tiers.contract import StoreOrder
from quire.tiers.disk.files import Files, Targets
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.store import SegmentStore

FINGERPRINT = b"namespace of one"
OTHER = b"namespace of two"
NUM_BYTES = 1000


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload_of(name: bytes, num_bytes: int = NUM_BYTES, group: int = 0) -> bytes:
    return hashlib.shake_128(name + bytes([group])).digest(num_bytes)


def order_of(number: int, group: int = 0) -> StoreOrder:
    """Every fifth is a tail, of one of three parents."""
    if number % 5:
        return StoreOrder(number, 0, group, name_of(number))
    tokens = hashlib.shake_128(name_of(number)).digest(4 * (1 + number % 11))
    return StoreOrder(number, 0, group, name_of(number) + b"/3", name_of(number % 3), tokens)


def write(store: SegmentStore, numbers: Iterable[int], num_bytes: int = NUM_BYTES) -> None:
    orders = [order_of(number) for number in numbers]
    payloads = [memoryview(payload_of(order.name, num_bytes)) for order in orders]
    store.append(orders, payloads)


def read(store: SegmentStore, names: Sequence[bytes], num_bytes: int = NUM_BYTES) -> list[bool]:
    """Which came; each that came is checked."""
    memory = bytearray(num_bytes * len(names))
    targets = Targets.in_turn(memory, [num_bytes] * len(names))
    done = store.read([(0, name) for name in names], targets).done
    for index, (name, is_done) in enumerate(zip(names, done, strict=True)):
        assert not is_done or targets.view(index) == payload_of(name, num_bytes)
    return done


def names_in(store: SegmentStore, numbers: Iterable[int]) -> list[bytes]:
    names = [order_of(number).name for number in numbers]
    return [name for name in names if store.index.find(0, name)]


def check_tails(store: SegmentStore, numbers: Iterable[int]) -> None:
    """The tails are those of what is found, each under its parent."""
    orders = [order_of(number) for number in numbers]
    kept = {order for order in orders if order.tokens and store.index.find(0, order.name)}
    for parent in {order.parent for order in orders}:
        wanted = {(order.tokens, order.name) for order in kept if order.parent == parent}
        assert {tuple(tail) for tail in store.index.tails(parent)} == (wanted if parent else set())


class Opened:
    """A folder and a store in it."""

    def __init__(
        self,
        path: Path,
        budget_bytes: int = 1 << 30,
        segment_bytes: int = 1 << 28,
        files: Files | None = None,
        fingerprint: bytes = FINGERPRINT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = CacheFolder.open(path, files or Files())
        self.store = SegmentStore(
            self.folder, fingerprint, budget_bytes, segment_bytes, clock=clock
        )

    def close(self, *, seals: bool = True) -> None:
        if seals:
            self.store.seal()
        elif self.store._open is not None:  # the system does that for a process that ends
            self.folder.files.close(self.store._open.descriptor)
        self.store.close()
        self.folder.close()


def segments(path: Path, fingerprint: bytes = FINGERPRINT) -> list[Path]:
    return sorted((path / fingerprint.hex()).glob("*.seg"))
