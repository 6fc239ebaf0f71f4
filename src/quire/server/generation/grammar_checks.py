"""Compiles the grammars of calls in worker processes, with a queue that is fair to tenants.

A call whose grammar does not compile gets a 400; the engine compiles the other grammars again.
There are few workers, so calls with grammars wait in a queue, in which tenants take turns; calls
without grammars never wait. To keep one tenant from blocking others, no tenant may use all workers
or fill more than half of the free queue. Results are cached for each cache domain separately, so
that the time of a call reveals nothing about other clients' calls.
"""

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from quire.engine_client.grammar_forms import GrammarForm, as_text
from quire.engine_client.inputs import NO_OPTIONS, RequestOptions
from quire.engine_client.process.grammar_compilers import GrammarCompilers, WorkerLostError
from quire.errors import InvalidRequestError, OverloadedError, QuireError
from quire.text.grammars.domain_cache import DomainCache

NUM_WORKERS = 3
"""Number of grammars that are compiled at once."""

MAX_WORKERS_OF_TENANT = NUM_WORKERS - 1
"""Maximum number of one tenant's grammars that are compiled at once. The rest of the workers is for
other tenants."""

MAX_WAITING = 512
"""Maximum number of calls whose grammars are being compiled or wait. A tenant's next call is
refused if the tenant has as many calls as places are free, so a lone tenant gets half of them."""

_MAX_REMEMBERED = 2_048
_MAX_REMEMBERED_BYTES = 32 << 20
_BYTES_BESIDE_TEXT = 512


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of compiling a form: its grammar, or the message and field of the error."""

    grammar: str | None
    refusal: tuple[str, str | None] | None = None

    @property
    def num_bytes(self) -> int:
        texts = self.grammar or "", self.refusal[0] if self.refusal is not None else ""
        return _BYTES_BESIDE_TEXT + sum(map(len, texts))


class GrammarChecks:
    """Compiles the grammars of calls; tenants take turns.

    Invariants: at most NUM_WORKERS grammars are compiled at once, at most MAX_WORKERS_OF_TENANT of
    them for one tenant; no call waits while a worker is free for it. `_turns` has the waiting
    tenants in the order of their turns.
    """

    def __init__(self, maker: GrammarCompilers | None = None) -> None:
        """A `maker` of None refuses all grammars."""
        self._maker = maker
        self._num_running: Counter[str] = Counter()
        self._num_calls: Counter[str] = Counter()
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}
        self._known: DomainCache[_Outcome] = DomainCache(_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES)
        self._unfinished: set[asyncio.Task[_Outcome]] = set()
        self._reason: QuireError | None = None  # the error that ended all compiling

    async def grammar_for(
        self, form: GrammarForm | None, options: RequestOptions = NO_OPTIONS
    ) -> str | None:
        """The grammar of a form, after it was compiled as a check; None means no constraint.

        `options` have the call's tenant and cache domain. A call that is cancelled leaves no work
        behind. Raises InvalidRequestError, which names the unsupported part of the form,
        OverloadedError if too many calls wait, and the error that was passed to `end`.
        """
        if form is None:
            return None
        if self._maker is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer, but the engine runs without; leave them out",
                "structured_outputs",
            )
        text = await asyncio.to_thread(as_text, form)
        key = hashlib.sha256(text.encode()).digest()
        outcome = self._known.find(options.cache_domain, key)
        if outcome is None:
            outcome = await self._until_ended(
                self._make_in_turn(self._maker, text, form.origin, options, key)
            )
        if outcome.refusal is not None:
            raise InvalidRequestError(*outcome.refusal)
        return outcome.grammar

    def end(self, reason: QuireError) -> None:
        """Stop compiling: waiting and later calls of `grammar_for` raise `reason`."""
        self._reason = reason
        for task in self._unfinished:
            task.cancel()

    async def _until_ended(self, work: Coroutine[Any, Any, _Outcome]) -> _Outcome:
        task, own = asyncio.ensure_future(work), asyncio.current_task()
        self._unfinished.add(task)
        if self._reason is not None:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._reason is None or own is None or own.cancelling():
                raise
            raise self._reason from None
        finally:
            self._unfinished.discard(task)

    async def _make_in_turn(
        self, maker: GrammarCompilers, text: str, origin: str, options: RequestOptions, key: bytes
    ) -> _Outcome:
        tenant = options.tenant
        num_own = self._num_calls[tenant]
        if num_own >= MAX_WAITING - self._num_calls.total():
            raise OverloadedError(
                f"{num_own} calls wait for their grammars to be compiled, the maximum; retry later"
            )
        self._num_calls[tenant] += 1
        try:
            await self._wait_for_worker(tenant)
            try:
                # A call ahead in the queue may have compiled the same form.
                outcome = self._known.find(options.cache_domain, key)
                if outcome is None:
                    outcome = await _outcome(maker, text, origin)
                    self._known.store(options.cache_domain, key, outcome, outcome.num_bytes)
                return outcome
            finally:
                self._pass_on(tenant)
        finally:
            self._num_calls[tenant] -= 1
            self._num_calls += Counter()  # drops tenants whose count is 0

    def _has_worker(self, tenant: str) -> bool:
        return (
            self._num_running.total() < NUM_WORKERS
            and self._num_running[tenant] < MAX_WORKERS_OF_TENANT
        )

    async def _wait_for_worker(self, tenant: str) -> None:
        """Wait until a worker is free for the tenant. The call owns the worker until `_pass_on`."""
        if self._has_worker(tenant):
            self._num_running[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the worker was assigned just before the cancellation
                self._pass_on(tenant)
            raise

    def _pass_on(self, tenant: str) -> None:
        """Release a worker that `tenant` used, and assign it to the first waiting tenant that may
        have one."""
        self._num_running[tenant] -= 1
        self._num_running += Counter()  # drops tenants whose count is 0
        for waiting in [each for each in self._turns if self._has_worker(each)]:
            turns = self._turns.pop(waiting)
            while turns and (turn := turns.popleft()).done():
                pass  # skips calls that were cancelled
            if turns:
                self._turns[waiting] = turns  # now the last of the waiting tenants
            if not turn.done():
                self._num_running[waiting] += 1
                turn.set_result(None)
                return


async def _outcome(maker: GrammarCompilers, text: str, origin: str) -> _Outcome:
    """The outcome of compiling a form.

    If the worker process dies, the form is compiled once more, since its death may have had another
    cause. A second death raises WorkerLostError, which is not cached: the form may still be valid.
    """
    try:
        try:
            return _Outcome(await maker.make(text, origin))
        except WorkerLostError:
            return _Outcome(await maker.make(text, origin))
    except WorkerLostError:
        raise
    except InvalidRequestError as error:
        return _Outcome(None, (str(error), error.param))
