"""Ordering keys: who goes first, and from the other end, who gives way.

A policy is a function from a sequence to a sort key, smaller first; it orders and does nothing
else. The scheduler reads it once, when a sequence enters, and breaks ties by arrival.
"""

from collections.abc import Callable

from quire.core.sequence import Sequence
from quire.errors import ConfigurationError

Policy = Callable[[Sequence], tuple[float, ...]]


def fcfs(sequence: Sequence) -> tuple[float, ...]:
    """First come, first served."""
    return ()


def priority(sequence: Sequence) -> tuple[float, ...]:
    """The smaller priority number first; first come, first served within one priority."""
    return (sequence.priority,)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def find_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigurationError with the names that there are."""
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigurationError(f"scheduling_policy is {name!r}, but must be one of {known}")
    return POLICIES[name]
