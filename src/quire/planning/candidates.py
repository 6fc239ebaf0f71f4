"""Predicts how configurations serve a load, and chooses the best one.

The load is run twice on the virtual clock for each configuration. The run with the real arrivals
gives the latencies. The run with all requests at once gives the rate above which a queue grows.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from quire.core.scheduling.cost_model import StepCostModel
from quire.planning.load import LoadRequest, at_once, offered_rate
from quire.planning.objectives import PERCENTILE, Objectives, excess, quantile
from quire.planning.step_costs import StepCosts
from quire.planning.virtual_run import RunOutcome, learned_pacer, run_virtually
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import EngineShape

#: Saturation rates that differ by less than this share count as equal, since the measurements are
#: not more exact.
EQUAL_SHARE = 0.02
#: The largest share of its saturation rate that a replica is loaded with. At a share near 1, queues
#: grow without bound.
HEADROOM = 0.85
MOST_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration of an engine, and the costs of its steps."""

    #: The name of the weights' format.
    precision: str
    #: The name of the KV cache's format.
    kv_format: str
    shape: EngineShape
    costs: StepCosts

    @property
    def options(self) -> dict[str, int | float]:
        """The options that a plan chooses, by name."""
        shape = self.shape
        return {
            "block_size": shape.block_size,
            "max_num_seqs": shape.max_num_seqs,
            "max_itl_ratio": shape.max_itl_ratio,
        }


@dataclass(frozen=True, slots=True)
class Expectation:
    """The predicted results of a candidate."""

    candidate: Candidate
    #: The run of the requests that one replica gets.
    served: RunOutcome
    #: The run of the whole load on one replica, if all requests arrive at once.
    saturated: RunOutcome
    #: Number of replicas that share the load.
    replicas: int
    #: Requests per second that arrive at each replica; None if all arrive at once.
    offered_rate: float | None
    #: The result of `objectives.excess`.
    excess: float
    #: The sizes for which nothing is predicted because they exceed the measured sizes, in words;
    #: None if all sizes were measured.
    lacking: str | None = None

    @property
    def saturation_rate(self) -> float:
        """Requests per second that one replica serves when it is never idle."""
        return self.saturated.requests_per_s

    @property
    def is_saturated(self) -> bool:
        """Whether the offered rate exceeds the saturation rate, so that queues grow."""
        return self.offered_rate is not None and self.offered_rate > self.saturation_rate

    @property
    def num_refused(self) -> int:
        """Number of requests of the load that do not fit into the KV cache even when alone."""
        return self.saturated.num_refused

    @property
    def is_in_time(self) -> bool:
        """Whether the requests that are not refused are served within the objectives."""
        return self.excess <= 1 and not self.is_saturated

    @property
    def keeps(self) -> bool:
        """Whether all requests are served within the objectives."""
        return self.is_in_time and not self.num_refused


def expect(
    candidate: Candidate,
    load: Sequence[LoadRequest],
    objectives: Objectives,
    replicas: int | None,
) -> Expectation:
    """Simulate the load on `replicas` replicas. Each replica gets every Nth request.

    If `replicas` is None, the number is chosen so that each stays below HEADROOM of its saturation
    rate.
    """
    saturated = run_virtually(at_once(load), candidate.shape, candidate.costs)
    rate = offered_rate(load)
    if replicas is None:
        wanted = 0.0 if rate is None else rate / max(1e-9, HEADROOM * saturated.requests_per_s)
        replicas = min(MOST_REPLICAS, max(1, ceil(wanted)))
    if rate is not None:
        served = run_virtually(load[::replicas], candidate.shape, candidate.costs)
        rate /= replicas
    elif replicas > 1:
        served = run_virtually(at_once(load[::replicas]), candidate.shape, candidate.costs)
    else:
        served = saturated
    lacking = _lacking(candidate.costs, (served, saturated))
    ttft_s, itl_s = quantile(served.ttft_s, PERCENTILE), quantile(served.itl_s, PERCENTILE)
    beyond = excess(objectives, ttft_s, itl_s)
    return Expectation(candidate, served, saturated, replicas, rate, beyond, lacking)


def _lacking(costs: StepCosts, outcomes: Iterable[RunOutcome]) -> str | None:
    for outcome in outcomes:
        lacking = outcome.lacking(costs.bounds)
        if lacking is not None:
            return lacking
    return None


def best_of(found: Sequence[Expectation]) -> Expectation | None:
    """Choose the best candidate of those that refuse the fewest requests.

    If candidates meet the objectives, the one with the fewest replicas is chosen, then the highest
    saturation rate, then the shortest time between tokens. Otherwise the one with the smallest
    excess is chosen. Returns None if nothing was measured or nothing is served.
    """
    known = [each for each in found if each.lacking is None and each.served.ttft_s]
    fewest_refused = min((each.num_refused for each in known), default=0)
    known = [each for each in known if each.num_refused == fewest_refused]
    kept = [each for each in known if each.is_in_time]
    if not kept:
        return min(known, key=lambda each: (each.excess, -each.saturation_rate), default=None)
    fewest = min(each.replicas for each in kept)
    kept = [each for each in kept if each.replicas == fewest]
    highest = max(each.saturation_rate for each in kept)
    equal = [each for each in kept if each.saturation_rate >= (1 - EQUAL_SHARE) * highest]
    return min(equal, key=_wait)


def _wait(found: Expectation) -> float:
    served = found.served
    intervals = quantile(served.itl_s, PERCENTILE)
    return intervals if intervals == intervals else quantile(served.ttft_s, PERCENTILE)


def variants(
    base: Candidate, max_num_seqs: Sequence[int], max_itl_ratios: Sequence[float]
) -> list[Candidate]:
    """Copies of the candidate for all combinations of the options, largest max_num_seqs first."""
    return [
        replace(base, shape=replace(base.shape, max_num_seqs=number, max_itl_ratio=ratio))
        for number in sorted(max_num_seqs, reverse=True)
        for ratio in max_itl_ratios
    ]


def bound_of(found: Expectation, load: Sequence[LoadRequest]) -> str:
    """Text that says what limits a configuration at saturation, after one more run of the load.

    The text names the parts that take most of the step time, and the limit on the number of
    sequences that run together.
    """
    shape, costs = found.candidate.shape, _Shares(found.candidate.costs)
    everything = at_once(load)
    pacer = learned_pacer(everything, shape, found.candidate.costs)
    saturated = run_virtually(everything, shape, costs, pacer)
    total_s = sum(costs.seconds.values()) or 1.0
    parts = sorted(costs.seconds.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in parts[:3])
    reason = f"step time at saturation: {named}"
    if saturated.most_rows >= shape.max_num_seqs:
        return f"{reason}; max_num_seqs: all {shape.max_num_seqs} rows are in use"
    blocks_each = -(-saturated.longest // shape.block_size)
    is_full = (saturated.most_rows + 1) * blocks_each > shape.num_blocks
    if saturated.num_preemptions or is_full:
        return (
            f"{reason}; KV memory: {shape.num_blocks} blocks hold {saturated.most_rows} sequences"
            f" at most ({saturated.num_preemptions} preemptions)"
        )
    num_served = sum(each.num_choices for each in load) - saturated.num_refused
    if saturated.most_rows < num_served:
        return f"{reason}; at most {saturated.most_rows} sequences run: they end as others begin"
    return reason


class _Shares:
    """Wraps costs, and adds up the seconds of each part over all steps."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def predict_s(self, work: PlannedWork) -> float:
        """See `Costs`."""
        for name, seconds in self._costs.split_s(work).items():
            self.seconds[name] += seconds
        return self._costs.predict_s(work)

    def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
        """See `Costs`."""
        return self._costs.deviation(work, predicted_s, place)

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `Costs`."""
        return self._costs.ending_s(num_ended, num_ended_tokens)

    def pacing_model(self) -> StepCostModel:
        """See `Costs`."""
        return self._costs.pacing_model()


def as_numbers(outcome: RunOutcome) -> Mapping[str, float]:
    """The figures of an outcome that a plan reports, in seconds and per second."""
    return {
        "ttft_p50_s": quantile(outcome.ttft_s, 0.5),
        "ttft_p99_s": quantile(outcome.ttft_s, 0.99),
        "itl_p50_s": quantile(outcome.itl_s, 0.5),
        "itl_p99_s": quantile(outcome.itl_s, 0.99),
        "output_tokens_per_s": outcome.tokens_per_s,
        "requests_per_s": outcome.requests_per_s,
    }
