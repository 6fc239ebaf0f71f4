"""What a server leaves of its handlers of signals."""

import asyncio
import signal
from types import FrameType

from quire.server.signals import Stopper


def test_the_handlers_before_a_server_are_those_after_it() -> None:
    def own(number: int, frame: FrameType | None) -> None:
        raise AssertionError("no signal comes")

    async def serve() -> None:
        with Stopper():
            assert signal.getsignal(signal.SIGTERM) is not own

    before = signal.signal(signal.SIGTERM, own)
    try:
        asyncio.run(serve())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_server_that_may_be_interrupted_still_may_be_afterwards() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def serve() -> None:
        with Stopper():
            pass

    try:
        asyncio.run(serve())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
