"""Messages are sent in order, long ones in different turns of the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from quire.engine_client.process.outgoing_frames import MOST_BUFFERED_BYTES, OutgoingFrames


class FakeTransport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.num_buffered = 0
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def is_closing(self) -> bool:
        return self.is_closed


def run(test: Callable[[OutgoingFrames, Any], Any]) -> None:
    async def call() -> None:
        await test(OutgoingFrames(), FakeTransport())

    asyncio.run(call())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_messages_keep_their_order() -> None:
    async def test(outgoing: OutgoingFrames, transport: Any) -> None:
        outgoing.send(transport, b"0")
        assert transport.written == [b"0"]
        outgoing.send(transport, iter([b"1", b"2"]))
        outgoing.send(transport, b"3")
        outgoing.send(transport, iter([b"4"]))
        assert transport.written == [b"0", b"1"]
        await turns()
        assert transport.written == [b"0", b"1", b"2", b"3", b"4"]
        outgoing.send(transport, b"5")
        assert transport.written[-1] == b"5"

    run(test)


def test_no_message_is_encoded_while_many_bytes_wait() -> None:
    async def test(outgoing: OutgoingFrames, transport: Any) -> None:
        taken = []

        def frames() -> Iterator[bytes]:
            for number in range(3):
                taken.append(number)
                yield b"x"

        transport.num_buffered = MOST_BUFFERED_BYTES + 1
        outgoing.send(transport, frames())
        await turns()
        assert taken == []
        transport.num_buffered = 0
        while len(transport.written) < 3:
            await turns()
        outgoing.send(transport, iter([b"y", b"z"]))
        transport.is_closed = True
        await turns()
        outgoing.send(transport, b"z")
        assert transport.written == [*[b"x"] * 3, b"y"]

    run(test)
