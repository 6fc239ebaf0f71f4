"""The engine's synchronous loop: add, step, abort; token ids in and out.

    no overlap      plan n │ run n │ result n, apply n │ plan n+1 │ run n+1 │ result n+1, ...
    overlap         plan n, launch n │ plan n+1, launch n+1 │ result n, apply n │ plan n+2, ...

With overlap, a device that runs steps by itself gets the next step before it has finished the
current step. If a result shows that a sequence has ended, the sequence is in the next step already;
the scheduler drops the tokens that this step samples for it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Indices
from typing import Any, Protocol

from quire.core.adapters import BASE_MODEL
from quire.core.content_spans import check_content_spans
from quire.core.memory.memory_report import BlockMap, MemoryReport, block_map, memory_report
from quire.core.request import (
    Request,
    SequenceOutput,
    check_pooling,
    check_prediction,
    check_prompt,
    check_resumed,
)
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.scheduling.running_set import constrained
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import PrefixMiss, Sequence, make_sequences
from quire.core.step import Runner, StepPlan, StepResult
from quire.engine.adapter_work import AdapterWork
from quire.engine.content_work import ContentWork
from quire.engine.grammar_work import GrammarWork
from quire.engine.request_times import RequestTimes
from quire.engine.stats import EngineStats, StatsLog
from quire.engine.step_clock import Landing, LaunchedStep, OnStep, StepClock, StepMembers
from quire.engine.tier_work import TierWork
from quire.engine.utilization import Utilization
from quire.engine.watch import Totals, Watch
from quire.errors import InvalidRequestError
from quire.observability.log import get_logger
from quire.observability.step_trace import (
    STEP_LOGGER,
    StepTiming,
    StepTrace,
    log_step,
)

STEP_FAILED = (
    "the forward pass fails with this request in it, also when it runs alone; the engine's log says"
    " how"
)

MOST_ENCODING_S = 0.1
"""Maximum seconds of encoding between two steps, plus one slice, since messages may wait."""

# Number of ended requests whose prefix misses are remembered.
NUM_REMEMBERED_MISSES = 1024

logger: logging.Logger = get_logger(__name__)


class KVMemory(Protocol):
    """Memory of the KV cache that can be released: `runtime.model_runner` has it in one process."""

    def release_memory(self) -> None:
        """Give the memory back; its contents are lost."""
        ...

    def restore_memory(self) -> None:
        """Allocate the memory again. Raises InsufficientMemoryError."""
        ...


class Engine:
    """One scheduler and one runner.

    Invariant: every accepted request is answered: the last output of each branch has a
    finish_reason, unless the request was aborted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: ModelLimits,
        *,
        timing: StepTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        facts: Mapping[str, Any] | None = None,
        overlap: bool = False,
    ) -> None:
        """`timing` is where the runner writes how long the parts of its last step took. `clock`
        returns seconds that never go back. `facts` describe the engine to people, as numbers and
        strings by name. With `overlap`, a step is launched before the result of the last one is
        fetched."""
        self.scheduler = scheduler
        self.limits = limits
        self.facts = dict(facts or {})
        self.overlap = overlap
        #: Durations of requests' phases and of steps.
        self.times = RequestTimes()
        #: Writes a record of each step; None without a trace.
        self.trace: StepTrace | None = None
        #: Collects steps and ended requests while an operator watches.
        self.watch = Watch()
        #: Logs statistics from time to time; None if it is off.
        self.stats_log: StatsLog | None = None
        #: Called before a step runs, with its requests and its predicted time; None if no one
        #: listens.
        self.on_step: OnStep | None = None
        self.grammars = GrammarWork(None, limits.end_token_ids)
        self.adapters = AdapterWork(scheduler)
        self.contents = ContentWork(scheduler)
        #: KV memory that can be given back while the engine sleeps (`sleep`); None if the memory
        #: can't be given back.
        self.kv_memory: KVMemory | None = None
        #: Whether the engine has given its KV memory back.
        self.is_asleep = False
        self.tier_work = TierWork(scheduler.memory, clock)
        #: on_idle(idle_s): background work of the surrounding loop in idle periods. Returns the
        #: seconds until its next call; None means no further call in this period. The attribute
        #: is None if the loop has no background work.
        self.on_idle: Callable[[float], float | None] | None = None
        self._members = StepMembers()
        self._runner = runner
        self._timing = timing or StepTiming()
        #: Engine time in seconds, which never goes back.
        self.clock = clock
        self._in_flight = StepClock()
        self.utilization = Utilization(clock())
        self._requests: dict[str, list[Sequence]] = {}
        self._next_branch: dict[str, int] = {}  # branch index of the next fork, by request
        self._misses: dict[str, PrefixMiss] = {}  # misses of ended requests, oldest first
        self._num_traced_preemptions = 0

    def clear_prefixes(self) -> None:
        """Forget all cached prefixes, including pinned and public ones and the tiers' copies.

        Running sequences keep their blocks, but new requests no longer find them.
        """
        memory = self.scheduler.memory
        memory.prefixes.clear()
        if memory.moves is not None:
            memory.moves.clear()

    def has_work(self, *, launches: bool = True) -> bool:
        """Whether `step` would do anything, even if it only fetches a result."""
        if not launches:
            return len(self._in_flight) > 0
        has_outputs = self.grammars.has_work or self.adapters.has_ended or self.contents.has_ended
        return self.scheduler.has_unfinished or len(self._in_flight) > 0 or has_outputs

    def add(self, request: Request) -> None:
        """Accept a request, with all its branches or none; a resumed request returns only new
        tokens.

        A request with a grammar runs as soon as the grammar is compiled. Raises InvalidRequestError
        (and its subclasses PromptTooLongError, RequestNeverFitsError).
        """
        # First, refuse requests that can't be served.
        if self.is_asleep:
            raise InvalidRequestError("the engine is asleep; call wake_up() first")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        check_pooling(request, self.limits)
        generates = request.params.pooling is None
        check_prompt(request.prompt_token_ids, self.limits, generates=generates)
        check_content_spans(
            request.content_spans,
            len(request.prompt_token_ids),
            self.limits,
            in_one_step=request.params.pooling is not None and request.params.pooling.in_one_step,
        )
        check_prediction(request.prediction_token_ids, self.limits)
        check_resumed(request, self.limits)
        self.grammars.check(request.params)
        self.adapters.check(request)
        self.contents.check(request)
        # Then make the sequences, and add those that need not wait for a grammar.
        request = self.contents.marked(request)
        now_s = self.clock()
        adapter = BASE_MODEL if request.adapter is None else request.adapter.digest
        root = self.scheduler.memory.prefixes.start_chain(request.cache_domain, adapter)
        groups = make_sequences(request, self.limits.max_model_len, root, now_s)
        # All groups reserve the same number of blocks, so if the first fits, all do.
        for group in self.grammars.begin(self.scheduler, groups, now_s, request.cache_domain):
            self.scheduler.add(group, now_s)
        self.contents.open(request)
        self._requests[request.request_id] = [branch for group in groups for branch in group]
        self._next_branch[request.request_id] = request.n
        self.utilization.record_arrival(now_s)

    def fork(self, request_id: str, branch_index: int, params: DecodingParams | None = None) -> int:
        """Branch a running request: the new branch continues from the tokens of the given one.

        params: None for the request's own. Limits such as max_tokens count from the prompt on, as
        if the branch had generated all its tokens itself. Returns the new branch's index, which
        also makes its random numbers differ. Raises InvalidRequestError for a branch that is not
        running.
        """
        # First, find the branch and refuse branches that can't be forked.
        branches = self._requests.get(request_id, [])
        parent = next((each for each in branches if each.branch_index == branch_index), None)
        if parent is not None:
            self.grammars.wait_compiled(self.scheduler, parent)
        if parent is None or parent.is_finished:
            raise InvalidRequestError(
                f"branch {branch_index} of request {request_id!r} has ended or never existed, so it"
                " can't be forked",
                "branch_index",
            )
        if parent.is_beam:
            raise InvalidRequestError(
                f"request {request_id!r} is a beam search, whose branches can't be forked",
                "request_id",
            )
        if parent.params.pooling is not None:
            raise InvalidRequestError(
                f"request {request_id!r} generates nothing, so there is nothing to fork",
                "request_id",
            )
        params = params or parent.params
        num_left = parent.num_prompt_tokens + params.max_tokens - len(parent.token_ids)
        if num_left < 1:
            raise InvalidRequestError(
                f"max_tokens is {params.max_tokens}, but the branch to fork has"
                f" {parent.num_output_tokens} tokens already",
                "max_tokens",
            )
        # Then fork its grammar and the sequence.
        new_index = self._next_branch[request_id]
        constraint = self.grammars.fork(parent, params)
        child = self.scheduler.fork(parent, new_index, params, self.clock())
        child.constraint = constraint
        branches.append(child)
        self._next_branch[request_id] += 1
        return new_index

    def pin_prefix(
        self,
        token_ids: list[int],
        cache_domain: str,
        priority: int = 0,
        duration_s: float | None = None,
        adapter: str = BASE_MODEL,
    ) -> int:
        """Pin the cached full blocks at the beginning of token_ids, so that unpinned contents are
        evicted first.

        Pinned blocks with the lowest priority are evicted first. duration_s: None for as long as
        they are cached. adapter: the digest of the adapter that computed them. Returns the number
        of tokens pinned.
        """
        prefixes = self.scheduler.memory.prefixes
        until_s = None if duration_s is None else self.clock() + duration_s
        root = prefixes.start_chain(cache_domain, adapter)
        return prefixes.pin(token_ids, root, priority, until_s)

    def prefix_miss(self, request_id: str) -> PrefixMiss | None:
        """Why the prefix cache had no more of a request's prompt; known while the request runs and
        for a while after.

        None for a request that is unknown, was not admitted yet or looked up no prefix.
        """
        branches = self._requests.get(request_id)
        return self._misses.get(request_id) if branches is None else branches[0].miss

    def abort(self, request_id: str | None, branch_index: int | None = None) -> None:
        """End a request (None: all), or one branch of it; ignore unknown and finished ones.

        The request's blocks are free when this returns, unless a step in flight still reads them.
        """
        if request_id is None:
            for each in list(self._requests):
                self.abort(each)
            return
        for sequence in self._requests.get(request_id, ()):
            if branch_index is not None and sequence.branch_index != branch_index:
                continue
            if not self.grammars.drop(sequence):
                self.scheduler.abort(sequence)
        self._forget_if_finished(request_id)
        if not self.has_work():
            self.utilization.record_idle(self.clock())

    def step(self, *, launches: bool = True) -> list[SequenceOutput]:
        """Run one forward pass over the scheduler's choice; returns the new tokens of each
        sequence.

        With overlap, the tokens returned are those of the pass before. A pass that fails as a whole
        is tried again without the requests that make it fail. launches: False begins no pass and
        only fetches a result, before a pause.
        """
        # First, plan a step from the requests that are ready.
        began_s = self.clock()
        self._in_flight.begin_call(began_s)
        self.grammars.add_compiled(self.scheduler)
        self.adapters.end_failed()
        self.contents.end_failed()
        plan = self.scheduler.schedule(began_s) if launches else None
        planned_s = self.clock()
        # Then launch it and fetch the oldest result that is due.
        try:
            if plan is not None:
                self._launch(plan, began_s, planned_s)
            landed = self._fetch(is_idle=plan is None)
        except (RuntimeError, ValueError, IndexError, MemoryError, FloatingPointError):
            logger.exception("a step failed; its sequences start again")
            outputs = self._drop_steps(STEP_FAILED)
            self._record_outputs(outputs, range(len(outputs)), 0, self.clock())
        except BaseException:  # a bug, or Ctrl-C: drop the steps, so that the engine stays usable
            self._drop_steps(None)
            raise
        else:
            outputs = [] if landed is None else self._apply(*landed)
        # If no step is in flight and none can start, wait briefly for grammars, tiers and items.
        if plan is None and launches and not self._in_flight:
            self.grammars.wait(self.scheduler.running)
            self.tier_work.wait()
            self.adapters.wait()
            self.contents.wait()
        elif plan is not None and self.contents.is_encoding:
            # Streams wait for at most about the time of one more step.
            self.contents.advance(min(self.clock() - planned_s, MOST_ENCODING_S))
        refused = [
            *self.grammars.pop_refused(),
            *self.adapters.pop_ended(),
            *self.contents.pop_ended(),
        ]
        if refused:
            self._record_outputs(refused, range(len(refused)), 0, self.clock())
        left_s = self.clock()
        self._in_flight.end_call(left_s)
        if not self.has_work():
            self.utilization.record_idle(left_s)
        return [*refused, *outputs]

    def finish_steps(self) -> None:
        """Fetch the steps in flight after all requests have ended, so that no step holds blocks.

        Published contents may then be stored in the tiers.
        """
        while self._in_flight and not self.scheduler.has_unfinished:
            self.step()
        if not self.scheduler.has_unfinished:
            self.tier_work.advance_idle()

    def sequences(self, request_id: str) -> list[Sequence]:
        """The branches of a request, for tests and the simulator; empty once all have ended."""
        return list(self._requests.get(request_id, ()))

    def stats(self) -> EngineStats:
        """A snapshot of the engine in numbers."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        drafting = scheduler.drafting
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=memory.pool.num_blocks,
            num_held_blocks=memory.pool.num_held,
            num_cached_blocks=len(memory.cache),
            num_steps=scheduler.stats.num_steps,
            num_preemptions=scheduler.running_set.stats.num_preemptions,
            num_recomputed_tokens=scheduler.running_set.stats.num_recomputed_tokens,
            num_failed_steps=scheduler.stats.num_failed_steps,
            num_drafts=0 if drafting is None else drafting.num_drafts,
            num_accepted_drafts=0 if drafting is None else drafting.num_accepted_drafts,
            drafts={} if drafting is None else drafting.as_dict(),
            num_query_tokens=memory.prefixes.num_query_tokens,
            num_hit_tokens=memory.prefixes.num_hit_tokens,
            num_computed_tokens=self.times.num_computed_tokens,
            num_generated_tokens=self.times.num_generated_tokens,
            prefix_misses=dict(self.times.prefix_misses),
            tiers={} if memory.moves is None else memory.moves.counts(),
            adapters=self.adapters.counts(),
            contents=self.contents.counts(),
            times=self.times.as_dict(),
            utilization=self.utilization.as_dict(self.clock(), is_running=len(self._in_flight) > 0),
        )

    def memory_report(self) -> MemoryReport:
        """The use of every byte of the KV memory. Costs O(held blocks): not for every step."""
        return memory_report(self.scheduler.memory, _holders(self.scheduler))

    def block_map(self, first_block: int = 0, max_num_blocks: int | None = None) -> BlockMap:
        """The use of each block, from first_block on; see `memory_report.block_map`. O(held
        blocks)."""
        holders = _holders(self.scheduler)
        return block_map(self.scheduler.memory, holders, first_block, max_num_blocks)

    def _launch(self, plan: StepPlan, began_s: float, planned_s: float) -> None:
        scheduler = self.scheduler
        predicted_s = 0.0
        if self.on_step is not None:
            predicted_s = scheduler.budget.predict_s()
            members = self._members.launch(plan, scheduler.running, is_overlapping=self.overlap)
            self.on_step(members, self._in_flight.predicted_s + predicted_s)
        draft_s = 0.0
        if plan.draft_orders:
            assert scheduler.drafting is not None
            drafts = self._runner.draft(plan)
            plan, draft_s = scheduler.drafting.add(plan, drafts), drafts.seconds
        masks = self.grammars.begin_masks(plan.step_id, constrained(scheduler.running_set))
        self._runner.execute(plan)
        self._runner.sample(masks.collect())
        num_preemptions = scheduler.running_set.stats.num_preemptions
        step = LaunchedStep(
            plan,
            began_s,
            schedule_s=planned_s - began_s,
            timing=self._timing.copy(),
            num_waiting=len(scheduler.waiting),
            num_preemptions=num_preemptions - self._num_traced_preemptions,
            load=scheduler.budget.load,
            draft_s=draft_s,
            predicted_s=predicted_s,
        )
        self._num_traced_preemptions = num_preemptions
        self._in_flight.launch(step)

    def _fetch(self, *, is_idle: bool) -> tuple[LaunchedStep, StepResult, Landing] | None:
        """The oldest step with its result, if it is due. is_idle: whether no step can be launched
        before this result is fetched."""
        num_in_flight = len(self._in_flight)
        if num_in_flight <= self.overlap and not (is_idle and num_in_flight):
            return None
        asked_s = self.clock()
        result = self._runner.result()
        fetched_s, step = self.clock(), self._in_flight.pop_oldest()
        if self._timing.is_of_result:
            step = step._replace(timing=self._timing.copy())
        num_accepted, num_rejected = step.count_drafts(result)
        busy_s, gap_s = self.utilization.account_step(
            fetched_s,
            step.launched_s,
            self._timing.device_s,
            step.load,
            len(result.rows) + num_accepted,
            self._timing.launching_s,
            num_rejected,
        )
        landing = Landing(fetched_s, fetched_s - asked_s, busy_s, gap_s, num_rejected)
        return step, result, landing

    def _apply(
        self, step: LaunchedStep, result: StepResult, landing: Landing
    ) -> list[SequenceOutput]:
        outputs = self.scheduler.apply(result)
        self.grammars.begin_early(constrained(self.scheduler.running_set))
        ended_s = self.clock()
        elapsed_s, is_known = self._in_flight.end(step, ended_s)
        if is_known:
            # The drafter's own costs learn the time of drafting.
            step_s = max(0.0, elapsed_s - step.draft_s)
            self.scheduler.pacer.observe(step.plan.step_id, step_s)
            self.tier_work.observe(step.plan.step_id, step_s)
        num_tokens = step.plan.num_tokens - landing.num_rejected
        self.times.on_step(elapsed_s, num_tokens)
        if self.trace is not None or self.watch.is_on or STEP_LOGGER.isEnabledFor(logging.DEBUG):
            record = step.record(
                landing,
                apply_s=ended_s - landing.fetched_s,
                elapsed_s=elapsed_s,
                num_blocks_used=self.scheduler.memory.pool.num_held,
            )
            if self.trace is not None:
                self.trace.write(record)
            if self.watch.is_on:
                self.watch.on_step(record, totals(self), ended_s)
            log_step(record)
        self._record_outputs(outputs, self.scheduler.event_places, num_tokens, ended_s)
        return outputs

    def _record_outputs(
        self,
        outputs: list[SequenceOutput],
        places: Indices[int],
        num_computed_tokens: int,
        now_s: float,
    ) -> None:
        """Record a step's outputs, and forget the requests that ended with it. places: the indices
        of all outputs that may begin or end a branch."""
        num_tokens = self.times.on_outputs(outputs, places, self._requests, now_s)
        for output in [outputs[at] for at in places]:
            if output.finish_reason is not None:
                self._forget_if_finished(output.request_id)
        if self.stats_log is not None:
            worked_s = self.utilization.worked_s
            self.stats_log.observe(num_computed_tokens, num_tokens, self.stats, worked_s)

    def _drop_steps(self, message: str | None) -> list[SequenceOutput]:
        """See `Scheduler.recover`."""
        self._in_flight.drop()
        self.grammars.wait_for_masks()
        self._runner.reset()
        return self.scheduler.recover(message)

    def _forget_if_finished(self, request_id: str) -> None:
        branches = self._requests.get(request_id)
        if (
            branches is not None
            and all(sequence.is_finished for sequence in branches)
            and not self.scheduler.beams.is_searching(request_id)
        ):
            del self._requests[request_id], self._next_branch[request_id]
            self.contents.close(request_id)
            if self.watch.is_on:
                self.watch.on_end(branches, self.times, self.clock())
            self.times.forget(request_id)
            if branches[0].miss is not None:
                self._misses[request_id] = branches[0].miss
                if len(self._misses) > NUM_REMEMBERED_MISSES:
                    del self._misses[next(iter(self._misses))]


def _holders(scheduler: Scheduler) -> list[Sequence]:
    """All sequences that may hold blocks."""
    return [*scheduler.running, *scheduler.waiting]


def totals(engine: Engine) -> Totals:
    """Counts since the engine began that `watch` splits into steps."""
    drafting = engine.scheduler.drafting
    return Totals(
        0 if drafting is None else drafting.num_drafts,
        0 if drafting is None else drafting.num_accepted_drafts,
        engine.scheduler.memory.pool.num_evicted,
        engine.utilization.floor_s,
    )


def sleep(engine: Engine) -> None:
    """Give the memory of the KV cache back, with all cached, pinned and public contents.

    The engine keeps its weights, and tiers keep their contents. Requests are refused until
    `wake_up`. Does nothing if the engine is asleep. Raises InvalidRequestError while requests are
    running, if several processes hold the memory, and while a read or write of the cache folder
    hangs, which might still touch the memory.
    """
    if engine.kv_memory is None:
        raise InvalidRequestError(
            "this engine can't sleep: several processes hold its KV cache; end them instead"
        )
    if engine.has_work():
        raise InvalidRequestError("requests are running; let them end, or abort them, first")
    if not engine.is_asleep:
        engine.tier_work.drain()  # contents that can't be stored in time are computed again later
        if not engine.tier_work.wait_for_moves():
            raise InvalidRequestError(
                "the engine can't sleep yet: a read or write of the cache folder hangs; try again"
                " later, or end the process"
            )
        engine.scheduler.memory.prefixes.clear()
        engine.kv_memory.release_memory()
        engine.is_asleep = True


def wake_up(engine: Engine) -> None:
    """Allocate the memory again; does nothing if the engine is awake.

    Raises InsufficientMemoryError; then the engine stays asleep.
    """
    if engine.is_asleep and engine.kv_memory is not None:
        engine.kv_memory.restore_memory()
        engine.is_asleep = False
