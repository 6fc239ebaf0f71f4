"""Calls the grammar engine on a stack that its recursion can't overflow.

llguidance processes nested rules and schemas by recursion, and a stack overflow ends the process.
The bounds on callers' grammars keep the recursion below a tenth of this stack. A thread's own stack
may be much smaller: 50 nested references can overflow 512 KiB.
"""

from collections.abc import Callable
from threading import Lock, Thread, stack_size
from typing import TypeVar

Result = TypeVar("Result")

STACK_BYTES = 32 << 20
"""Stack size, reserved and mostly unused. glibc caches up to 40 MiB of stacks for later threads; a
larger stack would be mapped anew each time, which takes 3 ms."""

_lock = Lock()


class GrammarEngineFaultError(Exception):
    """llguidance has panicked: a case occurred that its code excludes."""


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """Call `function` in a new thread, wait for it, and return its result or raise its error.

    Raises GrammarEngineFaultError if an extension in Rust panics.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again below, in the waiting thread
            errors.append(error)

    with _lock:  # the stack size applies to any thread that is started next
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
