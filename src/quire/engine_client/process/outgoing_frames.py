"""Sends messages to an engine process in order, long ones in pieces."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

Frame: TypeAlias = bytes | Iterator[bytes]
"""An encoded message, or several that are encoded one by one when they are sent."""

MOST_BUFFERED_BYTES = 256 << 10
"""Unsent bytes above which no further message of an iterator is encoded."""

_RETRY_S = 0.002


class OutgoingFrames:
    """The messages to one process that were not sent yet.

    Copying a message of 50 MB, such as the pixels of an image, would stall the event loop, so the
    messages of an iterator are written in different turns of the loop. Invariant: while the queue
    is not empty, one call of `_write` is pending.
    """

    def __init__(self) -> None:
        self._queue: deque[Iterator[bytes]] = deque()

    def send(self, transport: asyncio.WriteTransport, frame: Frame) -> None:
        """Send messages after those that were given before. Has no effect once the transport is
        closing."""
        if transport.is_closing():
            self._queue.clear()
        elif isinstance(frame, bytes) and not self._queue:
            transport.write(frame)
        else:
            self._queue.append(iter((frame,)) if isinstance(frame, bytes) else frame)
            if len(self._queue) == 1:
                self._write(transport)

    def _write(self, transport: asyncio.WriteTransport) -> None:
        loop = asyncio.get_running_loop()
        if transport.is_closing():
            self._queue.clear()
            return
        if transport.get_write_buffer_size() > MOST_BUFFERED_BYTES:
            loop.call_later(_RETRY_S, self._write, transport)
            return
        while self._queue:
            frame = next(self._queue[0], None)
            if frame is not None:
                transport.write(frame)
                loop.call_soon(self._write, transport)
                return
            self._queue.popleft()
