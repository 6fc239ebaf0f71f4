"""Narrows bounds of numbers to values that llguidance represents exactly.

llguidance reads a bound as a 64-bit float, counts integers in 64 bits, and writes the bound of a
number with the fewest digits that tell floats apart. All this is exact up to 2**53. Beyond, a bound
is moved inwards to the next number for which it is exact. Called by `values` and `formats`.
"""

import math
from decimal import Decimal

EXACT = 2**53
LARGEST = 2**63 - 1024
"""The largest float below 2**63."""

OUTERMOST = LARGEST // 10**4 * 10**4
"""The largest bound of numbers. llguidance requires the opposite bound if a bound is far from 0."""

_NUM_DIGITS = 15
"""The number of decimal digits that every float preserves."""


def greatest(bound: float, *, is_exclusive: bool, is_integer: bool) -> float | None:
    """The greatest representable bound up to `bound`, or below it if it is exclusive; None if there
    is none.

    `bound` is beyond EXACT. `is_integer` says that all values are integers.
    """
    value = math.floor(bound)
    if value < -LARGEST:
        return None
    # The largest float is less than such a bound, so exclusive bounds need no more care.
    if value > LARGEST:
        value, is_exclusive = LARGEST, False
    if is_integer:
        found = float(value)
        while found > value or (is_exclusive and found == bound):
            found = math.nextafter(found, -math.inf)
        return int(found) if abs(found) <= LARGEST else None
    # Round down to as many decimal digits as every float preserves.
    unit = 10 ** (len(str(abs(value))) - _NUM_DIGITS)
    rounded = value // unit * unit
    while float(rounded) > value or (is_exclusive and rounded == bound):
        rounded -= unit
    return rounded if abs(rounded) <= LARGEST else None


def least(bound: float, *, is_exclusive: bool, is_integer: bool) -> float | None:
    """The least representable bound from `bound` on, or above it if exclusive; None if none."""
    mirrored = greatest(-bound, is_exclusive=is_exclusive, is_integer=is_integer)
    return None if mirrored is None else -mirrored


def last_place(number: float) -> float:
    """The unit of the last decimal digit that every float of the size of `number` preserves."""
    return float(10.0 ** (len(str(abs(int(number)))) - _NUM_DIGITS))


def is_exact(constant: float) -> bool:
    """Whether llguidance writes `constant` exactly."""
    if abs(constant) <= EXACT:
        return True
    if abs(constant) > LARGEST:
        return False
    if isinstance(constant, int):
        return int(float(constant)) == constant
    return Decimal(repr(constant)) == Decimal(constant)
