"""Answers of engines are shared by all listeners, asked for seldom, and sent as changes."""

import asyncio
import base64
import contextlib
import struct
from types import SimpleNamespace

import pytest

from quire.core.memory.block_records import RECORD_BYTES
from quire.engine_client.recovery import EngineState
from quire.errors import EngineDeadError, OverloadedError
from quire.server.stats import live_feed
from quire.server.stats.engine_view import MIN_INTERVAL_S, SHARE, Cursor, EngineView
from quire.server.stats.live_feed import MAX_LISTENERS, LiveFeed

NUM_BLOCKS = 600


class Engine:
    """Answers questions from what the test sets."""

    state, pid, num_restarts, name = EngineState.READY, 1, 0, ""

    def __init__(self):
        self.facts = {"dtype": "bfloat16", "secret": "x"}
        self.asked = []
        self.events = []
        self.first = 1000
        self.records = bytearray(RECORD_BYTES * NUM_BLOCKS)
        self.seconds = {}
        self.fails = False

    async def ask(self, question, timeout_s=10.0):
        self.asked.append(question.parts)
        if self.fails:
            raise EngineDeadError("gone")
        last = self.first + len(self.events)
        known = question.since - self.first
        events = self.events[known:] if 0 <= known <= len(self.events) else list(self.events)
        found = {"now_s": 1.0, "last_event": last, "events": events, "seconds": {}}
        parts = {"stats": {"n": len(self.asked)}, "requests": [], "memory": {}, "prefixes": []}
        parts["blocks"] = {"num_blocks": NUM_BLOCKS, "records": bytes(self.records)}
        for name in set(question.parts) - {"events"}:
            found[name], found["seconds"][name] = parts[name], self.seconds.get(name, 0.0)
        return found


def model(*engines):
    names = {str(at) if len(engines) > 1 else "": each for at, each in enumerate(engines)}
    overview = {name: {"num_open": 2} for name in names}
    fleet = SimpleNamespace(
        engines_by_name=names, engines=SimpleNamespace(overview=lambda: overview)
    )
    return SimpleNamespace(name="small", fleet=fleet)


def refreshed(view, engine, parts, now_s):
    asyncio.run(view.refresh(engine, parts, now_s))


def test_a_part_is_asked_for_again_only_when_it_is_due():
    engine, view = Engine(), EngineView()
    engine.seconds = {"memory": 0.01}
    for now_s in (0.0, MIN_INTERVAL_S / 2, MIN_INTERVAL_S, 0.01 / SHARE):
        refreshed(view, engine, ("stats", "memory"), now_s)
    both, first = ("stats", "memory"), ("stats",)
    assert engine.asked == [both, first, both]


def test_a_listener_gets_only_what_has_changed_since_its_last_look():
    engine, view, cursor = Engine(), EngineView(), Cursor()
    engine.events = [{"step_id": 0}, {"step_id": 1}]
    refreshed(view, engine, ("stats", "events"), 0.0)
    assert view.changes(cursor, ("stats", "events"))["events"] == engine.events
    unchanged = view.changes(cursor, ("stats", "events"))
    assert unchanged["events"] == [] and "stats" not in unchanged
    engine.events.append({"step_id": 2})
    refreshed(view, engine, ("stats", "events"), 1.0)
    changed = view.changes(cursor, ("stats", "events"))
    assert changed["events"] == [{"step_id": 2}] and changed["stats"] == {"n": 2}
    assert view.changes(Cursor(), ("events",))["events"] == engine.events


def test_events_of_a_new_process_replace_those_of_the_old():
    engine, view, cursor = Engine(), EngineView(), Cursor()
    engine.events = [{"step_id": 5}]
    refreshed(view, engine, ("events",), 0.0)
    view.changes(cursor, ("events",))
    engine.first, engine.events = 9000, [{"step_id": 0}]
    refreshed(view, engine, ("events",), 1.0)
    assert view.changes(cursor, ("events",))["events"] == [{"step_id": 0}]
    assert view.changes(Cursor(), ("events",))["events"] == [{"step_id": 0}]


def test_changed_blocks_rebuild_the_map():
    engine, view, cursor = Engine(), EngineView(), Cursor()
    refreshed(view, engine, ("blocks",), 0.0)
    first = view.changes(cursor, ("blocks",))["blocks"]
    rebuilt = bytearray(base64.b64decode(first["records"]))
    for block in (0, 255, 256, NUM_BLOCKS - 1):
        engine.records[block * RECORD_BYTES] = block % 250 + 1
    refreshed(view, engine, ("blocks",), 1.0)
    second = view.changes(cursor, ("blocks",))["blocks"]
    assert "records" not in second
    changes = base64.b64decode(second["changed"])
    assert len(changes) == 4 * (4 + RECORD_BYTES)
    for at in range(0, len(changes), 4 + RECORD_BYTES):
        (block,) = struct.unpack_from("<I", changes, at)
        start = block * RECORD_BYTES
        rebuilt[start : start + RECORD_BYTES] = changes[at + 4 : at + 4 + RECORD_BYTES]
    assert rebuilt == engine.records
    engine.records[:] = b"\x01" * len(engine.records)
    refreshed(view, engine, ("blocks",), 2.0)
    assert "records" in view.changes(cursor, ("blocks",))["blocks"]


def test_an_engine_that_does_not_answer_is_shown_with_its_last_numbers():
    engine, view = Engine(), EngineView()
    refreshed(view, engine, ("stats",), 0.0)
    engine.fails = True
    refreshed(view, engine, ("stats",), 1.0)
    found = view.changes(Cursor(), ("stats",))
    assert found["answers"] is False and found["stats"] == {"n": 1}


def test_a_snapshot_has_all_engines_and_leaves_those_alone_that_are_not_ready():
    ready, recovering = Engine(), Engine()
    recovering.state = EngineState.RECOVERING
    first, second = asyncio.run(LiveFeed().snapshot(model(ready, recovering), ("stats",)))
    assert first["answers"] and first["num_open"] == 2 and first["facts"] == {"dtype": "bfloat16"}
    assert second["state"] == "recovering" and not second["answers"] and not recovering.asked


def test_a_bounded_number_of_listeners_is_accepted_and_nothing_is_asked_after_the_last(
    monkeypatch,
):
    now_s = 0.0
    monkeypatch.setattr(live_feed, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def listen():
        nonlocal now_s
        feed, engine = LiveFeed(), Engine()
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for _ in range(MAX_LISTENERS):
                stream = feed.changes(model(engine), ("stats",), 0.01)
                streams.append(await stack.enter_async_context(contextlib.aclosing(stream)))
                await anext(streams[-1])
            assert feed.num_listeners == MAX_LISTENERS
            assert len(engine.asked) == 1, "the listeners share an answer"
            with pytest.raises(OverloadedError, match=f"{MAX_LISTENERS} streams"):
                await anext(feed.changes(model(engine), ("stats",), 0.01))
        assert feed.num_listeners == 0
        asked = len(engine.asked)
        now_s += 1.0  # an answer would be due
        await asyncio.sleep(0.05)
        assert len(engine.asked) == asked

    asyncio.run(listen())


def test_a_replica_that_is_removed_and_added_again_is_new_to_its_listeners():
    async def listen():
        feed, engine, listed = LiveFeed(), Engine(), model(Engine())
        listed.fleet.engines_by_name[""] = engine
        async with contextlib.aclosing(feed.changes(listed, ("stats",), 0.01)) as stream:
            await anext(stream)
            # Another listener looks while it is away, and it starts when it is back.
            await feed.refresh(model(Engine(), Engine()), ("stats",))
            engine.state = EngineState.RECOVERING
            (starting,) = await anext(stream)
            assert "facts" in starting and "stats" not in starting
            engine.state = EngineState.READY
            (found,) = await anext(stream)
            assert found["stats"] == {"n": 2}

    asyncio.run(listen())


def test_a_model_has_no_engines_while_it_is_not_in_memory_and_whole_ones_afterwards():
    async def watch():
        watched, engine = model(Engine()), Engine()
        fleet = watched.fleet
        stream = LiveFeed().changes(watched, ("stats",), 0.001)
        async with contextlib.aclosing(stream):
            assert (await anext(stream))[0]["stats"] == {"n": 1}
            watched.fleet = None
            assert await anext(stream) == []
            fleet.engines_by_name[""], watched.fleet = engine, fleet
            (again,) = await anext(stream)
        assert again["facts"] == {"dtype": "bfloat16"} and again["stats"] == {"n": 1}

    asyncio.run(watch())
