"""Simulates a fleet: a trace, the real router and simulated replicas on one virtual clock."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

from quire.core.memory.hash_chain import HashChains
from quire.core.request import SequenceOutput
from quire.routing.candidates import RoutedRequest
from quire.routing.policy import RoutingPolicy
from quire.routing.router import ReplicaRouter
from quire.simulation.fleet.fleet_report import FleetReport
from quire.simulation.fleet.replica_engine import ReplicaShape, SimulatedReplica
from quire.traces.trace import Trace

SECRET = b"simulated fleet"

#: The seconds between two reports of a replica's slowness to the router, as in a real fleet.
TELL_EVERY_S = 5.0
#: A replica reports again only if its steps since the last report are predicted to take this long,
#: in seconds.
LEAST_TOLD_S = 0.25


@dataclass(slots=True)
class _Asked:
    """A request that has not ended."""

    at_s: float
    num_prompt_tokens: int
    #: The time of the latest token, in seconds; None before the first token.
    last_token_s: float | None = None


def simulate_fleet(
    trace: Trace, shapes: list[ReplicaShape], policy: RoutingPolicy, name: str = ""
) -> FleetReport:
    """Run a trace with a routing policy on one replica per shape. All shapes have one block size.

    `name` is the policy's name in the report. Raises RequestNeverFitsError for a request that is
    longer than a replica's pool.
    """
    return FleetSimulator(trace, shapes, policy, name).run()


class FleetSimulator:
    """Runs a trace to its end. Ignores network delays, since they don't depend on the policy."""

    def __init__(
        self, trace: Trace, shapes: list[ReplicaShape], policy: RoutingPolicy, name: str = ""
    ) -> None:
        """See `simulate_fleet`."""
        self.trace = trace
        self.block_size = shapes[0].block_size
        self.router = ReplicaRouter(policy, self.block_size)
        self.replicas = {
            f"r{index}": SimulatedReplica(f"r{index}", shape, SECRET)
            for index, shape in enumerate(shapes)
        }
        for replica, shape in zip(self.replicas, shapes, strict=True):
            self.router.add_replica(replica, shape.facts)
        self.report = FleetReport(name)
        self._chains = HashChains(SECRET, self.block_size)
        self._open: dict[str, _Asked] = {}
        self._ends: list[tuple[float, str]] = []
        self._next_told_s = TELL_EVERY_S
        self._told: dict[str, tuple[float, float]] = dict.fromkeys(self.replicas, (0.0, 0.0))
        self._block_tokens: dict[int, int] = {}
        self._num_blocks_seen = 0

    def run(self) -> FleetReport:
        """Run until every request has its last token."""
        requests, at = self.trace.requests, 0
        while at < len(requests) or self._ends:
            next_s = requests[at].at_s if at < len(requests) else float("inf")
            if self._ends and self._ends[0][0] <= next_s:
                now_s, name = heapq.heappop(self._ends)
                if now_s >= self._next_told_s:
                    self._report_slowness(now_s)
                self._end_step(self.replicas[name], now_s)
                continue
            # Add all requests with the same arrival time before any of their replicas begins a
            # step.
            woken: dict[str, None] = {}
            while at < len(requests) and requests[at].at_s <= next_s:
                if requests[at].end != "refused":
                    woken[self._arrive(at)] = None
                at += 1
            for name in woken:
                if not self.replicas[name].is_busy:
                    self._begin_step(self.replicas[name], next_s)
        self.report.busy_s = [replica.busy_s for replica in self.replicas.values()]
        return self.report

    def _report_slowness(self, now_s: float) -> None:
        self._next_told_s = now_s + TELL_EVERY_S
        for name, replica in self.replicas.items():
            busy_s, told_s = self._told[name]
            if replica.told_s - told_s >= LEAST_TOLD_S:
                slowness = (replica.busy_s - busy_s) / (replica.told_s - told_s)
                self.router.set_slowness(name, slowness, now_s)
                self._told[name] = replica.busy_s, replica.told_s

    def _arrive(self, number: int) -> str:
        request, request_id = self.trace.requests[number], str(number)
        token_ids = self.prompt(number)
        routed = RoutedRequest(request_id, self._chains.of_prompt(token_ids), len(token_ids))
        begun_s = time.perf_counter()
        name = self.router.place(routed, request.at_s)
        self.report.decisions_s.append(time.perf_counter() - begun_s)
        num_uncached = self.router.num_uncached_tokens(request_id)
        self.report.num_expected_tokens += len(token_ids) - num_uncached
        self.replicas[name].add(
            request_id, token_ids, max(1, request.num_output_tokens), request.at_s
        )
        self._open[request_id] = _Asked(request.at_s, len(token_ids))
        return name

    def prompt(self, number: int) -> list[int]:
        """Invent a request's token ids: one repeated token for each shared block of the trace,
        followed by unique tokens."""
        request, size = self.trace.requests[number], self.trace.block_tokens
        tokens: list[int] = []
        for prefix_id in request.prefix_ids:
            token = self._block_tokens.get(prefix_id)
            if token is None:
                token = self._block_tokens[prefix_id] = self._new_token()
            tokens += [token] * size
        del tokens[request.num_prompt_tokens :]
        missing = request.num_prompt_tokens - len(tokens)
        tokens += [self._new_token()] * missing
        return tokens or [self._new_token()]

    def _new_token(self) -> int:
        self._num_blocks_seen += 1
        return self._num_blocks_seen

    def _begin_step(self, replica: SimulatedReplica, now_s: float) -> None:
        end_s = replica.begin_step(now_s)
        if end_s is not None:
            heapq.heappush(self._ends, (end_s, replica.name))

    def _end_step(self, replica: SimulatedReplica, now_s: float) -> None:
        for output in replica.end_step():
            self._receive(output, now_s)
        self._begin_step(replica, now_s)

    def _receive(self, output: SequenceOutput, now_s: float) -> None:
        request_id, report = output.request_id, self.report
        entry = self._open[request_id]
        if entry.last_token_s is not None:
            report.itls_s.append(now_s - entry.last_token_s)
        else:
            report.ttfts_s.append(now_s - entry.at_s)
            report.num_prompt_tokens += entry.num_prompt_tokens
            report.num_hit_tokens += output.num_cached_tokens
            self.router.on_first_token(request_id, now_s)
        entry.last_token_s = now_s
        if output.finish_reason is not None:
            del self._open[request_id]
            self.router.on_end(request_id, now_s)
            report.end_s = now_s
