"""Every placed request is accounted once, and nothing is left when it has ended."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.routing.fleets import BLOCK_SIZE, facts, make_request, make_router

from quire.errors import ConfigurationError, NoReplicaError
from quire.routing.find import ROUTING_POLICIES
from quire.routing.policies.expected_ttft import ExpectedTTFT
from quire.routing.replica import graded_slowness
from quire.routing.router import ReplicaRouter

POLICIES = sorted(ROUTING_POLICIES)


class RouterMachine(RuleBasedStateMachine):
    """A fleet whose replicas and requests come and go in any order."""

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        self.router = ReplicaRouter(ROUTING_POLICIES.make(policy), BLOCK_SIZE)
        self.accepts: dict[str, bool] = {}
        self.at: dict[str, str] = {}
        self.lost: list[str] = []
        self.num_named = self.num_requests = 0

    @rule(num_blocks=st.integers(1, 60))
    def add_replica(self, num_blocks: int) -> None:
        name = f"r{self.num_named}"
        self.num_named += 1
        self.router.add_replica(name, facts(num_blocks))
        self.accepts[name] = True

    @precondition(lambda self: self.accepts)
    @rule(data=st.data(), measured=st.floats(0.1, 10))
    def hear_of_slowness(self, data: st.DataObject, measured: float) -> None:
        self.router.set_slowness(data.draw(st.sampled_from(sorted(self.accepts))), measured, 0.0)

    @precondition(lambda self: self.accepts)
    @rule(data=st.data())
    def remove_replica(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.accepts)))
        self.router.remove_replica(name)
        del self.accepts[name]
        self.lost += [request for request, replica in self.at.items() if replica == name]
        self.at = {request: replica for request, replica in self.at.items() if replica != name}

    @precondition(lambda self: self.accepts)
    @rule(data=st.data(), accepts=st.booleans(), forgets=st.booleans())
    def change_replica(self, data: st.DataObject, accepts: bool, forgets: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.accepts)))
        self.router.set_accepting(name, accepts)
        self.accepts[name] = accepts
        if forgets:
            self.router.forget_prefixes(name)

    @rule(
        family=st.sampled_from("abc"),
        num_blocks=st.integers(0, 40),
        num_shared=st.sampled_from([0, 3]),
        again=st.booleans(),
    )
    def place(self, family: str, num_blocks: int, num_shared: int, again: bool) -> None:
        """A new request, or one that was cut off and goes on elsewhere."""
        request_id = f"q{self.num_requests}"
        if again and self.lost:
            request_id = self.lost.pop()
        self.num_requests += 1
        request = make_request(request_id, family, num_blocks, num_shared)
        if not any(self.accepts.values()):
            with pytest.raises(NoReplicaError, match="accepts requests"):
                self.router.place(request, 0.0)
            return
        name = self.router.place(request, 0.0)
        assert self.accepts[name], f"{name} takes no requests"
        self.at[request_id] = name

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.router.on_first_token(self._any(data), 0.0)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = self._any(data)
        self.router.on_end(request_id, 0.0)
        self.at.pop(request_id, None)

    def _any(self, data: st.DataObject) -> str:
        """A request that is there, that was lost with its replica, or that never was."""
        return data.draw(st.sampled_from([*self.at, *self.lost, "unknown"]))

    @invariant()
    def every_request_counts_once(self) -> None:
        router = self.router
        assert len(router._placed) == len(self.at)
        assert {replica.name for replica in router.replicas} == set(self.accepts)
        assert len({replica.index for replica in router.replicas}) == len(self.accepts)
        for replica in router.replicas:
            own = [request for request, name in self.at.items() if name == replica.name]
            assert replica.num_requests == len(own) >= replica.num_prompts >= 0
            assert replica.num_prompts + replica.num_decodes == len(own)
            assert replica.num_uncached_tokens >= replica.num_prompts
            assert replica.num_decode_tokens >= replica.num_decodes
            assert (replica.prefill_s > 0.0) == (replica.num_prompts > 0)
        router.check()

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for request_id in self.at:
            self.router.on_end(request_id, 0.0)
        for replica in self.router.replicas:
            loads = replica.num_requests, replica.num_prompts, replica.num_uncached_tokens
            assert (*loads, replica.num_decodes, replica.num_decode_tokens) == (0,) * 5
            assert replica.prefill_s == replica.wait_s(9.0) == 0.0


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_only_uncached_tokens_count_as_in_flight() -> None:
    router = make_router(ROUTING_POLICIES.make("expected_ttft"), 1)
    (replica,) = router.replicas
    router.place(make_request("first", "a", 8), 0.0)
    assert replica.num_uncached_tokens == 8 * BLOCK_SIZE + 1
    router.place(make_request("second", "a", 10), 0.0)
    assert replica.num_uncached_tokens == 8 * BLOCK_SIZE + 1 + 2 * BLOCK_SIZE + 1
    router.on_first_token("first", 0.0)
    assert replica.num_uncached_tokens == 2 * BLOCK_SIZE + 1
    assert (replica.num_decodes, replica.num_decode_tokens) == (1, 8 * BLOCK_SIZE + 1)


def test_the_last_token_is_always_computed() -> None:
    router = make_router(ROUTING_POLICIES.make("expected_ttft"), 1)
    request = make_request("first", "a", 8)
    router.place(request, 0.0)
    whole = make_request("second", "a", 9)
    router.place(type(whole)("second", request.digests, 8 * BLOCK_SIZE), 0.0)
    router.on_first_token("first", 0.0)
    assert router.replicas[0].num_uncached_tokens == 1


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"must be one of .*did you mean least_work"):
        ROUTING_POLICIES.make("least_wrok")


def test_an_unknown_option_is_refused_with_the_options_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="its options: match_threshold, max_wait_s"):
        ROUTING_POLICIES.make("llm_d", {"threshold": 1})


@pytest.mark.parametrize("name", POLICIES)
def test_equal_calls_are_placed_equally(name: str) -> None:
    def place() -> list[str]:
        router = make_router(ROUTING_POLICIES.make(name), 5)
        return [
            router.place(make_request(f"q{index}", "abc"[index % 3], index % 7), 0.0)
            for index in range(30)
        ]

    assert place() == place()


def test_a_replica_that_has_become_slow_gets_less() -> None:
    router = make_router(ExpectedTTFT(), 2)
    router.set_slowness("r0", 2.1, 0.0)
    slow, other = (router.fleet.by_name[name] for name in ("r0", "r1"))
    assert slow.slowness == 2.0 and slow.speed != other.speed
    assert slow.speed.seconds(1000, 0) == pytest.approx(2 * other.speed.seconds(1000, 0), rel=0.05)
    placed = [router.place(make_request(f"q{i}", f"f{i}", 50), 0.0) for i in range(9)]
    assert placed.count("r1") in (6, 7)
    assert slow.wait_s(0.0) == pytest.approx(other.wait_s(0.0), rel=0.3)
    before_s = slow.wait_s(0.0)
    router.set_slowness("r0", 1.0, 0.0)
    assert slow.wait_s(0.0) == pytest.approx(before_s / 2)
    for index in range(9):
        router.on_end(f"q{index}", 1.0)
    router.check()
    assert slow.speed is other.speed and list(router.fleet.speeds.values()) == [0b11]


def test_a_replica_counts_as_slower_only_where_it_clearly_is() -> None:
    assert [graded_slowness(each, 1.0) for each in (0.9, 1.29, 1.31, 0.76)] == [
        1,
        1,
        2**0.5,
        2**-0.5,
    ]
    assert graded_slowness(1.1, 2**0.5) == 2**0.5, "it stays what it was near the border"
    assert [graded_slowness(each, 1.0) for each in (1e9, 0.0)] == [8.0, 0.5]
