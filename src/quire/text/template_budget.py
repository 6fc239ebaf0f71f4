"""How many steps and bytes the rendering of one template may take.

A step is a loop's round, a call, a filter, or a kibibyte that is copied or looked at: 0.1 to 1 µs.
The bytes are those of all texts and lists that a rendering makes, kept or not: an upper bound of
what it holds. Both are far more than any template takes that only writes out what it is given, and
grow with that. Called by `template_sandbox` and `template_operations`.
"""

import sys
import threading
from collections.abc import Mapping
from typing import Any

import jinja2

NUM_STEPS = 1_000_000
STEPS_PER_BYTE = 8
NUM_BYTES = 256 << 20
BYTES_PER_BYTE = 128
"""A rendering's allowance, and what each byte of its variables adds: a template may copy all that
it has so far for each of hundreds of messages."""

_ENTRY_BYTES = 8
_CONTAINERS: tuple[Any, ...] = (
    *(list, tuple, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_WRITTEN_ENTRY_BYTES = 24
_WRITTEN_CHARACTER_BYTES = 10
"""At most, where a list's or an object's text is made: separators and numbers, escapes."""


class TemplateBudgetError(jinja2.exceptions.SecurityError):
    """A template takes more steps or memory than a rendering may."""


class TemplateBudget:
    """Of one rendering. steps, bytes: what is left, never negative behind a call.

    variables: what the template is given, which is weighed only where the allowance alone is not
    enough.
    """

    __slots__ = ("_variables", "bytes", "steps")

    def __init__(self, variables: Mapping[str, Any] | None = None) -> None:
        self.steps = NUM_STEPS
        self.bytes = NUM_BYTES
        self._variables = variables

    def step(self, number: int = 1) -> None:
        """Take steps from the budget. Raises TemplateBudgetError."""
        self.steps -= number
        if self.steps < 0:
            self._extend()

    def make(self, num_bytes: int) -> None:
        """Take the memory of something new, and the steps of filling it. Raises the same."""
        self.bytes -= num_bytes
        self.steps -= num_bytes >> 10
        if self.bytes < 0 or self.steps < 0:
            self._extend()

    def weigh(self, value: Any) -> int:
        """How many bytes a text of `value` has at most, all that is inside of it counted as often
        as it is there. Takes the steps of looking at all of that. Raises the same."""
        if isinstance(value, str):
            self.step(len(value) >> 10)
            return len(value) * 4
        num_bytes, waiting = 0, [value]
        while waiting:
            each = waiting.pop()
            self.step()
            if isinstance(each, str):
                self.step(len(each) >> 10)
                num_bytes += len(each) * _WRITTEN_CHARACTER_BYTES
            elif isinstance(each, dict):
                waiting += each.keys()
                waiting += each.values()
                self.step(2 * len(each))
            elif isinstance(each, _CONTAINERS):
                waiting += each
                self.step(len(each))
            elif type(each) is int:
                num_bytes += each.bit_length() // 3
            num_bytes += _WRITTEN_ENTRY_BYTES
        return num_bytes

    def _extend(self) -> None:
        variables, self._variables = self._variables, None
        if variables is not None:
            num_bytes = _total_bytes(variables)
            self.steps += num_bytes * STEPS_PER_BYTE
            self.bytes += num_bytes * BYTES_PER_BYTE
        if self.steps < 0:
            raise TemplateBudgetError("the template takes too many steps")
        if self.bytes < 0:
            raise TemplateBudgetError("the template makes too much text")


class _Current(threading.local):
    """budget: that of the rendering that this thread is in the middle of."""

    budget = TemplateBudget()


CURRENT = _Current()


def size_of(value: Any) -> int:
    """The bytes of a text, or of a list without what is in it."""
    if isinstance(value, (str, bytes)):
        return sys.getsizeof(value)
    return len(value) * _ENTRY_BYTES if isinstance(value, (list, tuple, dict, set)) else 0


def _total_bytes(variables: Mapping[str, Any]) -> int:
    """Of plain data: each entry counts as some bytes, too."""
    num_bytes, waiting = 0, [*variables.values()]
    while waiting:
        each = waiting.pop()
        num_bytes += _ENTRY_BYTES
        if isinstance(each, str):
            num_bytes += sys.getsizeof(each)
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
    return num_bytes
