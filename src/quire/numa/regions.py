"""Finds the address ranges of a process's private memory in Linux's list of mappings."""

import re
from collections.abc import Sequence
from pathlib import Path

from quire.numa.topology import ROOT

LEAST_REGION_BYTES = 64 << 10

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ \S+ 0 *(\[heap\]|\[anon\S*\])?")

Region = tuple[int, int]
"""The first address of a region, and the address after its last byte."""


def anonymous_memory(root: Path = ROOT, *, with_heap: bool = True) -> list[Region]:
    """The address ranges of this process's private memory, in order.

    Left out are file mappings, stacks and small regions, and without `with_heap` also the heap,
    from which the C library allocates small pieces.
    """
    lines = (root / "proc/self/maps").read_text().splitlines()
    found = [_MAPPING.fullmatch(line) for line in lines]
    regions = [
        (int(match[1], 16), int(match[2], 16))
        for match in found
        if match and (with_heap or match[3] != "[heap]")
    ]
    return [region for region in regions if region[1] - region[0] >= LEAST_REGION_BYTES]


def added_memory(before: Sequence[Region], after: Sequence[Region]) -> list[Region]:
    """The parts of `after` that no region of `before` covers. Both must be sorted."""
    found = []
    for begin, end in after:
        for old_begin, old_end in before:
            if old_end <= begin or old_begin >= end:
                continue
            if begin < old_begin:
                found.append((begin, old_begin))
            begin = max(begin, old_end)
        if begin < end:
            found.append((begin, end))
    return found
