"""Calls the grammar engine on a stack that its recursion does not fill.

llguidance follows rules that stand in rules, and schemas in schemas, by recursion, and a stack that
overflows ends the process. The bounds on what callers write keep it to less than a tenth of this
stack, but a thread may have any size of its own (512 KiB, say), of which 50 references are enough.
"""

from collections.abc import Callable
from threading import Lock, Thread, stack_size
from typing import TypeVar

Result = TypeVar("Result")

STACK_BYTES = 32 << 20
"""Reserved, not used, memory. glibc keeps up to 40 MiB of stacks for the next thread: a larger one
is mapped anew each time, which was measured at 3 ms."""

_lock = Lock()


class GrammarEngineFaultError(Exception):
    """llguidance has met a case that its authors held to be impossible."""


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """What `function` returns or raises, called in a thread of its own; waits for it.

    Raises GrammarEngineFaultError in place of what extensions in Rust raise when they panic.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again below, for who waits
            errors.append(error)

    with _lock:  # the size holds for whatever thread starts next
        before = stack_size(STACK_BYTES)
        try:
            thread = Thread(target=call, name="grammar")
            thread.start()
        finally:
            stack_size(before)
    thread.join()
    if errors and type(errors[0]).__name__ == "PanicException":  # no module has it
        raise GrammarEngineFaultError(str(errors[0])) from errors[0]
    if errors:
        raise errors[0]
    return results[0]
