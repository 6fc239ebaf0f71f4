"""Bounds the time and the memory of one rendering of an untrusted chat template.

Time is counted in steps. A step is a loop iteration, a call, a filter, or a kibibyte copied or
read, and takes 0.1 to 1 µs. Memory is counted as the bytes of all texts and lists that a rendering
makes, even if they are freed, so it is an upper bound. Both budgets grow with the variables, and
far exceed the needs of a template that only writes the variables out. Called by `template_sandbox`
and `template_operations`.
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
"""The basic budget of a rendering, and the steps and bytes that each byte of its variables adds.
They allow a template to copy all its output so far for each of hundreds of messages."""

_ENTRY_BYTES = 8
_CONTAINERS: tuple[Any, ...] = (
    *(list, tuple, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_WRITTEN_ENTRY_BYTES = 24
_WRITTEN_CHARACTER_BYTES = 10
"""Upper bounds for writing a list or an object as text: bytes per entry (separators and numbers),
and bytes per escaped character."""


class TemplateBudgetError(jinja2.exceptions.SecurityError):
    """Raised when a rendering exceeds its budget of steps or memory."""


class TemplateBudget:
    """The remaining steps and bytes of one rendering.

    The variables are the template's input. Their size is measured only when the basic budget is
    used up.
    """

    __slots__ = ("_variables", "bytes", "steps")

    def __init__(self, variables: Mapping[str, Any] | None = None) -> None:
        #: Number of steps left; not negative after a method has returned.
        self.steps = NUM_STEPS
        #: Number of bytes left; not negative after a method has returned.
        self.bytes = NUM_BYTES
        self._variables = variables

    def step(self, number: int = 1) -> None:
        """Take `number` steps from the budget. Raises TemplateBudgetError."""
        self.steps -= number
        if self.steps < 0:
            self._extend()

    def make(self, num_bytes: int) -> None:
        """Take from the budget the bytes of a new value, and the steps for filling it. Raises
        TemplateBudgetError."""
        self.bytes -= num_bytes
        self.steps -= num_bytes >> 10
        if self.bytes < 0 or self.steps < 0:
            self._extend()

    def weigh(self, value: Any) -> int:
        """An upper bound of the bytes of `value` written as text. An item that occurs several times
        counts each time. Visiting the items takes steps from the budget. Raises
        TemplateBudgetError."""
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
    """The budget of the rendering in the current thread."""

    budget = TemplateBudget()


CURRENT = _Current()


def size_of(value: Any) -> int:
    """The bytes of a string, or of a container without its items; 0 for other values."""
    if isinstance(value, (str, bytes)):
        return sys.getsizeof(value)
    return len(value) * _ENTRY_BYTES if isinstance(value, (list, tuple, dict, set)) else 0


def _total_bytes(variables: Mapping[str, Any]) -> int:
    """The bytes of JSON data, including the references to entries."""
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
