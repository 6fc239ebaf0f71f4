"""What each policy chooses, as tables; and that the search finds what brute force would."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.fleets import BLOCK_SIZE, TOKEN_S, cost_model, facts, make_request, make_router

from quire.errors import ConfigurationError
from quire.routing.candidates import Candidates
from quire.routing.find import ROUTING_POLICIES
from quire.routing.policies.expected_ttft import ExpectedTTFT
from quire.routing.replica import Replica
from quire.routing.router import ReplicaRouter

LONG, SHORT = 200, 2  # blocks


class BruteForce(ExpectedTTFT):
    """The same sum for each replica; compares with the search, which it returns."""

    def choose(self, candidates: Candidates) -> Replica:
        def total_s(replica: Replica) -> float:
            num_tokens = candidates.request.num_prompt_tokens
            num_cached = candidates.num_cached_tokens(replica)
            taken_s = candidates.mean_speed.seconds(num_tokens, num_cached)
            own_s = candidates.prefill_s(replica) + self.weight(candidates) * taken_s
            return candidates.expected_delay_s(replica) + own_s

        found = super().choose(candidates)
        least_s = min(map(total_s, candidates.replicas))
        assert total_s(found) == pytest.approx(least_s, rel=1e-9)
        assert found.accepts
        return found


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_replicas=st.integers(1, 70),
    num_speeds=st.integers(1, 3),
    own_weight=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_the_search_equals_brute_force(
    seed: int, num_replicas: int, num_speeds: int, own_weight: float
) -> None:
    rng = random.Random(seed)
    router = ReplicaRouter(BruteForce(own_weight, 0.1), BLOCK_SIZE)
    speeds = [cost_model(TOKEN_S * 2**index) for index in range(num_speeds)]
    for index in range(num_replicas):
        router.add_replica(f"r{index}", facts(400, rng.choice(speeds)))
    open_ids: list[str] = []
    now_s = 0.0
    for number in range(60):
        now_s += rng.expovariate(20.0)
        family, num_shared = rng.choice("abcde"), rng.choice([0, 3, 20])
        request = make_request(f"q{number}", family, rng.randrange(90), num_shared)
        router.place(request, now_s)
        open_ids.append(request.request_id)
        for _ in range(rng.randrange(3)):
            request_id = rng.choice(open_ids)
            router.on_first_token(request_id, now_s)
            if rng.random() < 0.5:
                router.on_end(request_id, now_s)
        if rng.random() < 0.1:
            router.set_accepting(f"r{rng.randrange(num_replicas)}", True)
        if num_replicas > 1 and rng.random() < 0.1:
            router.set_accepting(f"r{rng.randrange(1, num_replicas)}", False)
    router.check()


def load(router: ReplicaRouter, request_id: str, family: str, num_blocks: int) -> str:
    return router.place(make_request(request_id, family, num_blocks), 0.0)


@pytest.mark.parametrize(
    ("num_before", "own_weight", "expected"),
    [(0, 0.0, "r0"), (1, 0.0, "r1"), (3, 1.0, "r0"), (5, 1.0, "r1"), (5, 4.0, "r0")],
)
def test_a_prefix_is_stuck_to_within_the_band(
    num_before: int, own_weight: float, expected: str
) -> None:
    """A prefix of 200 blocks saves 0.17 s. One own prefill may be waited for it, and, as all
    replicas are busy, four more for each own_weight."""
    router = make_router(ExpectedTTFT(own_weight), 2, num_blocks=9000)
    router.set_accepting("r1", False)
    load(router, "first", "a", LONG)
    for index in range(max(1, num_before)):
        load(router, f"before{index}", f"x{index}", LONG)
    router.on_first_token("first", 0.0)
    router.on_end("first", 0.0)
    if not num_before:
        router.on_end("before0", 0.0)
    router.fleet.busy_share = 0.9
    router.set_accepting("r1", True)
    assert load(router, "last", "a", LONG + 20) == expected


def test_an_idle_fleet_is_used_and_a_busy_one_keeps_prefixes_together() -> None:
    """Where replicas idle, a prefix is not worth a longer wait than it saves."""
    for share, expected in ((0.0, "r1"), (0.75, "r0")):
        router = make_router(ExpectedTTFT(2.0), 2, num_blocks=9000)
        router.set_accepting("r1", False)
        load(router, "first", "a", LONG)
        load(router, "second", "b", 2 * LONG)
        router.on_first_token("first", 0.0)
        router.fleet.busy_share = share
        router.set_accepting("r1", True)
        assert load(router, "again", "a", LONG) == expected


def test_generating_sequences_repel_requests_if_prefixes_are_equal() -> None:
    router = make_router(ExpectedTTFT(decode_weight=1.0), 2)
    for index in range(6):
        load(router, f"q{index}", "a", SHORT)
        router.on_first_token(f"q{index}", 0.0)
    router.on_end("q5", 8.0)  # requests generate for 8 s
    before = {replica.name: replica.num_decodes for replica in router.replicas}
    name = load(router, "other", "b", SHORT)
    assert before[name] == min(before.values())


def test_more_sequences_than_rows_are_waited_for() -> None:
    router = make_router(ROUTING_POLICIES.make("expected_ttft"), 2)
    for index in range(300):
        load(router, f"q{index}", "a", SHORT)
        router.on_first_token(f"q{index}", 0.0)
        if index == 0:
            router.on_end("q0", 5.0)
    decodes = sorted(replica.num_decodes for replica in router.replicas)
    assert decodes[0] > 64, "the second replica was never used"


@pytest.mark.parametrize("name", ["sglang", "llm_d", "longest_match", "expected_ttft"])
def test_a_known_prefix_is_found(name: str) -> None:
    router = make_router(ROUTING_POLICIES.make(name), 4)
    homes = {family: load(router, family, family, LONG) for family in "abc"}
    assert len(set(homes.values())) == 3
    for family in "abc":
        router.on_first_token(family, 0.0)
    for family in "abc":
        assert load(router, f"{family} again", family, LONG + 1) == homes[family]


def test_sglang_takes_the_shortest_queue_once_the_loads_are_unbalanced() -> None:
    policy = ROUTING_POLICIES.make("sglang", {"balance_abs_threshold": 3})
    router = make_router(policy, 2)
    names = [load(router, f"q{index}", "a", LONG) for index in range(6)]
    assert names == ["r0"] * 4 + ["r1"] * 2


def test_llm_d_leaves_a_replica_that_is_saturated() -> None:
    router = make_router(ROUTING_POLICIES.make("llm_d", {"max_wait_s": 0.15}), 2)
    names = [load(router, f"q{index}", "a", LONG) for index in range(3)]
    assert names == ["r0", "r1", "r0"]


def test_round_robin_and_random_use_all() -> None:
    for name in ("round_robin", "random", "least_work"):
        router = make_router(ROUTING_POLICIES.make(name), 4)
        names = [load(router, f"q{index}", "a", LONG) for index in range(40)]
        assert set(names) == {"r0", "r1", "r2", "r3"}, name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("expected_ttft", {"own_weight": -1}),
        ("expected_ttft", {"decode_weight": float("nan")}),
        ("sglang", {"cache_threshold": -0.1}),
        ("llm_d", {"max_wait_s": -1}),
    ],
)
def test_an_option_out_of_bounds_is_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} is .* at least 0"):
        ROUTING_POLICIES.make(name, options)


def test_the_default_is_listed() -> None:
    assert next(iter(ROUTING_POLICIES)) == "expected_ttft"
