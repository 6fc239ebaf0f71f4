"""Lays out the work lists of a captured mixed step in one buffer of 64-bit words.

A replayed step launches the same grids each time and reads the same memory. So the buffer has room
for the longest list that a step of its size can need, and says how many entries are set:

    [number of items, number of merges, merges] of each list, then [items] of each list

The host writes the buffer as an array, and the device reads it as a tensor. The host sends only the
words up to the last item. A kind of layers has one list, or one of decoding sequences and one of
all others. Called by `triton_paged.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quire.attention.interface import MixedSize
from quire.attention.triton_plan import HostWork, chunk_rule, part_room
from quire.kernels.triton.attention.merge_parts import MERGE_FIELDS
from quire.kernels.triton.attention.paged_attention import ITEM_FIELDS, AttendShape

A = TypeVar("A")

# Words that each number takes: 16 bytes, because Triton's pointers are aligned to 16 bytes.
_NUMBER_WORDS = 2


@dataclass(frozen=True, slots=True)
class ListBounds:
    """The most entries that a work list can have in any step of one size, with any of a layer's
    shapes."""

    num_items: int
    #: There is an entry for each token whose parts are merged. A list that is not only of decoding
    #: sequences has one for each token of padding, too.
    num_merges: int
    #: The number of parts that items may write.
    num_parts: int

    @staticmethod
    def of_decodes(shape: AttendShape, size: MixedSize) -> "ListBounds":
        """The bounds of a list of decoding sequences, without padding."""
        rule = chunk_rule(shape, size.max_context)
        num_seqs = min(size.num_tokens, size.num_seqs)
        num_split = min(num_seqs, part_room(shape, rule))
        num_items = num_seqs + num_split * (rule.parts_per_token - 1)
        return ListBounds(num_items, num_seqs, num_split * rule.parts_per_token)

    @staticmethod
    def of(shapes: Sequence[AttendShape], size: MixedSize) -> "ListBounds":
        num_items = num_parts = 0
        for shape in shapes:
            rule = chunk_rule(shape, size.max_context)
            # Padding is attended like one more sequence.
            num_rows = size.num_seqs + 1
            num_tiles = min(size.num_tokens, size.num_tokens // shape.queries + num_rows)
            # Only sequences that fit one tile have their keys split.
            num_split = min(size.num_tokens, size.num_seqs * shape.queries, part_room(shape, rule))
            num_more = min(size.num_seqs, num_split) * (rule.parts_per_token - 1)
            num_items = max(num_items, num_tiles + num_more)
            num_parts = max(num_parts, num_split * rule.parts_per_token)
        return ListBounds(num_items, size.num_tokens, num_parts)


@dataclass(frozen=True, slots=True)
class PlannedList(Generic[A]):
    """Views of one work list in the buffer, all int32."""

    #: [1].
    num_items: A
    #: [1].
    num_merges: A
    #: [most, MERGE_FIELDS].
    merges: A
    #: [most, ITEM_FIELDS], balanced by `in_turns`.
    items: A


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """The places of all work lists in the buffer."""

    #: The bounds of each list.
    bounds: tuple[ListBounds, ...]

    @property
    def num_words(self) -> int:
        return sum(self._sizes())

    def open(self, words: Any, int32: Any) -> list[PlannedList[Any]]:
        """Views into `words` [num_words] int64, an array or a tensor. `int32` is the dtype of its
        library."""
        sizes = self._sizes()
        firsts = accumulate(sizes, initial=0)
        parts = [
            words[first : first + size].view(int32)
            for first, size in zip(firsts, sizes, strict=False)
        ]
        found: list[PlannedList[Any]] = []
        for place, items in enumerate(parts[3 * len(self.bounds) :]):
            num_items, num_merges, merges = parts[3 * place : 3 * place + 3]
            found.append(
                PlannedList(
                    num_items[:1],
                    num_merges[:1],
                    merges.reshape(-1, MERGE_FIELDS),
                    items.reshape(-1, ITEM_FIELDS),
                )
            )
        return found

    def write(
        self, lists: Sequence[HostWork], num_tokens: int, words: npt.NDArray[np.int64]
    ) -> int:
        """Write the lists of a step. `num_tokens` does not count padding. Returns the number of
        words up to the last item."""
        for work, place in zip(lists, self.open(words, np.int32), strict=True):
            place.num_items[0] = len(work.items)
            place.items[: len(work.items)] = work.items
            # The output of padding is zero, like that of a token without parts.
            padding = np.arange(num_tokens, len(place.merges))
            num_merges = len(work.merges) + len(padding)
            place.num_merges[0] = num_merges
            place.merges[: len(work.merges)] = work.merges
            place.merges[len(work.merges) : num_merges, 0] = padding
        unused = len(place.items) - len(work.items)
        return self.num_words - unused * ITEM_FIELDS // 2

    def _sizes(self) -> list[int]:
        """The words of each part of the buffer."""
        sizes: list[int] = []
        for bounds in self.bounds:
            sizes += [_NUMBER_WORDS, _NUMBER_WORDS, bounds.num_merges * MERGE_FIELDS // 2]
        return sizes + [bounds.num_items * ITEM_FIELDS // 2 for bounds in self.bounds]


def in_turns(items: npt.NDArray[np.int32], per_round: int) -> npt.NDArray[np.int32]:
    """Reorder `items`, the longest first, for programs that take `per_round` items at a time.

    Program p takes the items p, p + per_round and so on. So every other round is reversed: the
    program with the longest item of one round gets the shortest of the next.
    """
    places = np.arange(len(items))
    first = places // per_round * per_round
    end = np.minimum(first + per_round, len(items))
    is_reversed = places // per_round % 2 == 1
    return items[np.where(is_reversed, first + end - 1 - places, places)]
