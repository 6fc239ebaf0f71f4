"""Loads the contents of prompts, such as image embeddings, before the steps that read them.

A row reads a content only in the steps that compute the positions of its span. So a content keeps
its slot while a plan is made whose chunks read it. Between two plans, another content may get the
slot. Sequences are planned by rank, so the first one always gets the contents that it reads next.
A chunk ends before the first content that is not ready. `running_set` owns the object.
"""

from quire.core.content_spans import spans_between
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.residency import Residency
from quire.core.sequence import Sequence


class ContentLoads:
    """The contents that the chunks of the coming plan read.

    Invariant: the contents in `_wanted` are in use; between two plans there are none.
    """

    def __init__(self, residency: Residency, builder: PlanBuilder) -> None:
        self.residency = residency
        self._builder = builder
        self._wanted: set[str] = set()

    def is_reading_at(self, sequence: Sequence, position: int) -> bool:
        """Whether the content at a position of the sequence is being read; False for a token."""
        spans = spans_between(sequence.content_spans, position, position + 1)
        return bool(spans) and self.residency.is_reading(spans[0].digest)

    def has_slot_at(self, sequence: Sequence, position: int) -> bool:
        """Whether the content at a position of the sequence has a slot or can get one; True for a
        token."""
        spans = spans_between(sequence.content_spans, position, position + 1)
        return not spans or self.residency.has_slot_for(spans[0].digest)

    def prepare(self, sequence: Sequence, first: int, num_wanted: int) -> int:
        """Number of the sequence's positions from `first` on, at most num_wanted, that the coming
        plan can compute.

        Also begins to read the contents of the remaining positions, if slots are available.
        """
        residency, end = self.residency, first + num_wanted
        for span in spans_between(sequence.content_spans, first, end):
            is_ready = False
            if residency.has_slot_for(span.digest):
                is_ready = residency.prepare(span.digest)
                if span.digest not in self._wanted:
                    residency.acquire(span.digest)
                    self._wanted.add(span.digest)
            if not is_ready:
                end = min(end, max(first, span.first_position))
        return end - first

    def load(self, sequence: Sequence, first: int, end: int) -> None:
        """Let the coming plan load the contents of the positions from `first` to `end`; the caller
        has prepared them."""
        for span in spans_between(sequence.content_spans, first, end):
            load = self.residency.take_load(span.digest)
            if load is not None:
                self._builder.content_loads.append(load)

    def end_plan(self) -> None:
        """Release the contents, since the plan's chunks are complete. From here on, other contents
        may get their slots."""
        for digest in self._wanted:
            self.residency.release(digest)
        self._wanted.clear()
