"""Checks, keeps and encodes the contents of requests, such as images, in one engine.

A request must bring the contents that its spans name. They stay open while it runs, and the encoder
works between steps. Used by `engine`.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Protocol

from quire.core.content_spans import Content
from quire.core.request import Request
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.item_work import ItemWork, ReadItems
from quire.errors import InvalidRequestError

VALUE_BYTES = 4
"""Bytes of one value of a content; values are fp32."""


class StoredContents(ReadItems, Protocol):
    """The source of contents: `runtime.contents.content_store` encodes them."""

    #: Whether the model computes all positions of a content in one step.
    in_one_step: bool

    def check(self, content: Content) -> int:
        """Number of positions that the content takes in a prompt.

        Raises InvalidRequestError for a shape or grid that the model's encoder can't read, and if
        its digest is open for another content.
        """
        ...

    def span_grid(self, content: Content) -> tuple[int, int, int] | None:
        """Frames, rows and columns of the content's embeddings; None if the model's rotary
        positions have one axis. `check` has accepted the content."""
        ...

    def open(self, contents: Collection[Content]) -> None:
        """Keep the inputs of each content until `close` was called for it as often as `open`."""
        ...

    def close(self, digests: Collection[str]) -> None:
        """Undo one call of `open` for each of these contents."""
        ...

    def advance(self, limit_s: float) -> None:
        """Spend about limit_s seconds on encoding contents that sequences wait for, if any."""
        ...

    def counts(self) -> Mapping[str, float]:
        """Numbers of contents that were encoded and found in the cache, the seconds of encoding,
        and the bytes of the cache, by name."""
        ...


class ContentWork(ItemWork):
    """The contents of one engine.

    Invariant: the contents of each request that has not ended are open in the store.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: StoredContents | None = None,
        *,
        simulated: ReadItems | None = None,
    ) -> None:
        """store: None if the model takes no contents. simulated: the source of contents that have
        no inputs, instead of a store."""
        super().__init__(scheduler, scheduler.contents, store or simulated)
        self._store = store
        self._open: dict[str, tuple[str, ...]] = {}  # digests by request

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError unless the request's contents are those that its spans name,
        in shapes that the encoder reads."""
        # First, compare the digests. `content_spans.check_content_spans` has checked the spans.
        store, named = self._store, {span.digest for span in request.content_spans}
        if store is None or not (named or request.contents):
            return
        given = {content.digest: content for content in request.contents}
        if len(given) < len(request.contents) or given.keys() != named:
            raise InvalidRequestError(
                f"the prompt's spans name {len(named)} contents, but the request brings"
                f" {len(request.contents)}, which must be the same, each once",
                "prompt",
            )
        # Then compare the sizes.
        for content in request.contents:
            num_values = prod(content.shape)
            if num_values < 1 or len(content.values) != VALUE_BYTES * num_values:
                raise InvalidRequestError(
                    f"a content of the shape {list(content.shape)} has {len(content.values)} bytes,"
                    f" but must have {VALUE_BYTES * num_values}",
                    "prompt",
                )
        counts = {digest: store.check(content) for digest, content in given.items()}
        for span in request.content_spans:
            if span.num_tokens != counts[span.digest]:
                raise InvalidRequestError(
                    f"{span} has {span.num_tokens} positions, but the model's encoder makes"
                    f" {counts[span.digest]} of this content",
                    "prompt",
                )
            grid = store.span_grid(given[span.digest])
            if grid is not None and span.grid != grid:
                raise InvalidRequestError(
                    f"{span} has the grid {span.grid}, but the model's encoder makes a grid of"
                    f" {grid} of this content",
                    "prompt",
                )

    def marked(self, request: Request) -> Request:
        """The request with spans that say whether the model computes them in one step each."""
        if self._store is None or not request.content_spans:
            return request
        whole = self._store.in_one_step
        spans = tuple(span._replace(in_one_step=whole) for span in request.content_spans)
        return replace(request, content_spans=spans)

    def open(self, request: Request) -> None:
        """Keep the contents of an accepted request, until `close`."""
        if self._store is not None and request.contents:
            self._store.open(request.contents)
            self._open[request.request_id] = tuple(each.digest for each in request.contents)

    def close(self, request_id: str) -> None:
        """Forget the contents of a request that has ended."""
        digests = self._open.pop(request_id, ())
        if self._store is not None and digests:
            self._store.close(digests)

    @property
    def is_encoding(self) -> bool:
        """Whether sequences wait for contents that the store encodes."""
        return self._store is not None and self._residency.num_reading > 0

    def advance(self, limit_s: float) -> None:
        """After a step, encode contents that sequences wait for, for about limit_s seconds."""
        if self._store is not None and self.is_encoding:
            self._store.advance(limit_s)

    def counts(self) -> dict[str, float]:
        """The counts of contents for `EngineStats`; empty if the model takes no contents."""
        if self._store is None:
            return {}
        return {"num_waiting": self._residency.num_reading, **self._store.counts()}
