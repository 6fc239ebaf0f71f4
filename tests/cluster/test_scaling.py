"""How many engines there shall be; and a fleet that follows."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.fleet_world import GivenPlaces, LeastOpen
from tests.cluster.test_fleet import QUICK, SLOW, generate, places, tokens, until

from quire.cluster import scaling
from quire.cluster.fleet import EngineFleet
from quire.cluster.scaling import ScalingConfig, ScalingRule
from quire.errors import ConfigurationError

CONFIG = ScalingConfig(1, 4, wait_s=1.0, up_after_s=2.0, down_after_s=10.0)


def loads(*waits: float, excess: float = 0.0) -> dict[str, dict[str, float]]:
    return {str(at): {"wait_s": wait, "excess": excess} for at, wait in enumerate(waits)}


def test_one_more_when_the_shortest_wait_was_too_long_for_a_while() -> None:
    rule = ScalingRule(CONFIG)
    assert rule.wanted(0, loads(3, 2), 2) == 2
    assert rule.wanted(1.9, loads(3, 2), 2) == 2
    assert rule.wanted(2.0, loads(3, 2), 2) == 3
    assert rule.wanted(2.5, loads(3, 2), 3) == 3, "the new one is not ready yet"
    assert rule.wanted(9, loads(3, 2, 0.5), 3) == 3, "one of them has room"


def test_one_more_when_more_is_placed_than_runs_at_once() -> None:
    rule = ScalingRule(CONFIG)
    assert [rule.wanted(at, loads(0, excess=0.2), 1) for at in (0, 1, 2)] == [1, 1, 2]


def test_one_less_when_fewer_would_do_for_long() -> None:
    rule = ScalingRule(CONFIG)
    quiet = loads(0, 0, excess=-0.6)
    assert [rule.wanted(at, quiet, 2) for at in (0, 9, 10, 11)] == [2, 2, 1, 2]
    assert rule.wanted(100, loads(0, excess=-0.9), 1) == 1, "the last one stays"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 5), st.floats(-1, 2)), max_size=60),
    st.integers(1, 6),
)
def test_it_stays_within_its_bounds_one_step_at_a_time(events, num_engines) -> None:
    rule, now_s = ScalingRule(CONFIG), 0.0
    for pause_s, wait_s, excess in events:
        now_s += pause_s
        wanted = rule.wanted(now_s, loads(*[wait_s] * num_engines, excess=excess), num_engines)
        assert abs(wanted - num_engines) <= 1
        if CONFIG.least <= num_engines <= CONFIG.most:
            assert CONFIG.least <= wanted <= CONFIG.most
        num_engines = wanted


class Loaded(LeastOpen):
    """Every engine waits as long as the test says."""

    wait_s = 5.0

    def load_of(self, replica: str) -> dict[str, float]:
        return {"wait_s": self.wait_s, "excess": -0.9 if not self.wait_s else 0.0}


def test_a_fleet_follows_and_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LOOK_EVERY_S", 0.02)
    config = ScalingConfig(1, 3, wait_s=1.0, up_after_s=0.05, down_after_s=0.05)

    async def run() -> None:
        loaded, given_places = Loaded(), GivenPlaces(*places(SLOW))
        fleet = EngineFleet(
            {}, loaded, given_places, max_queued_requests=99, recovery=QUICK, scaling=config
        )
        try:
            await fleet.start()
            streams = [generate(fleet, f"q{number}", max_tokens=400) for number in range(3)]
            reading = [asyncio.ensure_future(tokens(stream)) for stream in streams]
            await until(lambda: len(fleet.engines.ready) == 3)
            loaded.wait_s = 0.0
            await until(lambda: len(given_places.returned) == 2)
            assert given_places.returned == ["1", "0"] and list(fleet.engines.all) == ["r0"]
            assert await asyncio.gather(*reading) == [list(range(11, 411))] * 3
            assert fleet.scaling is not None
            with pytest.raises(ConfigurationError, match="4, but by their load there are 1 to 3"):
                fleet.scaling.check(4)
        finally:
            await fleet.shutdown(drain=False, timeout_s=1)
        assert given_places.is_closed

    asyncio.run(asyncio.wait_for(run(), 60))
