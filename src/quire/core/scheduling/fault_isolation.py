"""Finds the sequence that makes steps fail, by running each suspect alone.

The failure of a whole step does not reveal the sequence that caused it. This module finds the
faulty sequence within one engine; `engine_client.failover` finds the request that kills a whole
engine process. Only `scheduler` uses it.
"""

from collections.abc import Iterable

from quire.core.sequence import Sequence


class FaultIsolation:
    """Sequences that were in a failed step and have not sampled since, in the policy's order.

    While there are suspects, the scheduler runs the first of them alone, until it samples or its
    step fails too. So no sequence is ended for the fault of another.
    """

    def __init__(self) -> None:
        self._untried: list[Sequence] = []

    def next_suspect(self) -> Sequence | None:
        """The sequence to run alone next; None if there is no suspect."""
        while self._untried and self._untried[0].is_finished:
            del self._untried[0]
        return self._untried[0] if self._untried else None

    def clear(self, sampled: Iterable[Sequence]) -> None:
        """Remove from the suspects the sequences that have sampled since the failed step."""
        cleared = set(sampled)
        self._untried = [suspect for suspect in self._untried if suspect not in cleared]

    def blame(self, in_flight: set[Sequence]) -> Sequence | None:
        """The sequence to end after a step failed: the suspect that ran alone in it.

        If there is none, return None, and make all sequences of the steps in flight suspects.
        """
        live = [sequence for sequence in in_flight if not sequence.is_finished]
        if len(in_flight) == 1 and live and live[0] in self._untried:
            return live[0]
        self._untried = sorted({*self._untried, *live}, key=lambda sequence: sequence.rank)
        return None
