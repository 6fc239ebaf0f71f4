"""Narrows a schema's bounds of numbers to values that llguidance represents exactly.

llguidance reads a bound as a 64-bit float, counts integers in 64 bits, and writes a bound with the
fewest digits that identify the float. All this is exact up to 2**53. A bound beyond 2**53 is moved
inwards to the next number that is exact. Called by `values` and `formats`.
"""

import math
from decimal import Decimal

EXACT = 2**53
LARGEST = 2**63 - 1024
"""The largest float below 2**63."""

OUTERMOST = LARGEST // 10**4 * 10**4
"""llguidance requires both bounds if one of them is far from 0. A missing bound is then set to this
number or its negative."""

_NUM_DIGITS = 15
"""The number of decimal digits that every float preserves."""


def greatest(bound: float, *, is_exclusive: bool, is_integer: bool) -> float | None:
    """The greatest exact number that is at most `bound`, or below it if it is exclusive; None if
    there is none.

    `bound` is beyond EXACT. `is_integer` is True if all values are integers.
    """
    value = math.floor(bound)
    if value < -LARGEST:
        return None
    # LARGEST is less than such a bound, so an exclusive bound needs no special treatment.
    if value > LARGEST:
        value, is_exclusive = LARGEST, False
    if is_integer:
        found = float(value)
        while found > value or (is_exclusive and found == bound):
            found = math.nextafter(found, -math.inf)
        return int(found) if abs(found) <= LARGEST else None
    # Round down to the number of decimal digits that every float preserves.
    unit = 10 ** (len(str(abs(value))) - _NUM_DIGITS)
    rounded = value // unit * unit
    while float(rounded) > value or (is_exclusive and rounded == bound):
        rounded -= unit
    return rounded if abs(rounded) <= LARGEST else None


def least(bound: float, *, is_exclusive: bool, is_integer: bool) -> float | None:
    """The least exact number that is at least `bound`, or above it if it is exclusive; None if
    there is none. `bound` is beyond EXACT."""
    mirrored = greatest(-bound, is_exclusive=is_exclusive, is_integer=is_integer)
    return None if mirrored is None else -mirrored


def last_place(number: float) -> float:
    """The value of one unit in the last decimal digit that every float as large as `number`
    preserves."""
    return float(10.0 ** (len(str(abs(int(number)))) - _NUM_DIGITS))


def is_exact(constant: float) -> bool:
    """True if llguidance writes `constant` exactly."""
    if abs(constant) <= EXACT:
        return True
    if abs(constant) > LARGEST:
        return False
    if isinstance(constant, int):
        return int(float(constant)) == constant
    return Decimal(repr(constant)) == Decimal(constant)
