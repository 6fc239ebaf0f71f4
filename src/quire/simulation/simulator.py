"""Runs the engine on a virtual clock and checks all invariants of scheduler and memory.

Each request must get the same tokens as without other requests, even if requests are aborted,
preempted or fail. The states of all blocks are checked, and all blocks must be free at the end.
Runs with equal seeds are equal: the report has a digest of all plans and results.

`Engine.step` calls the scheduler and a runner that checks plans, and clients use `Engine.add`,
`fork` and `abort`. The simulated device is asynchronous: a step begins when it is launched and the
previous step has ended, and waiting for its result sets the clock to its end. KeyboardInterrupt may
interrupt a step before and after each call of the runner. A crash replaces the engine.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import time
from collections.abc import Callable, Iterable
from math import isclose

from quire.core.content_spans import longest_in_one_step
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.core.scheduling import invariants
from quire.core.scheduling.drafter_costs import DrafterCosts
from quire.core.scheduling.model_drafts import ModelDrafts
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence, make_sequences
from quire.core.step import StepPlan, StepResult
from quire.engine.adapter_work import AdapterWork
from quire.engine.content_work import ContentWork
from quire.engine.engine import Engine
from quire.errors import ConfigurationError, QuireError, RequestNeverFitsError
from quire.simulation.baselines import NoGrowth, WholePreemption
from quire.simulation.checked_device import CheckedDevice
from quire.simulation.clients import Client, Clients
from quire.simulation.fakes.fake_adapters import FakeAdapters
from quire.simulation.fakes.fake_grammar import fake_grammar_work
from quire.simulation.fakes.fake_runner import FakeRunner, Faults
from quire.simulation.fakes.fake_source import FakeSource
from quire.simulation.fakes.fake_speculator import FakeSpeculator
from quire.simulation.fakes.fake_tiers import FakeTiers, KeptContents, simulated_tier
from quire.simulation.plan_rows import plan_bytes
from quire.simulation.report import SimulationReport
from quire.simulation.step_time import StepTime
from quire.simulation.virtual_engine import VirtualClock
from quire.simulation.workload import Arrival, SimulationConfig, draw_arrivals, draw_fork

MAX_STEPS_WITHOUT_OUTPUT = 1000
MAX_IDLE_TURNS = 100_000  # a turn that waits for a tier takes 10 ms
NEVER_S = 1e6  # longer than any move takes


class SimulationError(AssertionError):
    """An invariant was broken. The exception's cause tells which."""

    def __init__(self, message: str, config: SimulationConfig, step_id: int) -> None:
        super().__init__(message)
        self.config = config
        #: The number of steps planned before the error.
        self.step_id = step_id


def run(config: SimulationConfig) -> SimulationReport:
    """Run a simulation. Raises SimulationError if an invariant is broken."""
    return run_simulator(Simulator(config))


def run_simulator(simulator: Simulator) -> SimulationReport:
    """Run a simulation that has been prepared; see `run`."""
    config = simulator.config
    started_s = time.perf_counter()
    try:
        simulator.run()
    except (AssertionError, QuireError, NotImplementedError) as error:
        step_id = simulator.report.num_steps
        message = f"seed {config.seed}, after {step_id} steps: {type(error).__name__}: {error}"
        raise SimulationError(message, config, step_id) from error
    report = simulator.report
    report.steps_per_s = report.num_steps / max(1e-9, time.perf_counter() - started_s)
    return report


class Simulator:
    """One simulation. Tests may replace its public attributes before they call `run`."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.report = SimulationReport(config.seed)
        self.step_time = StepTime(
            config.slow_rate, config.seed, config.step_base_s, config.step_token_s
        )
        self.clock = VirtualClock()
        self._kept = KeptContents()
        self._start_engine()
        _check_room(config, self.memory)
        self._arrivals = draw_arrivals(config)
        self._next_arrival = next(self._arrivals, None)
        self.clients = Clients(config, self.report)
        self._rng = random.Random(f"forks of {config.seed}")
        self._crash_rng = random.Random(f"crashes of {config.seed}")
        self._interrupt_rng = random.Random(f"interrupts of {config.seed}")
        self._last_output_at = 0
        self._aborts: list[tuple[int, bool, str, int]] = []  # (turn, is_between, request, branch)
        self._turn = self._num_idle_turns = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def _start_engine(self) -> None:
        """Make a new engine, at the start and after each crash."""
        # First the runner, the memory and the scheduler, then the engine around them.
        config = self.config
        self.runner = _make_runner(config, self.report.num_crashes)
        make_memory = WholePreemption if config.preempts_whole else KVCacheManager
        self.memory = make_memory(
            KVCacheConfig(
                config.groups,
                config.num_blocks,
                config.block_size,
                config.enable_prefix_caching,
                secret=b"simulation",
                eviction=config.eviction,
                tiers=_make_tiers(self, self._kept),
            )
        )
        if self.memory.moves is not None:
            self.memory.moves.stores.delay_s = simulated_tier(config.tier).settle_s
        if config.snapshot_tokens:
            self.memory.snapshots.interval = config.snapshot_tokens
        self.adapters, self.contents = _make_adapters(self), _make_contents(self)
        self.runner.rows.take_adapter = self.adapters.pop_ready
        self.runner.rows.take_content = self.contents.pop_ready
        self.scheduler = Scheduler(
            SchedulerConfig(
                config.max_num_seqs,
                config.max_num_batched_tokens,
                config.num_lookahead_blocks,
            ),
            self.memory,
            POLICIES.make(config.policy, dict(config.policy_options)),
            None if config.forecasts else NoGrowth(),
            Residency(config.max_loras, self.adapters),
            Residency(config.num_content_slots, self.contents),
            _make_proposer(self),
            ModelDrafts(DrafterCosts(1e-3, 1e-4, 1e-5), config.max_model_len)
            if config.has_drafter
            else None,
        )
        if config.max_itl_ratio:
            model = self.step_time.make_model(config.predicted_ratio)
            self.scheduler.pacer = StepPacer(PacingConfig(config.max_itl_ratio), model)
        self.engine = Engine(
            self.scheduler,
            CheckedDevice(self, self.runner, self.clock),
            # Include the token ids that inject failures, which follow the vocabulary.
            ModelLimits(
                config.nan_token_id + 1,
                config.max_model_len,
                max_content_tokens=config.max_model_len,
            ),
            clock=self.clock,
            overlap=bool(config.overlap),
        )
        self.engine.grammars = fake_grammar_work(config.vocab_size)
        self.engine.adapters = AdapterWork(self.scheduler, self.adapters)
        self.engine.contents = ContentWork(self.scheduler, simulated=self.contents)
        self._started_s = self.clock.now_s

    def run(self) -> None:
        """Run until every request was answered."""
        while (
            self._next_arrival
            or self.scheduler.has_unfinished
            or self.scheduler.num_steps_in_flight
        ):
            self._turn += 1
            self._crash_now_and_then()
            self._admit_arrivals()
            self._abort_due(is_between=False)
            self._fork_now_and_then()
            has_planned = self._step()
            self._num_idle_turns = 0 if has_planned else self._num_idle_turns + 1
            assert self._num_idle_turns < MAX_IDLE_TURNS, "nothing is planned any more"
            if not has_planned and not self.scheduler.has_unfinished and self._next_arrival:
                self.clock.wait_until(self._next_arrival.at_s)
        self._finish()

    # ---- one turn ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Let the engine step. Returns whether a step was planned and no step failed."""
        num_steps, num_failed = self.report.num_steps, self.scheduler.stats.num_failed_steps
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
        assert self.scheduler.num_steps_in_flight <= self.config.overlap
        self._check()
        self._receive(outputs)
        has_failed = self.scheduler.stats.num_failed_steps > num_failed
        return self.report.num_steps > num_steps and not has_failed

    def on_sampled(self) -> None:
        """Let clients abort requests while a step is in flight."""
        self._abort_due(is_between=True)

    def on_result(self, result: StepResult) -> None:
        """Add a result to the digest."""
        self._digest.update(_result_bytes(result))

    def interrupt_now_and_then(self) -> None:
        """Raise KeyboardInterrupt with the probability `interrupt_rate` of the config."""
        if self._interrupt_rng.random() < self.config.interrupt_rate:
            self.report.num_interrupts += 1
            raise KeyboardInterrupt

    def on_plan(self, plan: StepPlan) -> float:
        """Check and count a plan before it is executed; returns the seconds of its step."""
        self._check()
        num_beyond = _num_beyond_budget(plan, self.scheduler.running)
        assert plan.num_tokens <= self.config.max_num_batched_tokens + num_beyond
        assert plan.num_rows <= self.config.max_num_seqs
        self._digest.update(plan_bytes(plan))
        self.report.count_plan(plan, len(self.scheduler.waiting))
        return self.step_time.draw_s(plan.num_tokens)

    def _check(self) -> None:
        if self.report.num_steps % self.config.check_every == 0:
            invariants.check_scheduler(self.scheduler)
        if self.report.num_steps % (16 * self.config.check_every) == 0:
            num_bytes = sum(group.bytes_per_block for group in self.config.groups[:1])
            total = self.config.num_blocks * num_bytes
            assert self.engine.memory_report().total_bytes == total

    # ---- clients ----------------------------------------------------------------------------

    def _admit_arrivals(self) -> None:
        config, waiting = self.config, self.scheduler.waiting
        if config.num_steps is not None and self.report.num_steps >= config.num_steps:
            self._next_arrival = None
        while (
            self._next_arrival
            and self._next_arrival.at_s <= self.clock.now_s
            and len(waiting) < config.max_num_waiting
        ):
            arrival, self._next_arrival = self._next_arrival, next(self._arrivals, None)
            self.report.num_requests += 1
            self._add(arrival)
        self._check()

    def _add(self, arrival: Arrival) -> None:
        request = arrival.request
        if not self._is_accepted(_longest(request, self.config), lambda: self.engine.add(request)):
            return
        entered = self.engine.sequences(request.request_id)
        self.report.num_beams += request.params.beam_width > 0
        self.report.num_constrained += request.params.grammar is not None
        self.clients.add(request, entered, self.clock.now_s)
        for branch_index in range(len(entered)):
            self._plan_abort(arrival, branch_index)

    def _crash_now_and_then(self) -> None:
        """Crash at random: replace the engine, then resubmit the requests that clients wait for."""
        if self._crash_rng.random() >= self.config.crash_rate:
            return
        self.report.add_counts(self.scheduler)
        self.report.num_crashes += 1
        self._start_engine()
        for request, clients in self.clients.cut_off(self.clock.now_s):
            self._resume(request, clients)
            self.report.num_resumed += len(clients)
        self._check()

    def _resume(self, request: Request, clients: list[Client]) -> None:
        """Submit a request to a new engine, and give its clients their new sequences."""
        request = self.clients.resumed(request, clients)
        self.engine.add(request)
        sequences = self.engine.sequences(request.request_id)
        made = {sequence.branch_index: sequence for sequence in sequences}
        for client in clients:  # a beam search begins with one sequence
            client.sequence = made.get(client.branch_index, sequences[0])

    def _is_accepted(self, sequence: Sequence, add: Callable[[], object]) -> bool:
        """Add a sequence, and check that it is refused only if it does not fit into the empty pool.

        Returns whether it was accepted.
        """
        width = max(1, sequence.params.beam_width)
        # The last token needs no room, since its K and V are never written.
        needed = width * self.memory.growth.most_to_hold(
            sequence.max_num_tokens - 1, sequence.num_together
        )
        can_fit = needed <= self.memory.pool.num_blocks and width <= self.config.max_num_seqs
        try:
            add()
        except RequestNeverFitsError:
            assert not can_fit, f"{sequence} was refused, but needs only {needed} blocks"
            self.report.num_refused += 1
            return False
        assert can_fit, f"{sequence} was accepted, but may need {needed} blocks"
        return True

    def _fork_now_and_then(self) -> None:
        """At random, fork the sequence of a random client, while requests still arrive."""
        if self._next_arrival is None or self._rng.random() >= self.config.fork_rate:
            return
        client = self.clients.choose_to_fork(self._rng)
        if client is None or len(self.scheduler.waiting) >= self.config.max_num_waiting:
            return
        parent = client.sequence
        params = draw_fork(self._rng, client.request.params, parent.num_output_tokens)
        index = self.clients.next_branch_index(parent.request_id)
        if self._is_accepted(
            parent.branch(index, params),
            lambda: self.engine.fork(parent.request_id, parent.branch_index, params),
        ):
            self.report.num_forks += 1
            child = self.engine.sequences(parent.request_id)[-1]
            assert child.branch_index == index, f"{child} of {parent} should be branch {index}"
            self.clients.add_fork(client, child, self.clock.now_s)
            if self._rng.random() < self.config.abort_rate:
                due = self._turn + self._rng.randint(0, self.config.max_abort_age_steps)
                heapq.heappush(self._aborts, (due, False, parent.request_id, index))
        self._check()

    def _plan_abort(self, arrival: Arrival, branch_index: int) -> None:
        if arrival.abort_age_steps is not None:
            due = self._turn + arrival.abort_age_steps, arrival.is_between
            heapq.heappush(self._aborts, (*due, arrival.request.request_id, branch_index))

    def _abort_due(self, is_between: bool) -> None:
        """Make the aborts that are due now. `is_between`: now is between planning and result, not
        before planning."""
        while self._aborts and self._aborts[0][:2] <= (self._turn, is_between):
            client = self.clients.find(heapq.heappop(self._aborts)[2:])
            if client is None:
                continue
            sequence = client.sequence
            if sequence.is_finished and not self.scheduler.beams.is_searching(sequence.request_id):
                continue  # its adapter or content can't be read, and the error is on its way
            state = sequence.state.value
            if client.sequence.num_pending_tokens:
                state += " in flight"
            branch_index = None if client.sequence.is_beam else client.branch_index
            self.engine.abort(client.sequence.request_id, branch_index)
            self.clients.end_aborted(client)
            aborted_in = self.report.aborted_in
            aborted_in[state] = aborted_in.get(state, 0) + 1
            self._check()

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        self.clients.receive(outputs, self.clock.now_s)
        if outputs:
            self._last_output_at = self.report.num_steps
        num_steps = self.report.num_steps - self._last_output_at
        assert num_steps < MAX_STEPS_WITHOUT_OUTPUT, f"no output for {num_steps} steps"

    # ---- the end ----------------------------------------------------------------------------

    def _finish(self) -> None:
        assert not self.engine.has_work()
        assert self.engine.tier_work.wait_for_moves(NEVER_S), "moves are under way that never end"
        invariants.check_idle(self.scheduler)
        self.clients.check_all_answered()
        forgotten = not self.engine._requests and not self.engine.times._first_tokens
        assert forgotten, "the engine remembers requests that have ended"
        self._check_times()
        self.report.add_counts(self.scheduler)
        self.report.virtual_s = round(self.clock.now_s, 6)
        self.report.digest = self._digest.hexdigest()

    def _check_times(self) -> None:
        """Check that the engine's busy, gap and idle times add up to the time since its start."""
        found = self.engine.stats().utilization
        times_s = [found[name] for name in ("busy_s", "gap_s", "idle_s")]
        passed_s = self.clock.now_s - self._started_s
        assert min(times_s) >= 0 and isclose(sum(times_s), passed_s, abs_tol=1e-6), found


def _make_runner(config: SimulationConfig, num_crashes: int) -> FakeRunner:
    return FakeRunner(
        config.groups,
        config.num_blocks,
        config.block_size,
        max_num_rows=config.max_num_seqs,
        max_num_tokens=config.max_model_len + 1,
        model=config.model,
        faults=Faults(
            step_failure_rate=config.step_failure_rate,
            seed=config.seed + num_crashes,
            poison_token_id=config.poison_token_id,
            nan_token_id=config.nan_token_id,
        ),
        draft_error_rate=config.draft_error_rate,
    )


def _make_tiers(simulator: Simulator, kept: KeptContents) -> FakeTiers | None:
    """The simulated tiers for the blocks of the simulator's runner; None without tiers."""
    config = simulator.config
    if not config.tier:
        return None
    rng = random.Random(f"tiers of {config.seed}, {simulator.report.num_crashes}")
    store, clock = simulator.runner.store, simulator.clock
    return FakeTiers(kept, store, simulated_tier(config.tier), rng, clock, clock.wait_until)


def _make_adapters(simulator: Simulator) -> FakeAdapters:
    rng = random.Random(f"adapters of {simulator.config.seed}, {simulator.report.num_crashes}")
    return FakeAdapters(rng, simulator.clock, simulator.clock.wait_until)


def _make_proposer(simulator: Simulator) -> FakeSpeculator | None:
    config = simulator.config
    if not config.max_drafts:
        return None
    return FakeSpeculator(
        config.model,
        most=config.max_drafts,
        error_rate=config.draft_error_rate,
        seed=config.seed,
    )


def _make_contents(simulator: Simulator) -> FakeSource:
    rng = random.Random(f"contents of {simulator.config.seed}, {simulator.report.num_crashes}")
    return FakeSource(rng, simulator.clock, simulator.clock.wait_until, instant_rate=0.3)


def _num_beyond_budget(plan: StepPlan, running: Iterable[Sequence]) -> int:
    """Maximum number of tokens by which a step may exceed its budget, for one content that is
    computed in one step."""
    chunks = set(plan.chunked_rows)
    lengths = [longest_in_one_step(each.content_spans) for each in running if each.row in chunks]
    return max(0, max(lengths, default=0) - 1)


def _longest(request: Request, config: SimulationConfig) -> Sequence:
    """A sequence like the first of a request, to know its bounds before it is accepted."""
    return make_sequences(request, config.max_model_len, b"", 0.0)[0][0]


def _check_room(config: SimulationConfig, memory: KVCacheManager) -> None:
    """Raises ConfigurationError if even the shortest request would be refused. The simulation would
    then never reach its number of steps."""
    shortest = config.prompt_tokens[0] + config.output_tokens[0] - 1
    least = memory.growth.most_to_hold(shortest)
    if least > config.num_blocks:
        raise ConfigurationError(
            f"num_blocks is {config.num_blocks}, but the shortest request takes {least} blocks of"
            f" {config.kinds or 'these groups'}; give as many, or shorter prompts and outputs"
        )


def _result_bytes(result: StepResult) -> bytes:
    """The bytes of a result for the digest. Log-probabilities are left out, since they depend on
    the tokens only."""
    return repr((result.step_id, result.rows, result.token_ids)).encode()
