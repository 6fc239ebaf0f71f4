"""The outputs of one call's requests, on their way from the engine to whoever asked.

They are pulled (`async for`) or pushed (`attach`). A stream knows no process: the tokens of a
request that is resumed after a crash simply come later. Fed by `dispatcher`.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from quire.core.request import SequenceOutput
from quire.engine_client.recovery import OpenRequest
from quire.errors import QuireError


class StreamOwner(Protocol):
    """Who feeds the stream: `Dispatcher`."""

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """End a request, or one branch of it."""
        ...


class OutputSink(Protocol):
    """Where outputs are pushed to as they come. Neither method may raise or wait."""

    def on_output(self, output: SequenceOutput) -> None:
        """One output. The stream may be told to abort a branch, or to close, from in here."""
        ...

    def on_end(self, error: QuireError | None) -> None:
        """The last call: every branch has ended, or `error` ended the stream."""
        ...


class RequestStream:
    """The outputs of one or more requests, as they come. Use it with `async with`.

    Ends when every branch of every request has finished. Raises what ended a request early: its own
    error, or EngineDeadError. Invariant: outputs come in the order in which the engine made them;
    none comes after the end.
    """

    def __init__(self, owner: StreamOwner, requests: Iterable[OpenRequest]) -> None:
        self._owner = owner
        self._open = {one.request_id: one for one in requests}
        self._outputs: deque[SequenceOutput] = deque()
        self._sink: OutputSink | None = None
        self._error: QuireError | None = None
        self._is_over = False
        self._news = asyncio.Event()

    def attach(self, sink: OutputSink) -> None:
        """Push everything to `sink` from now on; at once after the stream was opened."""
        assert self._sink is None and not self._outputs, "outputs have come already"
        self._sink = sink

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequenceOutput:
        while not self._outputs:
            if self._error is not None:
                # One error may end many streams: each shows where it was raised here.
                raise self._error.with_traceback(None)
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_open(self) -> int:
        """Branches that still run."""
        return sum(len(one.branches) for one in self._open.values())

    @property
    def open_request_ids(self) -> set[str]:
        """Requests of which a branch still runs."""
        return set(self._open)

    def abort_branch(self, request_id: str, branch_index: int) -> None:
        """End one branch; no more of its outputs come. Nothing happens if it has ended."""
        if request_id in self._open:
            self._owner.abort(request_id, branch_index)

    def close(self) -> None:
        """Abort whatever is still running. May be called twice."""
        for request_id in list(self._open):
            self._owner.abort(request_id)
        self._outputs.clear()

    def push(self, output: SequenceOutput) -> None:
        """For the dispatcher: an output that its OpenRequest has taken in."""
        if output.finish_reason is not None:
            self._forget_ended(output.request_id)
        if self._is_over:
            return
        if self._sink is not None:
            self._sink.on_output(output)
        else:
            self._outputs.append(output)
            self._news.set()
        if not self._open:
            self._end(None)

    def settle(self, request_id: str) -> None:
        """For the dispatcher: branches of a request were aborted."""
        self._forget_ended(request_id)
        if not self._open:
            self._end(None)

    def fail(self, error: QuireError) -> None:
        """For the dispatcher: end the stream with `error`, after the outputs that have come."""
        self._end(error)

    def _forget_ended(self, request_id: str) -> None:
        one = self._open.get(request_id)
        if one is not None and not one.branches:
            del self._open[request_id]

    def _end(self, error: QuireError | None) -> None:
        if self._is_over:
            return
        self._is_over, self._error = True, error
        if self._sink is not None:
            self._sink.on_end(error)
        self._news.set()
