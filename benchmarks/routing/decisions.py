"""The cost of a routing decision: `python -m benchmarks.routing.decisions TRACE`.

The trace's requests are placed on fleets of growing size. The rate of requests grows with the
fleet; for 1,000 replicas the trace is also repeated without common prefixes. No engine is
simulated: a first token comes when the router expects it, and an end 10 s later. Prints the median,
the 90th and the 99th percentile of `ReplicaRouter.place`, and the median of the other two calls.
"""

import argparse
import heapq
import time
from pathlib import Path

from quire.routing.candidates import RoutedRequest
from quire.routing.find import DEFAULT_ROUTING_POLICY, ROUTING_POLICIES
from quire.routing.replica import ReplicaFacts
from quire.routing.router import ReplicaRouter
from quire.simulation.fleet.fleet_command import step_costs
from quire.traces.read import read_trace
from quire.traces.trace import Trace

DECODE_S = 10.0
POOL_TOKENS = 1_000_000
REQUESTS_PER_S = 1.4  # that a replica gets
WARM_UP = 4  # one part in this number, the first, is not counted


def main() -> None:
    """Print a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", default=DEFAULT_ROUTING_POLICY)
    parser.add_argument("--num-requests", type=int, default=6000)
    options = parser.parse_args()
    trace = read_trace(options.trace)
    print("| replicas | tokens a block | copies | place p50 / p90 / p99 µs | other calls µs |")
    print("|---:|---:|---:|---:|---:|")
    for block_size in (512, 16):
        for num_replicas, copies in ((8, 1), (64, 1), (1000, 1), (1000, 10)):
            part = trace.first(options.num_requests // copies).repeated(copies)
            rate = len(part.requests) / max(1e-9, part.duration_s)
            part = part.at_speed(REQUESTS_PER_S * num_replicas / rate)
            places, others = measure(part, num_replicas, block_size, options.policy)
            shown = " / ".join(f"{at(places, share):.0f}" for share in (0.5, 0.9, 0.99))
            print(
                f"| {num_replicas:,} | {block_size} | {copies} | {shown} | {at(others, 0.5):.0f} |",
                flush=True,
            )


def measure(
    trace: Trace, num_replicas: int, block_size: int, policy: str
) -> tuple[list[float], list[float]]:
    """Microseconds of each placement, and of each first token and end."""
    router = ReplicaRouter(ROUTING_POLICIES.make(policy), block_size)
    facts = ReplicaFacts(
        POOL_TOKENS // block_size, step_costs(20480.0, 8e-3, 2e-5, 4e-8, 2048), 2048, 64
    )
    for index in range(num_replicas):
        router.add_replica(f"r{index}", facts)
    requests = [routed(trace, number, block_size) for number in range(len(trace.requests))]
    places: list[float] = []
    others: list[float] = []
    events: list[tuple[float, int, str]] = []
    for traced, request in zip(trace.requests, requests, strict=True):
        while events and events[0][0] <= traced.at_s:
            now_s, is_end, request_id = heapq.heappop(events)
            call = router.on_end if is_end else router.on_first_token
            begun_s = time.perf_counter()
            call(request_id, now_s)
            others.append(1e6 * (time.perf_counter() - begun_s))
        begun_s = time.perf_counter()
        name = router.place(request, traced.at_s)
        places.append(1e6 * (time.perf_counter() - begun_s))
        first_s = traced.at_s + router.fleet.by_name[name].wait_s(traced.at_s)
        heapq.heappush(events, (first_s, 0, request.request_id))
        heapq.heappush(events, (first_s + DECODE_S, 1, request.request_id))
    return places[len(places) // WARM_UP :], others


def routed(trace: Trace, number: int, block_size: int) -> RoutedRequest:
    """The request with digests that are made of its prefix ids: chains take their own time."""
    request, per_block = trace.requests[number], max(1, trace.block_tokens // block_size)
    digests = [
        (prefix_id * per_block + part).to_bytes(16, "big")
        for prefix_id in request.prefix_ids
        for part in range(per_block)
    ]
    num_blocks = request.num_prompt_tokens // block_size
    return RoutedRequest(str(number), digests[:num_blocks], request.num_prompt_tokens)


def at(values: list[float], share: float) -> float:
    """A percentile; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    main()
