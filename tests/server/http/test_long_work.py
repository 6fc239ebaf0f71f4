"""Long work leaves others their turns, is done in order, and is closed however it ends."""

import asyncio
import threading
from contextlib import aclosing

import pytest
from tests.server.working import StepClock

from quire.server.http import long_work
from quire.server.http.long_work import FIRST_PIECE_S, PIECE_S, WorkPieces, call_for_text

STEPS_OF_FIRST = round(FIRST_PIECE_S * 1e3)
STEPS_OF_PIECE = round(PIECE_S * 1e3)


class Log:
    """The steps of all work, with a mark for each turn of the loop."""

    def __init__(self):
        self.seen = []
        self.closed = []

    def work(self, name, num_steps):
        try:
            for _ in range(num_steps):
                self.seen.append(name)
                yield
            return f"{name} is done"
        finally:
            self.closed.append(name)

    def parts(self, name, num_steps, size=1):
        try:
            for step in range(num_steps):
                self.seen.append(name)
                yield b"" if step % 2 else b"%d," % step * size
        finally:
            self.closed.append(name)

    async def mark_turns(self):
        while True:
            self.seen.append("|")
            await asyncio.sleep(0)

    @property
    def turns(self):
        return ["".join(turn) for turn in "".join(self.seen).split("|") if turn]


def play(log, *works, is_long=False):
    """Run each work beside the others and a task that only counts turns of the loop."""

    async def run():
        pieces = WorkPieces(StepClock())
        marks = asyncio.create_task(log.mark_turns())
        try:
            return await asyncio.gather(*(pieces.run(work, is_long=is_long) for work in works))
        finally:
            marks.cancel()

    return asyncio.run(run())


def test_short_work_is_done_at_once():
    log = Log()
    assert play(log, log.work("a", STEPS_OF_FIRST - 1)) == ["a is done"]
    assert log.turns == ["a" * (STEPS_OF_FIRST - 1)]


def test_between_two_turns_of_the_loop_there_is_one_piece():
    log = Log()
    assert play(log, log.work("a", 33)) == ["a is done"]
    assert max(map(len, log.turns)) <= STEPS_OF_PIECE + STEPS_OF_FIRST
    assert max(map(len, log.turns[1:])) <= STEPS_OF_PIECE
    assert sum(map(len, log.turns)) == 33


def test_one_piece_of_work_runs_per_turn_and_all_work_is_done():
    log = Log()
    names = "abcdefgh"
    found = play(log, *(log.work(name, 40) for name in names))
    assert found == [f"{name} is done" for name in names]
    beginning, *later = log.turns
    assert len(beginning) <= len(names) * STEPS_OF_FIRST + STEPS_OF_PIECE
    assert all(len(set(turn)) == 1 and len(turn) <= STEPS_OF_PIECE for turn in later)
    order = [turn[0] for turn in later]
    for at in range(len(names), 3 * len(names)):  # none twice before all have had a turn
        assert len(set(order[at - len(names) : at])) == len(names)


def test_work_that_is_known_to_be_long_waits_for_its_first_turn():
    log = Log()
    names = "abcdef"
    found = play(log, *(log.work(name, 2) for name in names), is_long=True)
    assert found == [f"{name} is done" for name in names]
    assert all(len(turn) <= STEPS_OF_PIECE for turn in log.turns) and len(log.turns) == len(names)


def test_exceptions_of_work_are_raised():
    def fail():
        yield
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        play(Log(), fail())


def test_abandoned_work_is_closed_and_takes_no_turn():
    log = Log()

    async def run():
        pieces = WorkPieces(StepClock())
        tasks = [asyncio.create_task(pieces.run(log.work(name, 10**9))) for name in "ab"]
        last = asyncio.create_task(pieces.run(log.work("c", 100)))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return await last

    assert asyncio.run(run()) == "c is done"
    assert sorted(log.closed) == ["a", "b", "c"]


def test_parts_are_joined_and_none_is_empty():
    log = Log()

    async def run():
        return [part async for part in WorkPieces(StepClock()).join(log.parts("a", 50))]

    found = asyncio.run(run())
    assert b"".join(found) == b"".join(b"%d," % step for step in range(0, 50, 2))
    assert all(found)
    assert max(part.count(b",") for part in found) <= STEPS_OF_PIECE


def test_no_piece_is_made_before_it_is_taken():
    log = Log()

    async def run():
        async with aclosing(WorkPieces(StepClock()).join(log.parts("a", 10**9))) as parts:
            async for _ in parts:
                before = len(log.seen)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert len(log.seen) == before
                break

    asyncio.run(run())
    assert log.closed == ["a"]


def test_a_consumer_that_takes_no_parts_delays_no_other():
    log = Log()

    async def run():
        pieces = WorkPieces(StepClock())
        parts = pieces.join(log.parts("a", 1000))
        await anext(parts)
        await anext(parts)  # from now on it waits for a reader
        done = await pieces.run(log.work("b", 1000))
        await parts.aclose()
        return done

    assert asyncio.run(run()) == "b is done"


@pytest.mark.parametrize(("num_characters", "in_thread"), [(9, False), (10, True)])
def test_long_texts_are_worked_on_beside_the_loop(monkeypatch, num_characters, in_thread):
    monkeypatch.setattr(long_work, "LONG_TEXT_CHARACTERS", 10)
    thread = asyncio.run(call_for_text(num_characters, threading.current_thread))
    assert (thread is not threading.current_thread()) == in_thread


def test_errors_come_out_of_the_thread():
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(call_for_text(10**6, int, "x"))
