"""Compiles the grammars of calls, so that a bad one is a 400.

The engine compiles them again. This has threads of its own, few of them: while grammars that take
long are compiled, which end within their limits, those of other calls wait for their turn, and
calls without a grammar wait for nothing. Tenants take turns, and one that has many calls waiting
leaves as many places to the others, so that none keeps another out.
"""

import asyncio
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine_client.inputs import CompileGrammar, InputProcessor
from quire.errors import OverloadedError

NUM_THREADS = 2
MAX_WAITING = 512
"""Calls whose grammars are being compiled, or wait for that. A tenant's are at most as many as
there are free places: half of these, where no other tenant has any."""


class GrammarChecks:
    """Invariants: at most NUM_THREADS grammars are compiled at once; nobody waits while fewer are.
    `_turns` has the tenants that wait, in the order in which they take their turns."""

    def __init__(self, compile_grammar: CompileGrammar | None = None) -> None:
        """compile_grammar: None refuses grammars."""
        self.compile_grammar = compile_grammar
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-grammar-checks")
        self._num_running = 0
        self._num_calls: Counter[str] = Counter()
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}

    async def grammar_for(
        self,
        inputs: InputProcessor,
        wanted: StructuredOutputsParams | None,
        given: str | None = None,
        tenant: str = "",
    ) -> str | None:
        """The grammar of what is wanted, or the one that is given; it compiles.

        inputs: made with compile_grammar. tenant: whose call it is. Raises InvalidRequestError that
        names what can't be obeyed, and OverloadedError where too many calls wait.
        """
        if wanted is None and given is None:
            return None
        num_own = self._num_calls[tenant]
        if num_own >= MAX_WAITING - self._num_calls.total():
            raise OverloadedError(
                f"{num_own} calls wait for their grammars to be compiled, as many as may; retry"
                " later"
            )
        self._num_calls[tenant] += 1
        try:
            await self._turn(tenant)
            try:
                return await self._compiled(inputs, wanted, given)
            finally:
                self._pass_on()
        finally:
            self._num_calls[tenant] -= 1
            self._num_calls += Counter()  # forgets a tenant that has none

    async def _compiled(
        self, inputs: InputProcessor, wanted: StructuredOutputsParams | None, given: str | None
    ) -> str | None:
        loop = asyncio.get_running_loop()
        if given is None:
            return await loop.run_in_executor(self._threads, inputs.prepare_grammar, wanted)
        await loop.run_in_executor(self._threads, inputs.check_grammar, given)
        return given

    async def _turn(self, tenant: str) -> None:
        """Wait until a thread is free; it is then this call's until `_pass_on`."""
        if self._num_running < NUM_THREADS:
            self._num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had come just then
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """A thread is free: the next tenant's first call takes it."""
        while self._turns:
            tenant = next(iter(self._turns))
            turns = self._turns.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._turns[tenant] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1
