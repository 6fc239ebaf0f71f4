"""Tests of which models are in memory, with loaders that only count within a budget of bytes."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.virtual_loop import run_virtually

from quire.engine_client.recovery import EngineState
from quire.errors import ConfigurationError, EngineDeadError, OverloadedError
from quire.server import hosted_model, model_room
from quire.server.hosted_model import HostedModel, ModelLoadError, NoRoomError, Phase
from quire.server.model_room import ModelRoom

WAIT_S = 10


class Loader:
    """Loads a model of some bytes without a process. `events` is shared by all loaders."""

    def __init__(self, name, num_bytes, events):
        self.name, self.num_bytes, self.events = name, num_bytes, events
        self.taken_bytes = num_bytes
        self.errors = []
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def prepare(self):
        await asyncio.sleep(0)
        return self.num_bytes

    async def load(self, service):
        self.events.append(("load", self.name))
        await self.may_load.wait()
        if self.errors:
            raise self.errors.pop(0)
        facts = {"weight_bytes": self.taken_bytes}
        engine = SimpleNamespace(
            engines_by_name={"": SimpleNamespace(facts=facts)}, state=EngineState.READY
        )
        return service or SimpleNamespace(engine=engine, name=self.name)

    async def unload(self, service, mode, wait_s):
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(0)
        self.events.append(("unload", self.name))

    async def discard(self, service):
        self.events.append(("discard", self.name))


class World:
    """A room for models with the given bytes."""

    def __init__(self, budget, wait_s=WAIT_S, max_waiting=100, pinned=(), **sizes):
        self.events = []
        self.models = {
            name: HostedModel((name,), Loader(name, size, self.events), name in pinned)
            for name, size in sizes.items()
        }
        self.room = ModelRoom(list(self.models.values()), budget, wait_s, max_waiting)

    def call(self, name, **how):
        return asyncio.create_task(self.room.enter(self.models[name], **how))

    async def one_call(self, name):
        await self.room.enter(self.models[name])
        self.room.leave(self.models[name])

    def loaded(self):
        return {name for name, each in self.models.items() if each.phase is Phase.LOADED}


def run(scenario):
    """Run a scenario; afterwards no model may have calls or waiting calls."""

    async def main():
        async with asyncio.timeout(WAIT_S):
            world = await scenario()
        for model in world.models.values():
            assert (model.num_calls, list(model.waiting)) == (0, []), model.name
            assert (model.reserved_bytes == 0) == (model.phase is Phase.UNLOADED), model.name
        await world.room.close()

    run_virtually(main())


def test_a_model_is_loaded_by_its_first_call_alone():
    async def scenario():
        world = World(10, a=4, b=4)
        assert not world.room.try_enter(world.models["a"])
        await asyncio.gather(*[world.one_call("a") for _ in range(5)])
        assert world.events == [("load", "a")]
        assert world.room.reserved_bytes == 4
        assert world.room.try_enter(world.models["a"])
        world.room.leave(world.models["a"])
        return world

    run(scenario)


def test_the_model_used_least_recently_is_unloaded_for_one_that_does_not_fit():
    async def scenario():
        world = World(10, a=4, b=4, c=4)
        for name in ("a", "b", "a", "c"):
            await world.one_call(name)
        assert world.events == [("load", "a"), ("load", "b"), ("unload", "b"), ("load", "c")]
        assert world.loaded() == {"a", "c"}
        return world

    run(scenario)


def test_an_unload_waits_for_one_under_way():
    async def scenario():
        world = World(budget=10, a=10, b=10)
        await world.one_call("a")
        call = world.call("b")
        while world.models["a"].phase is not Phase.UNLOADING:
            await asyncio.sleep(0)
        await world.room.unload(world.models["a"], "abort")
        assert world.models["a"].phase is Phase.UNLOADED
        await call
        world.room.leave(world.models["b"])
        return world

    run(scenario)


def test_a_model_in_use_is_not_unloaded_and_gets_no_new_calls_after_a_while(monkeypatch):
    monkeypatch.setattr(model_room, "PATIENCE_S", 0.05)

    async def scenario():
        world = World(6, a=4, b=4)
        await world.room.enter(world.models["a"])
        waiting = world.call("b")
        await asyncio.sleep(0.01)
        assert world.room.try_enter(world.models["a"])  # patience is not over
        world.room.leave(world.models["a"])
        await asyncio.sleep(0.1)
        assert not world.room.try_enter(world.models["a"])
        late = world.call("a")
        await asyncio.sleep(0.05)
        assert (world.loaded(), late.done(), waiting.done()) == ({"a"}, False, False)
        world.room.leave(world.models["a"])  # the last answer of `a` ends
        await waiting
        assert world.loaded() == {"b"}
        world.room.leave(world.models["b"])
        await late
        world.room.leave(world.models["a"])
        assert [name for what, name in world.events if what == "load"] == ["a", "b", "a"]
        return world

    run(scenario)


def test_calls_of_batches_take_no_memory_from_models_in_use(monkeypatch):
    monkeypatch.setattr(model_room, "REST_S", 0.0)
    monkeypatch.setattr(model_room, "PATIENCE_S", 0.0)

    async def scenario():
        world = World(6, a=4, b=4, c=2)
        await world.room.enter(world.models["a"])
        of_batch = world.call("b", is_background=True)
        await asyncio.sleep(0.02)
        assert world.models["a"].takes_calls
        await world.one_call("c")  # the batch's model does not hold up another that fits
        world.room.leave(world.models["a"])
        await of_batch
        world.room.leave(world.models["b"])
        return world

    run(scenario)


def test_calls_of_batches_take_no_memory_from_models_that_were_just_used(monkeypatch):
    monkeypatch.setattr(model_room, "REST_S", 0.05)

    async def scenario():
        world = World(6, a=4, b=4, c=4)
        await world.one_call("a")
        waiting = world.call("b", is_background=True)
        for _ in range(3):  # live calls with pauses between them
            await asyncio.sleep(0.02)
            assert world.loaded() == {"a"}
            await world.one_call("a")
        await waiting
        assert world.events == [("load", "a"), ("unload", "a"), ("load", "b")]
        world.room.leave(world.models["b"], is_background=True)
        before_s = asyncio.get_running_loop().time()
        await world.room.enter(world.models["c"], is_background=True)  # batches take turns at once
        assert asyncio.get_running_loop().time() - before_s < model_room.REST_S
        world.room.leave(world.models["c"], is_background=True)
        return world

    run(scenario)


def test_a_call_is_refused_after_its_time_and_its_model_loses_its_turn(monkeypatch):
    monkeypatch.setattr(model_room, "PATIENCE_S", 0.0)

    async def scenario():
        world = World(6, wait_s=0.05, a=4, b=4)
        await world.room.enter(world.models["a"])
        with pytest.raises(NoRoomError, match="'b' is not in memory, and others were in") as caught:
            await world.room.enter(world.models["b"])
        assert (caught.value.http_status, caught.value.retry_after_s) == (503, 5.0)
        assert world.room.try_enter(world.models["a"])  # it takes calls again
        for _ in range(2):
            world.room.leave(world.models["a"])
        return world

    run(scenario)


def test_a_call_whose_model_is_being_loaded_is_not_refused():
    async def scenario():
        world = World(6, wait_s=0.02, a=4)
        world.models["a"].loader.may_load.clear()
        call = world.call("a")
        await asyncio.sleep(0.06)
        world.models["a"].loader.may_load.set()
        await call
        world.room.leave(world.models["a"])
        return world

    run(scenario)


@pytest.mark.parametrize("moment", ["queued", "loading", "admitted"])
def test_a_cancelled_call_is_not_counted(moment):
    async def scenario():
        world = World(6, a=4, b=4)
        if moment == "queued":
            await world.room.enter(world.models["b"])
        world.models["a"].loader.may_load.clear()
        call = world.call("a")
        await asyncio.sleep(0.01)
        if moment == "admitted":
            world.models["a"].loader.may_load.set()
            while not world.models["a"].num_calls:
                await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert world.models["a"].num_calls == 0
        world.models["a"].loader.may_load.set()
        if moment == "queued":
            world.room.leave(world.models["b"])
        await world.one_call("a")
        return world

    run(scenario)


def test_a_model_that_fails_to_load_fails_alone_and_is_tried_again_later(monkeypatch):
    monkeypatch.setattr(hosted_model, "FIRST_BACKOFF_S", 0.05)

    async def scenario():
        world = World(10, a=4, b=4)
        world.models["a"].loader.errors = [ConfigurationError("no config.json"), OSError("gone")]
        calls = [world.call("a") for _ in range(3)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert {str(each) for each in found} == {
            "the model 'a' could not be loaded: no config.json"
        }
        assert all(isinstance(each, ModelLoadError) for each in found)
        assert found[0].retry_after_s == 0.05
        with pytest.raises(ModelLoadError, match="no config"):  # it is not tried again yet
            await world.room.enter(world.models["a"])
        assert world.events == [("load", "a")]
        assert world.models["a"].state == "failed"
        await world.one_call("b")
        await asyncio.sleep(0.06)
        with pytest.raises(ModelLoadError, match=r"the server failed \(OSError\)"):
            await world.room.enter(world.models["a"])
        assert world.models["a"].failure.backoff_s == 0.1  # twice the first
        await asyncio.sleep(0.11)
        await world.one_call("a")
        assert (world.models["a"].failure, world.models["a"].state) == (None, "loaded")
        return world

    run(scenario)


def test_a_model_that_can_never_fit_is_refused_with_both_sizes():
    async def scenario():
        world = World(10 << 20, pinned=("a",), a=4 << 20, b=8 << 20)
        await world.one_call("a")
        text = "it takes 8.0 MiB, but models_memory is 10.0 MiB, 4.0 MiB of which pinned models"
        with pytest.raises(ModelLoadError, match=text):
            await world.room.enter(world.models["b"])
        assert world.loaded() == {"a"}
        return world

    run(scenario)


def test_pinned_models_are_loaded_first_and_never_unloaded():
    async def scenario():
        world = World(10, pinned=("a",), a=4, b=4, c=4)
        world.room.load_pinned()
        for name in ("b", "c", "b"):
            await world.one_call(name)
        assert ("unload", "a") not in world.events
        assert world.loaded() == {"a", "b"}
        return world

    run(scenario)


def test_a_pinned_model_is_loaded_later_if_calls_took_its_memory_first(monkeypatch):
    monkeypatch.setattr(model_room, "PATIENCE_S", 0.0)
    monkeypatch.setattr(NoRoomError, "retry_after_s", 0.01)

    async def scenario():
        world = World(6, wait_s=0.02, pinned=("a",), a=4, b=4)
        await world.room.enter(world.models["b"])
        world.room.load_pinned()
        await asyncio.sleep(0.05)  # its first wait is over
        assert world.loaded() == {"b"}
        world.room.leave(world.models["b"])
        while world.loaded() != {"a"}:
            await asyncio.sleep(0.001)
        return world

    run(scenario)


def test_only_so_many_calls_wait():
    async def scenario():
        world = World(4, max_waiting=2, a=4)
        world.models["a"].loader.may_load.clear()
        calls = [world.call("a") for _ in range(2)]
        # Calls that come before the model's files were read count, too.
        for moment_s in (0, 0.01):
            await asyncio.sleep(moment_s)
            with pytest.raises(OverloadedError, match="too many calls wait"):
                await world.room.enter(world.models["a"])
        world.models["a"].loader.may_load.set()
        await asyncio.gather(*calls)
        for _ in calls:
            world.room.leave(world.models["a"])
        return world

    run(scenario)


def test_a_model_that_takes_more_than_expected_makes_others_leave():
    async def scenario():
        world = World(10, a=4, b=4)
        await world.one_call("a")
        world.models["b"].loader.taken_bytes = 9
        await world.one_call("b")
        while world.models["a"].phase is not Phase.UNLOADED:
            await asyncio.sleep(0)
        assert world.models["b"].needed_bytes == world.room.reserved_bytes == 9
        return world

    run(scenario)


def test_an_engine_that_cannot_sleep_is_ended_and_started_anew():
    async def scenario():
        world = World(6, a=4, b=4)
        await world.one_call("a")
        world.models["a"].loader.errors = [EngineDeadError("it is being restarted")]
        await world.one_call("b")
        assert ("discard", "a") in world.events
        assert world.models["a"].service is None
        await world.one_call("a")
        return world

    run(scenario)


@pytest.mark.parametrize("num_bugs", [1, 2])
def test_a_bug_while_a_model_is_unloaded_leaves_its_memory_to_others(num_bugs):
    async def scenario():
        world = World(6, a=4, b=4)
        await world.one_call("a")
        loader = world.models["a"].loader
        loader.errors = [OSError("no file") for _ in range(num_bugs)]

        async def discard(service):
            world.events.append(("discard", "a"))
            if loader.errors:
                raise loader.errors.pop()

        loader.discard = discard
        await world.one_call("b")
        assert world.events == [("load", "a"), ("discard", "a"), ("load", "b")]
        await world.one_call("a")
        return world

    run(scenario)


def test_a_model_whose_engine_has_failed_for_good_leaves_the_others_alone():
    async def scenario():
        world = World(10, a=4, b=4)
        await world.room.enter(world.models["a"])
        await world.room.enter(world.models["b"])
        model = world.models["a"]
        world.room.on_failed(model, model.service, EngineDeadError("it died six times"))
        while model.phase is not Phase.UNLOADED:
            await asyncio.sleep(0)
        with pytest.raises(ModelLoadError, match="it died six times"):
            await world.room.enter(model)
        assert world.models["b"].num_calls == 1
        assert world.loaded() == {"b"}
        world.room.leave(model)
        world.room.leave(world.models["b"])
        return world

    run(scenario)


def test_many_calls_of_three_models_in_room_for_one_and_a_half_are_all_answered(monkeypatch):
    monkeypatch.setattr(model_room, "PATIENCE_S", 0.002)

    async def scenario():
        world = World(6, max_waiting=300, a=4, b=4, c=3)
        num_answered = 0

        async def call(number):
            nonlocal num_answered
            model = world.models["abc"[number % 7 % 3]]
            await asyncio.sleep(number % 11 * 0.003)
            await world.room.enter(model)
            assert model.phase is Phase.LOADED
            assert world.room.reserved_bytes <= 6
            await asyncio.sleep(number % 5 * 0.001)
            assert model.phase is Phase.LOADED  # not unloaded meanwhile
            world.room.leave(model)
            num_answered += 1

        await asyncio.gather(*[call(number) for number in range(300)])
        assert num_answered == 300
        assert world.models["a"].num_unloads + world.models["b"].num_unloads >= 2
        return world

    run(scenario)
