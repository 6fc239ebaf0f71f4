"""Compiles requests' grammars in threads, and computes token masks during forward passes.

    add ──> compiled in a thread ──> the scheduler: others run meanwhile
    step:   schedule ──> masks begin │ runner.execute ──> masks collected ──> runner.sample

A compiler needs the text of tokens, and the engine knows only their ids: the composition root
passes in a compiler. Used by `engine`.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.step_results import failure
from quire.core.sequence import Constraint, Sequence, SequenceState
from quire.engine.token_masks import (
    NO_MASKS,
    FollowedGrammar,
    GrammarConstraint,
    PendingMasks,
    compute_masks,
)
from quire.errors import InvalidRequestError, QuireError

WAIT_S = 0.01
"""Maximum seconds of one wait for a grammar while there is no other work; short, since messages may
come."""

NUM_SLOW_THREADS = 2
"""Number of threads that compile grammars and compute slow masks, so that quick masks need not
wait."""

LEAST_ROWS = 4
"""A thread gets the masks of at least this many rows: handing over fewer costs more than it
saves."""


class StartableGrammar(Protocol):
    """A compiled grammar with which sequences can begin."""

    def start(self) -> FollowedGrammar: ...


class GrammarSource(Protocol):
    """The compiler, implemented in `text.grammars.compiler`. Called in threads, several at a time.

    Raises InvalidRequestError. Compiling a grammar again in the same cache domain costs almost
    nothing. In another domain, the duration of the call does not reveal that the grammar was
    compiled before.
    """

    def compile(self, grammar: str, domain: str = "") -> StartableGrammar: ...

    def prepare(self) -> None:
        """Do work ahead for the first grammar. If it fails, `compile` raises the error."""


@dataclass(slots=True)
class _Preparing:
    """A request whose grammar is being compiled."""

    #: Its sequences, as `Scheduler.add` takes them.
    groups: list[list[Sequence]]
    arrival_s: float
    #: Completed when each sequence of the request has its constraint.
    is_prepared: "Future[None]"


class GrammarWork:
    """The grammars of one engine.

    Invariant: a sequence with a grammar has its constraint before the scheduler gets it.
    """

    def __init__(
        self,
        compiler: GrammarSource | None,
        end_token_ids: tuple[int, ...],
        *,
        num_threads: int = 1,
        threads: Executor | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`compiler` compiles grammars; None refuses them. `end_token_ids` are the model's own.
        `num_threads` compute the masks of one step. `threads`, if given, does all the work;
        otherwise the object's own threads do it. `clock` returns a thread's seconds of processor
        time."""
        self._compiler = compiler
        self._end_token_ids = end_token_ids
        self._num_threads = num_threads
        self._clock = clock
        self._quick = threads or ThreadPoolExecutor(num_threads, "quire-masks")
        self._slow = threads or ThreadPoolExecutor(NUM_SLOW_THREADS, "quire-grammars")
        self._preparing: list[_Preparing] = []
        self._refused: list[SequenceOutput] = []
        self._last = NO_MASKS

    @property
    def has_work(self) -> bool:
        """Whether a request waits for its grammar, or the output of a refused request was not taken
        yet."""
        return bool(self._preparing or self._refused)

    def prepare(self) -> None:
        """Prepare the compiler in a thread, so that the first grammar delays no other request."""
        if self._compiler is not None:
            self._slow.submit(self._compiler.prepare)

    def check(self, params: DecodingParams) -> None:
        """Raise InvalidRequestError if requests with these params can't be served."""
        if params.grammar is not None:
            self._find_compiler()
            if params.beam_width:
                raise InvalidRequestError(
                    "a beam search obeys no grammar; leave structured_outputs out, or sample",
                    "structured_outputs",
                )

    def compile(self, grammar: str, domain: str = "") -> StartableGrammar:
        """Compile a grammar. Raises InvalidRequestError. Any thread may call."""
        return self._find_compiler().compile(grammar, domain)

    def begin(
        self,
        scheduler: Scheduler,
        groups: list[list[Sequence]],
        arrival_s: float,
        domain: str = "",
    ) -> list[list[Sequence]]:
        """Return the groups of a new request that the caller adds to the scheduler at once.

        The sequences of a request with a grammar are added later, when the grammar is compiled.
        domain: the request's cache domain, in which the grammar is compiled. Raises
        RequestNeverFitsError; then no sequence was accepted.
        """
        first = groups[0][0]
        if first.params.grammar is None:
            return groups
        scheduler.memory.check_fits(first)
        compiler = self._find_compiler()
        is_prepared = self._slow.submit(self._prepare, compiler, groups, domain)
        self._preparing.append(_Preparing(groups, arrival_s, is_prepared))
        self.add_compiled(scheduler)
        return []

    def add_compiled(self, scheduler: Scheduler) -> None:
        """Add requests whose grammars are compiled to the scheduler, and refuse failed ones."""
        ready = [each for each in self._preparing if each.is_prepared.done()]
        for request in ready:
            self._preparing.remove(request)
            if request.is_prepared.cancelled():  # aborted before a thread was free
                continue
            error = request.is_prepared.exception()
            if error is not None and not isinstance(error, QuireError):
                raise error
            for group in request.groups:
                alive = [sequence for sequence in group if not sequence.is_finished]
                if error is not None:
                    self._refused += [_fail(sequence, str(error)) for sequence in alive]
                elif alive:
                    scheduler.add(alive, request.arrival_s)

    def pop_refused(self) -> list[SequenceOutput]:
        """The outputs of sequences that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def wait_compiled(self, scheduler: Scheduler, sequence: Sequence) -> None:
        """Wait until a sequence's grammar is compiled, and add the sequence to the scheduler."""
        for request in self._preparing:
            if any(sequence in group for group in request.groups):
                wait([request.is_prepared])
        self.add_compiled(scheduler)

    def drop(self, sequence: Sequence) -> bool:
        """End a sequence that the scheduler does not have yet; returns False if the scheduler has
        it."""
        for request in self._preparing:
            if any(sequence in group for group in request.groups):
                if not sequence.is_finished:
                    _end(sequence, FinishReason.ABORT)
                if all(each.is_finished for each in chain.from_iterable(request.groups)):
                    request.is_prepared.cancel()  # frees its place in the queue, if not begun
                return True
        return False

    def fork(self, parent: Sequence, params: DecodingParams) -> Constraint | None:
        """The constraint of a branch that continues from the tokens of `parent` with these params.

        Raises InvalidRequestError if the tokens don't obey its grammar.
        """
        if params.grammar is None:
            return None
        constraint, is_same = parent.constraint, params.grammar == parent.params.grammar
        if is_same and isinstance(constraint, GrammarConstraint):
            return constraint.copy(params)
        compiled = self.compile(params.grammar)
        return self._constraint(compiled, parent.token_ids[parent.num_prompt_tokens :], params)

    def begin_masks(self, step_id: int, constrained: list[Sequence]) -> PendingMasks:
        """Begin the masks of the sequences that sample in the step that was just planned.

        constrained: the running sequences with a constraint.
        """
        found = [
            (sequence.row, sequence.constraint, sequence.draft_token_ids)
            for sequence in constrained
            if isinstance(sequence.constraint, GrammarConstraint)
            and sequence.row is not None
            and sequence.last_step_id == step_id
            and sequence.num_pending_tokens
        ]
        self._last = self._begin(found) if found else NO_MASKS
        return self._last

    def begin_early(self, constrained: list[Sequence]) -> None:
        """Begin the slow masks, now that all tokens are known."""
        for sequence in constrained:
            constraint = sequence.constraint
            if isinstance(constraint, GrammarConstraint) and not sequence.num_pending_tokens:
                constraint.begin_early(self._slow)

    def wait(self, running: list[Sequence]) -> None:
        """Wait a little for the grammars and masks that sequences need."""
        waited_for: list[Future[Any]] = [each.is_prepared for each in self._preparing]
        for sequence in running:
            constraint = sequence.constraint
            if isinstance(constraint, GrammarConstraint) and constraint.early is not None:
                waited_for.append(constraint.early)
        if waited_for:
            wait(waited_for, WAIT_S, FIRST_COMPLETED)

    def wait_for_masks(self) -> None:
        """After a failed step, wait until no thread reads a constraint."""
        self._last.collect()

    def _begin(self, found: list[tuple[int, GrammarConstraint, tuple[int, ...]]]) -> PendingMasks:
        early = [(row, each.early) for row, each, _ in found if each.early is not None]
        begun = {row for row, _ in early}
        others = [entry for entry in found if entry[0] not in begun]
        size = max(LEAST_ROWS, -(-len(others) // self._num_threads))
        parts = [others[first : first + size] for first in range(0, len(others), size)]
        jobs = [self._quick.submit(compute_masks, [entry[1:] for entry in part]) for part in parts]
        return PendingMasks(jobs, [[row for row, *_ in part] for part in parts], early)

    def _prepare(self, compiler: GrammarSource, groups: list[list[Sequence]], domain: str) -> None:
        """Give the sequences of a request their constraints; runs in a thread.

        Raises QuireError, also if the output of a resumed request does not obey the grammar.
        """
        for sequence in chain.from_iterable(groups):
            assert sequence.params.grammar is not None
            compiled = compiler.compile(sequence.params.grammar, domain)
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            sequence.constraint = self._constraint(compiled, output, sequence.params)

    def _constraint(
        self, compiled: StartableGrammar, token_ids: list[int], params: DecodingParams
    ) -> GrammarConstraint:
        try:
            return GrammarConstraint(
                compiled.start(), params, self._end_token_ids, token_ids, self._clock
            )
        except ValueError as error:
            raise InvalidRequestError(
                f"the output generated so far does not obey the grammar: {error}",
                "structured_outputs",
            ) from error

    def _find_compiler(self) -> GrammarSource:
        if self._compiler is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer, but the engine runs without one",
                "structured_outputs",
            )
        return self._compiler


def _fail(sequence: Sequence, message: str) -> SequenceOutput:
    _end(sequence, FinishReason.ERROR)
    return failure(sequence, message)


def _end(sequence: Sequence, reason: FinishReason) -> None:
    sequence.finish_reason = reason
    sequence.move_to(SequenceState.FINISHED)
