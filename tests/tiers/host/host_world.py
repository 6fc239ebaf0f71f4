"""A host tier over a small pool on the CPU, its copies in the order that a test says."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder, Tiers
from quire.tiers.host.plain_lane import PlainLane
from quire.tiers.host.staged_copies import Copy, StagedCopies, copy_pairs_in_turn

BLOCK_BYTES = 64
NUM_BLOCKS = 32


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content_of(number: int, num_bytes: int = BLOCK_BYTES) -> torch.Tensor:
    """What the block of this number holds."""
    return (torch.arange(num_bytes) * 7 + 13 * number + 1).to(torch.uint8)


class HeldCopy:
    """A copy that is carried out when a test says so; its bytes are not there before."""

    seconds = 1e-3

    def __init__(self, carry_out: Callable[[], object]) -> None:
        self._carry_out = carry_out
        self._is_over = False

    def is_over(self) -> bool:
        return self._is_over

    def carry_out(self) -> None:
        self._carry_out()
        self._is_over = True


class HeldCopies:
    """Has the methods of `StagedCopies`: those that wait are in `waiting`, and end in any order."""

    def __init__(self, plain: StagedCopies) -> None:
        self.plain = plain
        self.slots, self.pinned_bytes = plain.slots, plain.pinned_bytes
        self.waiting: list[HeldCopy] = []
        self.is_closed = False

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        self.waiting.append(HeldCopy(partial(self.plain.store, blocks, slots)))
        return self.waiting[-1]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Copy:
        self.waiting.append(HeldCopy(partial(self.plain.load, slots, blocks)))
        return self.waiting[-1]

    def carry_out(self, *, backwards: bool = False) -> None:
        waiting, self.waiting = self.waiting, []
        for copy in reversed(waiting) if backwards else waiting:
            copy.carry_out()

    def close(self) -> None:
        self.carry_out()
        self.is_closed = True


def plain_copies(pool: torch.Tensor, num_slots: int) -> StagedCopies:
    host = torch.zeros((num_slots, pool.shape[1]), dtype=torch.uint8)
    lanes = (PlainLane(), PlainLane())
    return StagedCopies(pool, host, lanes, copy_pairs_in_turn, lambda: None)


class Orders:
    """Orders to tiers over a pool whose blocks are filled with what their names say."""

    def __init__(self, tiers: Tiers, pool: torch.Tensor) -> None:
        self.tiers, self.pool = tiers, pool
        self.ends: dict[int, bool] = {}
        self._next_id = 100

    def store(self, numbers: Iterable[int], parent: bytes = b"", tokens: bytes = b"") -> list[int]:
        orders = []
        for number in numbers:
            block = number % len(self.pool)
            self.pool[block] = content_of(number, self.pool.shape[1])
            orders.append(StoreOrder(self._take_id(), block, 0, name_of(number), parent, tokens))
        self.tiers.start(orders, ())
        return [order.order_id for order in orders]

    def load(self, numbers: Iterable[int]) -> list[int]:
        orders = []
        for number in numbers:
            block = number % len(self.pool)
            self.pool[block] = 0xEE
            orders.append(LoadOrder(self._take_id(), block, 0, name_of(number)))
        self.tiers.start((), orders)
        return [order.order_id for order in orders]

    def take_in(self) -> None:
        for end in self.tiers.ended():
            assert end.order_id not in self.ends, "each ends once"
            self.ends[end.order_id] = end.is_done

    def results(self, order_ids: Sequence[int]) -> list[bool | None]:
        """How these have ended; None: not yet."""
        self.take_in()
        return [self.ends.get(order_id) for order_id in order_ids]

    def has(self, numbers: Iterable[int]) -> bool:
        """Whether the blocks of the pool hold these contents."""
        return all(
            torch.equal(self.pool[number % len(self.pool)], content_of(number, self.pool.shape[1]))
            for number in numbers
        )

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id
