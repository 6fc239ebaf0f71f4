"""How many engines there shall be; and a fleet that follows."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.test_fleet import QUICK, SLOW, generate, slots, tokens, until
from tests.engine_client.fleet_world import LIMITS, GivenSlots, LeastOpen

from quire.cluster import scaling
from quire.cluster.placement import RoutedPlacement
from quire.cluster.scaling import Autoscaler, ScalingConfig, ScalingRule
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.recovery import EngineState
from quire.errors import ConfigurationError
from quire.routing.policies.expected_ttft import ExpectedTTFT

pytestmark = pytest.mark.usefixtures("forked_engines")

CONFIG = ScalingConfig(1, 4, wait_s=1.0, up_after_s=2.0, down_after_s=10.0)


def loads(*waits: float, fill: float = 0.9) -> dict[str, dict[str, float]]:
    return {str(at): {"wait_s": wait, "fill": fill} for at, wait in enumerate(waits)}


def test_a_replica_is_added_when_the_shortest_wait_stays_too_long() -> None:
    rule = ScalingRule(CONFIG)
    assert rule.wanted(0, loads(3, 2), 2) == 2
    assert rule.wanted(1.9, loads(3, 2), 2) == 2
    assert rule.wanted(2.0, loads(3, 2), 2) == 3
    assert rule.wanted(2.5, loads(3, 2), 3) == 3, "the new one is not ready yet"
    assert rule.wanted(9, loads(3, 2, 0.5), 3) == 3, "one of them has room"


def test_a_replica_is_added_when_more_is_placed_than_runs_at_once() -> None:
    rule = ScalingRule(CONFIG)
    assert [rule.wanted(at, loads(0, fill=1.2), 1) for at in (0, 1, 2)] == [1, 1, 2]


def test_a_replica_is_removed_when_fewer_suffice_for_long() -> None:
    rule = ScalingRule(CONFIG)
    quiet = loads(0, 0, fill=0.35)
    assert [rule.wanted(at, quiet, 2) for at in (0, 9, 10, 11)] == [2, 2, 1, 2]
    assert rule.wanted(100, loads(0, fill=0.1), 1) == 1, "the last one stays"


def test_a_router_s_account_of_idle_engines_lets_them_go() -> None:
    """As in a server: the rule reads what the router reports."""
    facts = {"num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    placement = RoutedPlacement(ExpectedTTFT(), lambda: 0.0)
    for name in "abc":
        placement.add(name, LIMITS, facts)
    rule, num_engines = ScalingRule(CONFIG), 3
    for now_s in range(40):
        found = {name: placement.load_of(name) for name in "abc"[:num_engines]}
        num_engines = rule.wanted(now_s, found, num_engines)
    assert num_engines == 1
    requests = [Request(f"q{number}", [1, 2], DecodingParams(9)) for number in range(12)]
    for request in requests:
        assert placement.place(request) is not None
        placement.on_first_token(request.request_id)
    assert [placement.load_of(name)["fill"] for name in "abc"] == [1.0] * 3
    rule = ScalingRule(CONFIG)
    busy = {name: placement.load_of(name) for name in "abc"}
    assert [rule.wanted(now_s, busy, 3) for now_s in (0, 1, 2)] == [3, 3, 4]


class GivenEngines:
    """What `Autoscaler` sees of a fleet's."""

    def __init__(self, **states: EngineState) -> None:
        self.states = states
        self.silent: set[str] = set()
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        supervisor = SimpleNamespace(build_limit_s=10.0)
        self.all = {name: SimpleNamespace(supervisor=supervisor) for name in states}

    def overview(self) -> dict[str, dict[str, object]]:
        return {
            name: {
                "state": state.value,
                "is_silent": name in self.silent,
                "wait_s": 9.0,
                "fill": 0.5,
            }
            for name, state in self.states.items()
        }

    async def scale(self, num_engines: int, without: tuple[str, ...]) -> None:
        self.asked.append((num_engines, tuple(without)))


def test_an_engine_that_does_not_come_back_for_long_counts_no_more() -> None:
    ready, away = EngineState.READY, EngineState.RECOVERING
    engines: Any = GivenEngines(a=ready, b=away)
    scaler = Autoscaler(engines, CONFIG)

    async def look(*times_s: float) -> None:
        for now_s in times_s:
            await scaler._look(now_s)

    asyncio.run(look(0, 5, 29))
    assert engines.asked == [], "it may come back"
    asyncio.run(look(31, 33))
    assert engines.asked == [(2, ("b",))]
    engines.states["b"] = ready
    asyncio.run(look(34))
    assert scaler._missed(34, engines.overview()) == []
    engines.states |= {"a": away, "b": away}
    asyncio.run(look(35, 99, 999))
    assert len(engines.asked) == 1, "it may be this machine that is cut off"


def test_nothing_changes_while_an_engine_is_silent() -> None:
    engines: Any = GivenEngines(a=EngineState.READY, b=EngineState.READY)
    scaler = Autoscaler(engines, CONFIG)

    async def look(*times_s: float) -> None:
        for now_s in times_s:
            await scaler._look(now_s)

    engines.silent = {"b"}
    asyncio.run(look(0, 5, 99))
    assert engines.asked == [], "what it has left says nothing of its load"
    engines.silent = set()
    asyncio.run(look(100, 105))
    assert engines.asked == [(3, ())]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 5), st.floats(0, 3)), max_size=60),
    st.integers(1, 6),
)
def test_it_stays_within_its_bounds_one_step_at_a_time(events, num_engines) -> None:
    rule, now_s = ScalingRule(CONFIG), 0.0
    for pause_s, wait_s, fill in events:
        now_s += pause_s
        wanted = rule.wanted(now_s, loads(*[wait_s] * num_engines, fill=fill), num_engines)
        assert abs(wanted - num_engines) <= 1
        if CONFIG.least <= num_engines <= CONFIG.most:
            assert CONFIG.least <= wanted <= CONFIG.most
        num_engines = wanted


class Loaded(LeastOpen):
    """Every engine waits as long as the test says."""

    wait_s = 5.0

    def load_of(self, replica: str) -> dict[str, float]:
        return {"wait_s": self.wait_s, "fill": 0.1 if not self.wait_s else 0.9}


def test_a_fleet_follows_and_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LOOK_EVERY_S", 0.02)
    config = ScalingConfig(1, 3, wait_s=1.0, up_after_s=0.05, down_after_s=0.05)

    async def run() -> None:
        loaded, given_slots = Loaded(), GivenSlots(*slots(SLOW))
        fleet = EngineFleet(
            {}, loaded, given_slots, max_queued_requests=99, recovery=QUICK, scaling=config
        )
        fleet.watches = [Autoscaler(fleet.engines, config)]
        try:
            await fleet.start()
            streams = [generate(fleet, f"q{number}", max_tokens=400) for number in range(3)]
            reading = [asyncio.ensure_future(tokens(stream)) for stream in streams]
            await until(lambda: len(fleet.engines.ready) == 3)
            loaded.wait_s = 0.0
            await until(lambda: len(given_slots.returned) == 2)
            assert given_slots.returned == ["1", "0"] and list(fleet.engines.all) == ["r0"]
            assert await asyncio.gather(*reading) == [list(range(11, 411))] * 3
            assert fleet.scaling is not None
            with pytest.raises(ConfigurationError, match="4, but autoscaling keeps it from 1 to 3"):
                fleet.scaling.check(4)
        finally:
            await fleet.shutdown(drain=False, timeout_s=1)
        assert given_slots.is_closed

    asyncio.run(asyncio.wait_for(run(), 60))
