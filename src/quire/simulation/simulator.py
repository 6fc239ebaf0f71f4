"""Runs the scheduler and memory on a virtual clock and checks all their invariants.

Each request must get the same tokens as without other requests, even if requests are aborted,
preempted or fail. The states of all blocks are checked, and all blocks must be free at the end.
Runs with equal seeds are equal: the report has a digest of all plans and results.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import time
from collections.abc import Callable

from quire.core.adapters import BASE_MODEL
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.scheduler import Scheduler, fail_item
from quire.core.sequence import Sequence, make_sequences
from quire.core.step import StepPlan, StepResult
from quire.engine.tier_work import TierWork
from quire.errors import ConfigurationError, QuireError, RequestNeverFitsError
from quire.simulation.baselines import NoGrowth, WholePreemption
from quire.simulation.clients import Clients
from quire.simulation.fakes.fake_adapters import FakeAdapters
from quire.simulation.fakes.fake_grammar import fake_grammar_work
from quire.simulation.fakes.fake_proposer import FakeProposer
from quire.simulation.fakes.fake_runner import FakeRunner, Faults, InjectedFailureError
from quire.simulation.fakes.fake_tiers import FakeTiers, KeptContents, simulated_tier
from quire.simulation.report import SimulationReport
from quire.simulation.step_time import StepTime
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
        self.now_s = 0.0
        self._kept = KeptContents()
        self._start_engine()
        _check_room(config, self.memory)
        self._arrivals = draw_arrivals(config)
        self._next_arrival = next(self._arrivals, None)
        self.clients = Clients(config, self.report)
        self._rng = random.Random(f"forks of {config.seed}")
        self._crash_rng = random.Random(f"crashes of {config.seed}")
        self._last_output_at = 0
        self._aborts: list[tuple[int, bool, str, int]] = []  # (turn, is_between, request, branch)
        self._turn = self._num_idle_turns = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def _start_engine(self) -> None:
        """Make a new scheduler, memory and runner, at the start and after each crash."""
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
        self._tier_work = TierWork(self.memory, lambda: self.now_s)
        if config.snapshot_tokens:
            self.memory.snapshots.interval = config.snapshot_tokens
        self.adapters = _make_adapters(self)
        self.runner.take_adapter = self.adapters.pop_ready
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
            proposer=_make_proposer(self),
        )
        self.grammars = fake_grammar_work(config.vocab_size)
        if config.max_itl_ratio:
            model = self.step_time.make_model(config.predicted_ratio)
            self.scheduler.pacer = StepPacer(PacingConfig(config.max_itl_ratio), model)

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
                self.now_s = max(self.now_s, self._next_arrival.at_s)
        self._finish()

    # ---- calls that `EngineSimulator` passes to an engine -----------------------------------

    def _enter(self, request: Request, branches: list[Sequence]) -> list[Sequence]:
        """Add a request; returns its sequences: `branches`, or the engine's equal sequences."""
        for group in self.grammars.begin(self.scheduler, [branches], self.now_s):
            self.scheduler.add(group, self.now_s)
        return branches

    def _fork(self, parent: Sequence, branch_index: int, params: DecodingParams) -> Sequence:
        constraint = self.grammars.fork(parent, params)
        child = self.scheduler.fork(parent, branch_index, params, self.now_s)
        child.constraint = constraint
        return child

    def _abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)

    # ---- one turn ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Plan and execute a step, and apply the oldest result unless its step may stay in flight.

        Returns whether a step was planned and no step failed.
        """
        for digest, message in self.adapters.pop_failed().items():
            self._receive(fail_item(self.scheduler, digest, message))
        try:
            plan = self._execute() if self.scheduler.has_unfinished else None
            self._abort_due(is_between=True)
            in_flight = self.scheduler.num_steps_in_flight
            if in_flight > self.config.overlap or (in_flight and plan is None):
                result = self.runner.result()
                self._digest.update(result_bytes(result))
                outputs = self.scheduler.apply(result)
                self._check()
                self._receive(outputs)
            elif plan is None:
                self._tier_work.wait()
                self.adapters.wait()
        except InjectedFailureError as failure:
            self.runner.reset()
            self._receive(self.scheduler.recover(str(failure)))
            self._check()
            return False
        return plan is not None

    def _execute(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        self._check()
        if plan is None:
            return None
        seconds = self._check_plan(plan)
        self.now_s += seconds
        masks = self.grammars.begin_masks(plan.step_id, self.scheduler.running)
        self.runner.execute(plan)
        self.runner.sample(masks.collect())
        self.scheduler.pacer.observe(plan.step_id, seconds)
        self._tier_work.observe(plan.step_id, seconds)
        return plan

    def _check_plan(self, plan: StepPlan) -> float:
        """Check and count a plan; returns the seconds of its step."""
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert plan.num_rows <= self.config.max_num_seqs
        self._digest.update(_plan_bytes(plan))
        self.report.count_plan(plan, len(self.scheduler.waiting))
        return self.step_time.draw_s(plan.num_tokens)

    def _check(self) -> None:
        if self.report.num_steps % self.config.check_every == 0:
            invariants.check_scheduler(self.scheduler)

    # ---- clients ----------------------------------------------------------------------------

    def _admit_arrivals(self) -> None:
        config, waiting = self.config, self.scheduler.waiting
        if config.num_steps is not None and self.report.num_steps >= config.num_steps:
            self._next_arrival = None
        while (
            self._next_arrival
            and self._next_arrival.at_s <= self.now_s
            and len(waiting) < config.max_num_waiting
        ):
            arrival, self._next_arrival = self._next_arrival, next(self._arrivals, None)
            self.report.num_requests += 1
            self._add(arrival)
        self._check()

    def _add(self, arrival: Arrival) -> None:
        request = arrival.request
        (branches,) = self._make_sequences(request)
        entered: list[Sequence] = []
        if not self._is_accepted(
            branches[0], lambda: entered.extend(self._enter(request, branches))
        ):
            return
        self.report.num_beams += request.params.beam_width > 0
        self.report.num_constrained += request.params.grammar is not None
        self.clients.add(request, entered, self.now_s)
        for branch_index in range(len(branches)):
            self._plan_abort(arrival, branch_index)

    def _make_sequences(self, request: Request) -> list[list[Sequence]]:
        adapter = BASE_MODEL if request.adapter is None else request.adapter.digest
        root = self.memory.prefixes.start_chain(request.cache_domain, adapter)
        return make_sequences(request, self.config.max_model_len, root, self.now_s)

    def _crash_now_and_then(self) -> None:
        """Crash at random: replace the engine, then resubmit the requests that clients wait for."""
        if self._crash_rng.random() >= self.config.crash_rate:
            return
        self.report.add_counts(self.scheduler)
        self.report.num_crashes += 1
        self._start_engine()
        for request, clients in self.clients.cut_off(self.now_s):
            groups = self._make_sequences(request)
            made = {sequence.branch_index: sequence for group in groups for sequence in group}
            for client in clients:  # a beam search begins with one sequence
                client.sequence = made.get(client.branch_index, groups[0][0])
            for group in self.grammars.begin(self.scheduler, groups, self.now_s):
                self.scheduler.add(group, self.now_s)
            self.report.num_resumed += len(clients)
        self._check()

    def _is_accepted(self, sequence: Sequence, add: Callable[[], object]) -> bool:
        """Add a sequence, and check that it is refused only if it does not fit into the empty pool.

        Returns whether it was accepted.
        """
        width = max(1, sequence.params.beam_width)
        # The last token needs no room, since its K and V are never written.
        needed = width * self.memory.growth.most_to_hold(
            sequence.max_num_tokens - 1, in_one_step=sequence.is_in_one_step
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
        made: list[Sequence] = []
        if self._is_accepted(
            parent.branch(index, params),
            lambda: made.append(self._fork(parent, index, params)),
        ):
            self.report.num_forks += 1
            self.clients.add_fork(client, made[0], self.now_s)
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
            state = client.sequence.state.value
            if client.sequence.num_pending_tokens:
                state += " in flight"
            self._abort(client.sequence)
            self.clients.end_aborted(client)
            aborted_in = self.report.aborted_in
            aborted_in[state] = aborted_in.get(state, 0) + 1
            self._check()

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        self.clients.receive(outputs, self.now_s)
        if outputs:
            self._last_output_at = self.report.num_steps
        num_steps = self.report.num_steps - self._last_output_at
        assert num_steps < MAX_STEPS_WITHOUT_OUTPUT, f"no output for {num_steps} steps"

    # ---- the end ----------------------------------------------------------------------------

    def _finish(self) -> None:
        assert self._tier_work.wait_for_moves(NEVER_S), "moves are under way that never end"
        invariants.check_idle(self.scheduler)
        self.clients.check_all_answered()
        self.report.add_counts(self.scheduler)
        self.report.virtual_s = round(self.now_s, 6)
        self.report.digest = self._digest.hexdigest()


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
    )


def _make_tiers(simulator: Simulator, kept: KeptContents) -> FakeTiers | None:
    """The simulated tiers for the blocks of the simulator's runner; None without tiers."""
    config = simulator.config
    if not config.tier:
        return None

    wait_until = _waiting(simulator)
    rng = random.Random(f"tiers of {config.seed}, {simulator.report.num_crashes}")
    store = simulator.runner.store
    tier = simulated_tier(config.tier)
    return FakeTiers(kept, store, tier, rng, lambda: simulator.now_s, wait_until)


def _make_adapters(simulator: Simulator) -> FakeAdapters:
    rng = random.Random(f"adapters of {simulator.config.seed}, {simulator.report.num_crashes}")
    return FakeAdapters(rng, lambda: simulator.now_s, _waiting(simulator))


def _make_proposer(simulator: Simulator) -> FakeProposer | None:
    config = simulator.config
    if not config.max_drafts:
        return None
    return FakeProposer(
        config.model,
        most=config.max_drafts,
        error_rate=config.draft_error_rate,
        seed=config.seed,
    )


def _waiting(simulator: Simulator) -> Callable[[float], None]:
    """A function that moves a simulator's clock forward to a time, but never back."""

    def wait_until(at_s: float) -> None:
        simulator.now_s = max(simulator.now_s, at_s)

    return wait_until


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


def result_bytes(result: StepResult) -> bytes:
    """The bytes of a result for the digest. Log-probabilities are left out, since they depend on
    the tokens only."""
    return repr((result.step_id, result.rows, result.token_ids)).encode()


def _plan_bytes(plan: StepPlan) -> bytes:
    """The bytes of a plan for the digest. They are equal in different processes."""
    admissions = [(*admission[:5], admission.branch_index) for admission in plan.admit]
    forks = [(fork.row, fork.source_row, fork.branch_index, fork.joins_step) for fork in plan.forks]
    token_edits = [tuple(edit) for edit in plan.token_edits]
    edits = [(edit[0], edit[1], edit.kind.value, *edit[3:]) for edit in plan.table_edits]
    chunks = [tuple(chunk) for chunk in plan.chunks]
    head = (plan.step_id, plan.num_rows, plan.num_tokens, plan.release)
    rows = (admissions, forks, token_edits, edits, chunks)
    loads = (plan.adapter_loads,) if plan.adapter_loads else ()
    return repr((head, rows, plan.copies, *loads)).encode()
