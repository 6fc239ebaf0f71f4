"""Grammars beside the steps: compiled before a request enters, masks while the forward pass runs.

    add ──> compiled in a thread ──> the scheduler: others go on meanwhile
    step:   schedule ──> masks begin │ runner.execute ──> masks collected ──> runner.sample

Compilers know text, and the engine does not: the composition root gives one. Used by `engine`.
"""

from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from quire.core.constraint import Constraint
from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.step_results import failure
from quire.core.sequence import Sequence, SequenceState
from quire.engine.token_masks import (
    NO_MASKS,
    FollowedGrammar,
    GrammarConstraint,
    PendingMasks,
    compute_masks,
)
from quire.errors import InvalidRequestError, QuireError

WAIT_S = 0.01
"""So long at most is waited for a grammar while there is nothing else to do: messages may come."""

NUM_SLOW_THREADS = 2
"""Compile, and compute masks that take long, so that these hold up no quick one."""

LEAST_ROWS = 4
"""Masks of so many rows are computed in one thread: handing them to another costs as much."""


class StartableGrammar(Protocol):
    """A grammar that sequences can begin with."""

    def start(self) -> FollowedGrammar: ...


class GrammarSource(Protocol):
    """`text.grammars.compiler` has the one there is. Called in threads, several at a time.

    Raises InvalidRequestError. The same grammar again costs next to nothing in the same cache
    domain; in others the time of a call tells nothing of it.
    """

    def compile(self, grammar: str, domain: str = "") -> StartableGrammar: ...


@dataclass(slots=True)
class _Preparing:
    """A request whose grammar is being compiled. groups: as `Scheduler.add` takes them."""

    groups: list[list[Sequence]]
    arrival_s: float
    is_prepared: "Future[None]"


class GrammarWork:
    """The grammars of one engine.

    Invariant: a sequence with a grammar has its constraint before it enters the scheduler.
    """

    def __init__(
        self,
        compiler: GrammarSource | None,
        end_token_ids: tuple[int, ...],
        *,
        num_threads: int = 1,
        threads: Executor | None = None,
    ) -> None:
        """compiler: None refuses grammars. end_token_ids: the model's own. num_threads: compute the
        masks of one step. threads: does all the work instead of threads of its own."""
        self._compiler = compiler
        self._end_token_ids = end_token_ids
        self._num_threads = num_threads
        self._quick = threads or ThreadPoolExecutor(num_threads, "quire-masks")
        self._slow = threads or ThreadPoolExecutor(NUM_SLOW_THREADS, "quire-grammars")
        self._preparing: list[_Preparing] = []
        self._refused: list[SequenceOutput] = []
        self._last = NO_MASKS

    @property
    def has_work(self) -> bool:
        """Whether a request has not entered the scheduler yet, or was refused since."""
        return bool(self._preparing or self._refused)

    def check(self, params: DecodingParams) -> None:
        """Raises InvalidRequestError where requests with these params can't be served."""
        if params.grammar is not None:
            self._find_compiler()
            if params.beam_width:
                raise InvalidRequestError(
                    "a beam search obeys no grammar; leave structured_outputs out, or sample",
                    "structured_outputs",
                )

    def compile(self, grammar: str, domain: str = "") -> StartableGrammar:
        """Raises InvalidRequestError. Any thread may call."""
        return self._find_compiler().compile(grammar, domain)

    def begin(
        self,
        scheduler: Scheduler,
        groups: list[list[Sequence]],
        arrival_s: float,
        domain: str = "",
    ) -> list[list[Sequence]]:
        """Of a new request's sequences: those that enter the scheduler at once, by the caller. The
        others enter it when their grammar is there.

        domain: the request's cache domain, in which its grammar is compiled.
        Raises RequestNeverFitsError; then none was taken in.
        """
        first = groups[0][0]
        if first.params.grammar is None:
            return groups
        scheduler.memory.check_fits(first)
        compiler = self._find_compiler()
        is_prepared = self._slow.submit(self._prepare, compiler, groups, domain)
        self._preparing.append(_Preparing(groups, arrival_s, is_prepared))
        self.let_in(scheduler)
        return []

    def let_in(self, scheduler: Scheduler) -> None:
        """Requests whose grammars are compiled enter the scheduler; failed ones are refused."""
        ready = [each for each in self._preparing if each.is_prepared.done()]
        for request in ready:
            self._preparing.remove(request)
            if request.is_prepared.cancelled():  # all of it had ended before a thread was free
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

    def take_refused(self) -> list[SequenceOutput]:
        """The outputs of those that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def hasten(self, scheduler: Scheduler, sequence: Sequence) -> None:
        """Wait until a sequence's grammar is compiled, if it is not yet; then it enters."""
        for request in self._preparing:
            if any(sequence in group for group in request.groups):
                wait([request.is_prepared])
        self.let_in(scheduler)

    def drop(self, sequence: Sequence) -> bool:
        """End a sequence if it has not entered the scheduler yet; whether it had not."""
        for request in self._preparing:
            if any(sequence in group for group in request.groups):
                if not sequence.is_finished:
                    _end(sequence, FinishReason.ABORT)
                if all(each.is_finished for each in chain.from_iterable(request.groups)):
                    request.is_prepared.cancel()  # unless it has begun: others wait behind it
                return True
        return False

    def fork(self, parent: Sequence, params: DecodingParams) -> Constraint | None:
        """The constraint of a branch that goes on from the tokens of `parent` with these params.

        Raises InvalidRequestError where they don't obey its grammar.
        """
        if params.grammar is None:
            return None
        constraint, is_same = parent.constraint, params.grammar == parent.params.grammar
        if is_same and isinstance(constraint, GrammarConstraint):
            return constraint.copy(params)
        compiled = self.compile(params.grammar)
        return self._constraint(compiled, parent.token_ids[parent.num_prompt_tokens :], params)

    def begin_masks(self, step_id: int, running: list[Sequence]) -> PendingMasks:
        """Begin the masks of those sequences that sample in this step, which was just planned."""
        found = [
            (sequence.row, sequence.constraint)
            for sequence in running
            if isinstance(sequence.constraint, GrammarConstraint)
            and sequence.row is not None
            and sequence.last_step_id == step_id
            and sequence.num_pending_tokens
        ]
        self._last = self._begin(found) if found else NO_MASKS
        return self._last

    def begin_early(self, running: list[Sequence]) -> None:
        """Begin the masks that will take long, now that all tokens are known."""
        for sequence in running:
            constraint = sequence.constraint
            if isinstance(constraint, GrammarConstraint) and not sequence.num_pending_tokens:
                constraint.begin_early(self._slow)

    def wait(self, running: list[Sequence]) -> None:
        """Wait a little for what keeps sequences from going on."""
        waited_for: list[Future[Any]] = [each.is_prepared for each in self._preparing]
        for sequence in running:
            constraint = sequence.constraint
            if isinstance(constraint, GrammarConstraint) and constraint.early is not None:
                waited_for.append(constraint.early)
        if waited_for:
            wait(waited_for, WAIT_S, FIRST_COMPLETED)

    def settle(self) -> None:
        """After a step that failed: no thread reads a constraint any longer."""
        self._last.collect()

    def _begin(self, found: list[tuple[int, GrammarConstraint]]) -> PendingMasks:
        early = [(row, each.early) for row, each in found if each.early is not None]
        begun = {row for row, _ in early}
        others = [(row, each) for row, each in found if row not in begun]
        size = max(LEAST_ROWS, -(-len(others) // self._num_threads))
        parts = [others[first : first + size] for first in range(0, len(others), size)]
        jobs = [self._quick.submit(compute_masks, [each for _, each in part]) for part in parts]
        return PendingMasks(jobs, [[row for row, _ in part] for part in parts], early)

    def _prepare(self, compiler: GrammarSource, groups: list[list[Sequence]], domain: str) -> None:
        """In a thread: give the sequences of a request their constraints.

        Raises QuireError, also where what a resumed one has generated does not obey the grammar.
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
            return GrammarConstraint(compiled.start(), params, self._end_token_ids, token_ids)
        except ValueError as error:
            raise InvalidRequestError(
                f"what was generated so far does not obey the grammar: {error}",
                "structured_outputs",
            ) from error

    def _find_compiler(self) -> GrammarSource:
        if self._compiler is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer, but the engine runs without",
                "structured_outputs",
            )
        return self._compiler


def _fail(sequence: Sequence, message: str) -> SequenceOutput:
    _end(sequence, FinishReason.ERROR)
    return failure(sequence, message)


def _end(sequence: Sequence, reason: FinishReason) -> None:
    sequence.finish_reason = reason
    sequence.move_to(SequenceState.FINISHED)
