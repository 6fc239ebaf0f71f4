"""Bounds of numbers as llguidance can hold them: never wider than the schema's.

It reads a bound as a binary float of 64 bits, counts integers in 64 bits, and writes the bound of a
number with the fewest digits that tell floats apart. Up to 2**53 all that is exact. Beyond, a bound
moves inwards to a number for which it is. Called by `values` and by `formats`.
"""

import math
from decimal import Decimal

EXACT = 2**53
LARGEST = 2**63 - 1024
"""The largest float below 2**63."""

OUTERMOST = LARGEST // 10**4 * 10**4
"""The largest bound of numbers: where a far bound stands alone, llguidance needs the other one."""

_NUM_DIGITS = 15
"""As many decimal digits as every float keeps."""


def greatest(bound: float, *, is_exclusive: bool, is_integer: bool) -> float | None:
    """The greatest number up to `bound`, or below it, that can be a bound; None: there is none.

    bound: beyond EXACT. is_integer: all values are integers.
    """
    value = math.floor(bound)
    if value < -LARGEST:
        return None
    if value > LARGEST:
        value, is_exclusive = LARGEST, False
    if is_integer:
        found = float(value)
        while found > value or (is_exclusive and found == bound):
            found = math.nextafter(found, -math.inf)
        return int(found) if abs(found) <= LARGEST else None
    unit = 10 ** (len(str(abs(value))) - _NUM_DIGITS)
    rounded = value // unit * unit
    while float(rounded) > value or (is_exclusive and rounded == bound):
        rounded -= unit
    return rounded if abs(rounded) <= LARGEST else None


def least(bound: float, *, is_exclusive: bool, is_integer: bool) -> float | None:
    """The least number from `bound` on, or above it, that can be a bound; None: there is none."""
    mirrored = greatest(-bound, is_exclusive=is_exclusive, is_integer=is_integer)
    return None if mirrored is None else -mirrored


def last_place(number: float) -> float:
    """The unit of the last of the digits that every float of the size of `number` keeps."""
    return float(10.0 ** (len(str(abs(int(number)))) - _NUM_DIGITS))


def is_exact(constant: float) -> bool:
    """Whether llguidance writes `constant` as it is."""
    if abs(constant) <= EXACT:
        return True
    if abs(constant) > LARGEST:
        return False
    if isinstance(constant, int):
        return int(float(constant)) == constant
    return Decimal(repr(constant)) == Decimal(constant)
