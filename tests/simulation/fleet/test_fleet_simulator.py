"""Simulated fleets: every request gets its tokens, steps take what the model says, views hold."""

from dataclasses import replace

import pytest

from quire.core.scheduling.cost_model import StepLoad
from quire.errors import RequestNeverFitsError
from quire.routing.candidates import Candidates
from quire.routing.find import ROUTING_POLICIES
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica
from quire.simulation.fleet.fleet_command import step_costs
from quire.simulation.fleet.fleet_simulator import FleetSimulator, simulate_fleet
from quire.simulation.fleet.replica_engine import ReplicaShape
from quire.traces.trace import Trace, TraceRequest

COSTS = step_costs(20480.0, 8e-3, 2e-5, 4e-8, 2048)
SHAPE = ReplicaShape(num_blocks=200, block_size=512, costs=COSTS)


def conversations(num_users: int, num_turns: int, gap_s: float) -> Trace:
    """Users whose prompts grow by 2 blocks a turn behind one block that all have."""
    requests = []
    for turn in range(num_turns):
        for user in range(num_users):
            own = [1 + 1000 * user + index for index in range(2 * turn + 2)]
            at_s = gap_s * (turn * num_users + user)
            num_tokens = 512 * len(own) + 600
            requests.append(TraceRequest(at_s, num_tokens, 5 + user % 7, (0, *own)))
    return Trace(512, tuple(requests))


TRACE = conversations(12, 5, 0.02)


@pytest.mark.parametrize("name", sorted(ROUTING_POLICIES))
def test_every_request_gets_all_its_tokens_once(name: str) -> None:
    simulator = FleetSimulator(TRACE, [SHAPE] * 3, ROUTING_POLICIES.make(name), name)
    report = simulator.run()
    assert len(report.ttfts_s) == len(TRACE.requests)
    num_tokens = sum(request.num_output_tokens for request in TRACE.requests)
    assert len(report.ttfts_s) + len(report.itls_s) == num_tokens
    assert report.num_prompt_tokens == TRACE.num_prompt_tokens
    assert 0 < report.num_hit_tokens <= TRACE.best_hit_rate() * TRACE.num_prompt_tokens
    assert not simulator.router._placed
    simulator.router.check()
    for replica in simulator.replicas.values():
        assert not replica.has_work and not replica.is_busy


def test_a_run_is_repeated_exactly() -> None:
    first, again = [
        simulate_fleet(TRACE, [SHAPE] * 3, ROUTING_POLICIES.make("expected_ttft")) for _ in range(2)
    ]
    assert first.ttfts_s == again.ttfts_s and first.itls_s == again.itls_s


def test_expected_hits_are_real_hits() -> None:
    """Where the pools are large enough, and no prompt comes before the one it continues ended."""
    trace = conversations(4, 6, 5.0)
    report = simulate_fleet(trace, [SHAPE] * 2, ROUTING_POLICIES.make("expected_ttft"))
    num_missed = report.num_hit_tokens - report.num_expected_tokens
    assert 0 <= num_missed <= 0.02 * report.num_prompt_tokens
    assert report.hit_rate > 0.9 * trace.best_hit_rate()


def test_steps_take_what_the_cost_model_says() -> None:
    trace = Trace(512, (TraceRequest(1.0, 3000, 3, tuple(range(6))),))
    report = simulate_fleet(trace, [SHAPE], ROUTING_POLICIES.make("round_robin"))
    loads = [
        StepLoad().with_chunk(0, 2048),
        StepLoad().with_chunk(2048, 952),
        StepLoad(1, 3001),
        StepLoad(1, 3002),
    ]
    seconds = [COSTS.predict_s(load) for load in loads]
    assert list(report.ttfts_s) == pytest.approx([sum(seconds[:2])])
    assert list(report.itls_s) == pytest.approx(seconds[2:])
    assert report.busy_s == pytest.approx([sum(seconds)])
    assert seconds[0] == pytest.approx(2048 / 20480, rel=1e-3)


def test_a_finer_block_size_changes_no_hits_of_whole_blocks() -> None:
    """Router and engines have 32 times as many blocks; the tokens are the same."""
    fine = ReplicaShape(num_blocks=200 * 32, block_size=16, costs=COSTS)
    trace = conversations(4, 4, 5.0)
    policy = ROUTING_POLICIES.make("expected_ttft")
    coarse = simulate_fleet(trace, [SHAPE] * 2, policy)
    again = simulate_fleet(trace, [fine] * 2, ROUTING_POLICIES.make("expected_ttft"))
    assert again.hit_rate == pytest.approx(coarse.hit_rate, abs=0.05)


def test_a_request_that_no_pool_can_hold_is_refused() -> None:
    trace = Trace(512, (TraceRequest(0.0, 512 * 300, 3),))
    with pytest.raises(RequestNeverFitsError):
        simulate_fleet(trace, [SHAPE], ROUTING_POLICIES.make("round_robin"))


class FewestRequests(RoutingPolicy):
    """A policy as a user would write it."""

    def choose(self, candidates: Candidates) -> Replica:
        return min(candidates.replicas, key=lambda replica: replica.num_requests)


def test_a_registered_policy_is_simulated_like_any_other() -> None:
    """It knows nothing of prefixes, and that shows."""
    own = simulate_fleet(TRACE, [SHAPE] * 4, FewestRequests(), "fewest_requests")
    ours = simulate_fleet(TRACE, [SHAPE] * 4, ROUTING_POLICIES.make("expected_ttft"))
    assert len(own.ttfts_s) == len(ours.ttfts_s)
    assert own.hit_rate < ours.hit_rate and own.mean_ttft_s > ours.mean_ttft_s
    assert own.line().startswith("| fewest_requests | ")


def test_the_longest_match_alone_overloads_one_replica() -> None:
    """All prompts begin with one block, so all of them go where that is."""
    collapsed = simulate_fleet(TRACE, [SHAPE] * 4, ROUTING_POLICIES.make("longest_match"))
    ours = simulate_fleet(TRACE, [SHAPE] * 4, ROUTING_POLICIES.make("expected_ttft"))
    assert collapsed.imbalance > 2 > ours.imbalance
    assert collapsed.mean_ttft_s > 2 * ours.mean_ttft_s


class Deaf(FleetSimulator):
    """The router hears of no slowness."""

    def _report_slowness(self, now_s: float) -> None:
        pass


def test_reported_slowness_shortens_the_longest_times() -> None:
    trace = conversations(40, 14, 0.05)
    shapes = [replace(SHAPE, slowness=2.0), SHAPE, SHAPE, SHAPE]
    told, deaf = (
        kind(trace, shapes, ROUTING_POLICIES.make("expected_ttft"))
        for kind in (FleetSimulator, Deaf)
    )
    heard, unheard = (sorted(each.run().ttfts_s) for each in (told, deaf))
    assert told.router.fleet.by_name["r0"].slowness == 2.0
    assert {each.slowness for each in told.router.replicas[1:]} == {1.0}
    assert sum(heard) < 0.9 * sum(unheard)
    assert heard[-len(heard) // 100] < 0.75 * unheard[-len(unheard) // 100]
