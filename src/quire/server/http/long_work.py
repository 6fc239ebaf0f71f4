"""Does long work without delaying other calls: in pieces on the event loop, or in threads.

Work in pieces is a generator that yields wherever it may pause, at least once per millisecond.
Threads would not help with most of this work, since a call in C holds the GIL until it returns.
Used for all work that grows with a call's size: parsing bodies, making requests, writing answers.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import closing
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

LONG_TEXT_CHARACTERS = 8192
"""Longer texts are tokenized in a thread, so that other streams continue meanwhile."""

FIRST_PIECE_S = 0.002
"""Work that takes less time than this runs at once, even while other long work waits."""

PIECE_S = 0.005


class WorkPieces:
    """Does the long work of many calls in pieces: one piece of one call's work in each turn of the
    event loop.

    Calls take turns, first come, first served. Invariant: in one turn of the loop, all work
    together takes at most PIECE_S, plus FIRST_PIECE_S for each work that begins without `is_long`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._turn = asyncio.Lock()

    async def run(self, work: Generator[None, None, T], *, is_long: bool = False) -> T:
        """Run `work` to its end and return its result. Cancelling this closes `work`.

        With `is_long`, even the first piece waits for its turn, since many calls with long work may
        arrive at once.
        """
        results: list[T] = []

        def keep_result() -> Generator[None, None, None]:
            results.append((yield from work))

        with closing(keep_result()) as pieces:
            has_more = is_long or self._advance(pieces, FIRST_PIECE_S, [])
            while has_more:
                has_more = await self._run_piece(pieces, [])
        return results[0]

    async def join(self, work: Generator[bytes, None, None]) -> AsyncGenerator[bytes, None]:
        """Join the parts that `work` yields into fewer, longer parts, none of them empty. `work` is
        advanced only when the consumer asks for the next part."""
        with closing(work):
            made: list[bytes] = []
            has_more = self._advance(work, FIRST_PIECE_S, made)
            while True:
                if part := b"".join(made):
                    yield part
                if not has_more:
                    return
                made = []
                has_more = await self._run_piece(work, made)

    async def _run_piece(self, work: Iterable[Any], made: list[Any]) -> bool:
        async with self._turn:
            has_more = self._advance(work, PIECE_S, made)
            await asyncio.sleep(0)  # hold the turn until the event loop's next turn
        return has_more

    def _advance(self, work: Iterable[Any], seconds: float, made: list[Any]) -> bool:
        """Advance `work` for this many seconds, or to its end; returns whether work is left."""
        end_s = self._clock() + seconds
        for part in work:
            if part is not None:
                made.append(part)
            if self._clock() >= end_s:
                return True
        return False


async def call_for_text(
    num_characters: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call a function whose time grows with the length of a text: in a thread if it is long."""
    if num_characters < LONG_TEXT_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
