"""Runs the real scheduler and memory on a virtual clock and checks all laws as it goes.

Every request must get exactly the tokens that it would get alone, whatever arrives, is aborted,
preempted or fails beside it; every block must be accounted for; and nothing may be held at the end.
A seed replays exactly: the report carries a digest of all plans and results.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from dataclasses import dataclass, field

from quire.core import invariants
from quire.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.policy import find_policy
from quire.core.request import FinishReason, SequenceOutput
from quire.core.scheduler import Scheduler, SchedulerConfig
from quire.core.sequence import Sequence
from quire.core.step import StepPlan, StepResult
from quire.errors import QuireError, RequestNeverFitsError
from quire.simulation.fake_model import ExpectedOutput
from quire.simulation.fake_runner import FakeRunner, Faults, InjectedFailureError
from quire.simulation.workload import Arrival, SimulationConfig, draw_arrivals

STEP_BASE_S = 0.01
STEP_TOKEN_S = 0.0005


class SimulationError(AssertionError):
    """A law was broken. `__cause__` says which; `step_id` when."""

    def __init__(self, message: str, step_id: int) -> None:
        super().__init__(message)
        self.step_id = step_id


@dataclass(slots=True)
class SimulationReport:
    """What happened. Equal configs give equal reports, but for steps_per_s (wall clock).

    num_sequences: branches of the requests that were accepted. aborted_in: state -> how many.
    digest: over all plans and results, in order.
    """

    seed: int
    num_steps: int = 0
    num_requests: int = 0
    num_sequences: int = 0
    num_refused: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    aborted_in: dict[str, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_failed_steps: int = 0
    max_num_waiting: int = 0
    max_num_running: int = 0
    virtual_s: float = 0.0
    digest: str = ""
    steps_per_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _Client:
    """One sequence as its client sees it: what must come, and how much of it has come."""

    arrival: Arrival
    sequence: Sequence
    expected: ExpectedOutput
    num_received: int = 0


def run(config: SimulationConfig) -> SimulationReport:
    """Simulate. Raises SimulationError, with the step and its cause, where a law is broken."""
    simulator = Simulator(config)
    started_s = time.perf_counter()
    try:
        simulator.run()
    except (AssertionError, QuireError, NotImplementedError) as error:
        step_id = simulator.report.num_steps
        message = f"seed {config.seed}, after {step_id} steps: {type(error).__name__}: {error}"
        raise SimulationError(message, step_id) from error
    report = simulator.report
    report.steps_per_s = report.num_steps / max(1e-9, time.perf_counter() - started_s)
    return report


class Simulator:
    """One run. `run` does it all; the parts are public for tests that break something first."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.report = SimulationReport(config.seed)
        self.memory = KVCacheManager(
            KVCacheConfig(
                config.groups,
                config.num_blocks,
                config.block_size,
                config.enable_prefix_caching,
                secret=b"simulation",
            )
        )
        self.scheduler = Scheduler(
            SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens),
            self.memory,
            find_policy(config.policy),
        )
        self.runner = FakeRunner(
            config.groups,
            config.num_blocks,
            config.block_size,
            max_num_rows=config.max_num_seqs,
            max_num_tokens=config.max_model_len + 1,
            model=config.model,
            faults=Faults(
                step_failure_rate=config.step_failure_rate,
                seed=config.seed,
                poison_token_id=config.poison_token_id,
                nan_token_id=config.nan_token_id,
            ),
        )
        self.now_s = 0.0
        self._arrivals = draw_arrivals(config)
        self._next_arrival = next(self._arrivals, None)
        # Those who are not answered yet.
        self._clients: dict[tuple[str, int], _Client] = {}
        self._aborts: list[tuple[int, bool, str, int]] = []  # (turn, is_between, request, branch)
        self._turn = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def run(self) -> None:
        """Until every request was answered."""
        scheduler = self.scheduler
        while self._next_arrival or scheduler.has_unfinished or scheduler.num_steps_in_flight:
            self._turn += 1
            self._take_arrivals()
            self._abort_due(is_between=False)
            plan = self._step()
            if plan is None and not scheduler.has_unfinished and self._next_arrival:
                self.now_s = max(self.now_s, self._next_arrival.at_s)
        self._finish()

    # ---- one turn ---------------------------------------------------------------------------

    def _step(self) -> StepPlan | None:
        """Plan and execute a step; take in the oldest result unless one may stay in flight."""
        try:
            plan = self._execute() if self.scheduler.has_unfinished else None
            self._abort_due(is_between=True)
            in_flight = self.scheduler.num_steps_in_flight
            if in_flight > self.config.overlap or (in_flight and plan is None):
                self._take_in(self.runner.result())
        except InjectedFailureError as failure:
            self.runner.reset()
            self._receive(self.scheduler.recover(str(failure)))
            self._check()
            return None
        return plan

    def _execute(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        self._check()
        if plan is None:
            return None
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert plan.num_rows <= self.config.max_num_seqs
        self._digest.update(_plan_bytes(plan))
        self.now_s += STEP_BASE_S + STEP_TOKEN_S * plan.num_tokens
        report = self.report
        report.num_steps += 1
        report.max_num_running = max(report.max_num_running, plan.num_rows)
        report.max_num_waiting = max(report.max_num_waiting, len(self.scheduler.waiting))
        self.runner.execute(plan)
        self.runner.sample()
        return plan

    def _take_in(self, result: StepResult) -> None:
        self._digest.update(repr((result.step_id, result.rows, result.token_ids)).encode())
        outputs = self.scheduler.apply(result)
        self._check()
        self._receive(outputs)

    def _check(self) -> None:
        if self.report.num_steps % self.config.check_every == 0:
            invariants.check_scheduler(self.scheduler)

    # ---- clients ----------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        if self.config.num_steps is not None and self.report.num_steps >= self.config.num_steps:
            self._next_arrival = None
        while self._next_arrival and self._next_arrival.at_s <= self.now_s:
            arrival, self._next_arrival = self._next_arrival, next(self._arrivals, None)
            self.report.num_requests += 1
            for branch_index in range(arrival.request.n):
                self._add(arrival, branch_index)
        self._check()

    def _add(self, arrival: Arrival, branch_index: int) -> None:
        request, limit = arrival.request, self.config.max_model_len
        sequence = Sequence(
            request.request_id,
            list(request.prompt_token_ids),
            request.params,
            branch_index=branch_index,
            priority=request.priority,
            max_num_tokens=limit,
            chain_root=self.memory.start_chain(request.cache_domain),
        )
        # The last token is sampled, but its K and V are never written.
        needed = self.memory.blocks_for(sequence.max_num_tokens - 1)
        can_fit = needed <= self.memory.pool.num_blocks
        try:
            self.scheduler.add(sequence, self.now_s)
        except RequestNeverFitsError:
            assert not can_fit, f"{sequence} was refused, but needs only {needed} blocks"
            self.report.num_refused += 1
            return
        assert can_fit, f"{sequence} was accepted, but may need {needed} blocks"
        expected = self.config.model.expected_output(request, branch_index, limit)
        self._clients[request.request_id, branch_index] = _Client(arrival, sequence, expected)
        self.report.num_sequences += 1
        if arrival.abort_age_steps is not None:
            due = (self._turn + arrival.abort_age_steps, arrival.is_between)
            heapq.heappush(self._aborts, (*due, request.request_id, branch_index))

    def _abort_due(self, is_between: bool) -> None:
        """Abort those whose moment has come; between planning and result, or before planning."""
        while self._aborts and self._aborts[0][:2] <= (self._turn, is_between):
            _, _, request_id, branch_index = heapq.heappop(self._aborts)
            client = self._clients.get((request_id, branch_index))
            if client is None:
                continue
            state = client.sequence.state.value
            if client.sequence.num_pending_tokens:
                state += " in flight"
            self.scheduler.abort(client.sequence)
            self._end(client, FinishReason.ABORT)
            aborted_in = self.report.aborted_in
            aborted_in[state] = aborted_in.get(state, 0) + 1
            self._check()

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            client = self._clients.get((output.request_id, output.branch_index))
            assert client is not None, f"{output} came after the end"
            first = client.num_received
            last = first + len(output.token_ids)
            expected = client.expected
            assert tuple(output.token_ids) == expected.token_ids[first:last], (
                f"{client.sequence} got {output.token_ids} at {first}, not"
                f" {expected.token_ids[first:last]}"
            )
            client.num_received = last
            self._check_extras(output, expected, first, last)
            if output.finish_reason is not None:
                self._check_end(client, output)
                self._end(client, output.finish_reason)

    def _check_extras(
        self, output: SequenceOutput, expected: ExpectedOutput, first: int, last: int
    ) -> None:
        if output.error is not None:
            return
        wanted = None if expected.logprobs is None else expected.logprobs[first:last]
        got = None if output.logprobs is None else tuple(output.logprobs)
        assert got == wanted, f"log-probabilities {got}, not {wanted}"
        wanted = expected.prompt_logprobs if first == 0 else None
        got = None if output.prompt_logprobs is None else tuple(output.prompt_logprobs)
        assert got == wanted, f"log-probabilities of the prompt {got}, not {wanted}"

    def _check_end(self, client: _Client, output: SequenceOutput) -> None:
        config, prompt = self.config, client.arrival.request.prompt_token_ids
        is_faulty = prompt[-1] in (config.poison_token_id, config.nan_token_id)
        if output.finish_reason is FinishReason.ERROR:
            assert output.error, f"{output} failed without a reason"
            assert is_faulty or config.step_failure_rate, f"{output} failed without a fault"
            return
        assert not is_faulty, f"{output} should have failed"
        assert output.finish_reason is client.expected.finish_reason, output
        assert client.num_received == len(client.expected.token_ids), output
        stop_ids = client.arrival.request.params.stop_token_ids
        is_stop = output.finish_reason is FinishReason.STOP and output.token_ids[-1] in stop_ids
        assert output.stop_reason == (output.token_ids[-1] if is_stop else None), output

    def _end(self, client: _Client, reason: FinishReason) -> None:
        del self._clients[client.sequence.request_id, client.sequence.branch_index]
        finished = self.report.finished
        finished[reason.value] = finished.get(reason.value, 0) + 1
        self.report.num_output_tokens += client.num_received

    # ---- the end ----------------------------------------------------------------------------

    def _finish(self) -> None:
        invariants.check_idle(self.scheduler)
        unanswered = [client.sequence for client in self._clients.values()]
        assert not unanswered, f"never answered: {unanswered}"
        report, stats = self.report, self.scheduler.stats
        report.num_preemptions = stats.num_preemptions
        report.num_recomputed_tokens = stats.num_recomputed_tokens
        report.num_failed_steps = stats.num_failed_steps
        report.num_hit_tokens = self.memory.num_hit_tokens
        report.num_evicted_blocks = self.memory.num_evicted_blocks
        report.virtual_s = round(self.now_s, 6)
        report.digest = self._digest.hexdigest()


def _plan_bytes(plan: StepPlan) -> bytes:
    """All that a plan says, in words that are the same in every process."""
    admissions = [(*admission[:5], admission.branch_index) for admission in plan.admit]
    edits = [(edit[0], edit[1], edit.kind.value, *edit[3:]) for edit in plan.table_edits]
    chunks = [tuple(chunk) for chunk in plan.chunks]
    head = (plan.step_id, plan.num_rows, plan.num_tokens, plan.release)
    return repr((head, admissions, edits, chunks, plan.copies, plan.moves)).encode()
