"""Ends the sequences whose adapter or content can't be read, and waits for those being read.

Used by `engine` between steps.
"""

from typing import Protocol

from quire.core.request import SequenceOutput
from quire.core.scheduling.residency import ItemSource, Residency
from quire.core.scheduling.scheduler import Scheduler, fail_item


class ReadItems(ItemSource, Protocol):
    """A source whose reads take time and may fail. Called from the engine's thread."""

    def pop_failed(self) -> dict[str, str]:
        """Items that could not be made ready since the last call: digest -> message."""
        ...

    def wait(self) -> None:
        """Wait briefly for an item that is being read, if there is one."""
        ...


class ItemWork:
    """The items of one kind (adapters or contents) in one engine.

    Invariant: a sequence that ended because its item could not be read has its output in `_ended`,
    until that is taken.
    """

    def __init__(
        self, scheduler: Scheduler, residency: Residency, source: ReadItems | None = None
    ) -> None:
        """residency: one of the scheduler's. source: None if the engine has no such items."""
        self._scheduler = scheduler
        self._residency = residency
        self._source = source
        self._ended: list[SequenceOutput] = []

    @property
    def has_ended(self) -> bool:
        """Whether `pop_ended` would return anything."""
        return bool(self._ended)

    def end_failed(self) -> None:
        """End all sequences that wait for an item which could not be read."""
        if self._source is not None:
            for digest, message in self._source.pop_failed().items():
                self._ended += fail_item(self._scheduler, digest, message)

    def pop_ended(self) -> list[SequenceOutput]:
        """Return the outputs of sequences that ended, because an item could not be read, since the
        last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Wait a little for an item, if sequences need one that is being read."""
        if self._source is not None and self._residency.num_reading:
            self._source.wait()
