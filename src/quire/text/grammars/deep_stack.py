"""Calls the grammar engine llguidance in a thread with a large stack, because it recurses deeply.

llguidance processes nested rules and schemas by recursion, and a stack overflow kills the process.
The bounds on clients' grammars keep the recursion below a tenth of this stack. The calling thread's
stack may be much smaller: 50 nested references can overflow 512 KiB.
"""

from collections.abc import Callable
from threading import Lock, Thread, stack_size
from typing import TypeVar

Result = TypeVar("Result")

STACK_BYTES = 32 << 20
"""Stack size; most of it is reserved but never used. glibc reuses up to 40 MiB of stacks for later
threads; a larger stack would be mapped again for each thread, which takes 3 ms."""

_lock = Lock()


class GrammarEngineFaultError(Exception):
    """llguidance has panicked, because of a bug in its code."""


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """Call `function` in a new thread and wait for it. Returns its result or raises its error.

    Raises GrammarEngineFaultError if Rust code panics.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again below, in the waiting thread
            errors.append(error)

    with _lock:  # the stack size applies to all threads that start meanwhile
        before = stack_size(STACK_BYTES)
        try:
            thread = Thread(target=call, name="grammar")
            thread.start()
        finally:
            stack_size(before)
    thread.join()
    if errors and type(errors[0]).__name__ == "PanicException":  # no module exports this class
        raise GrammarEngineFaultError(str(errors[0])) from errors[0]
    if errors:
        raise errors[0]
    return results[0]
