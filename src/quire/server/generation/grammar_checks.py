"""Compiles the grammars of calls, so that a bad one is a 400.

The engine compiles them again. This has threads of its own, few of them: while grammars that take
long are compiled, which end within their limits, those of other calls wait for their turn, and
calls without a grammar wait for nothing.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine_client.inputs import CompileGrammar, InputProcessor
from quire.errors import OverloadedError

NUM_THREADS = 2
MAX_WAITING = 256
"""Calls whose grammars are being compiled, or wait for that."""


class GrammarChecks:
    """Invariant: at most NUM_THREADS grammars are compiled at once."""

    def __init__(self, compile_grammar: CompileGrammar | None = None) -> None:
        """compile_grammar: None refuses grammars."""
        self.compile_grammar = compile_grammar
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-grammar-checks")
        self._num_waiting = 0

    async def grammar_for(
        self,
        inputs: InputProcessor,
        wanted: StructuredOutputsParams | None,
        given: str | None = None,
    ) -> str | None:
        """The grammar of what is wanted, or the one that is given; it compiles.

        inputs: made with compile_grammar. Raises InvalidRequestError that names what can't be
        obeyed, and OverloadedError where too many calls wait.
        """
        if wanted is None and given is None:
            return None
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} calls wait for their grammars to be compiled, which is the"
                " server's bound; retry later"
            )
        loop = asyncio.get_running_loop()
        self._num_waiting += 1
        try:
            if given is None:
                return await loop.run_in_executor(self._threads, inputs.prepare_grammar, wanted)
            await loop.run_in_executor(self._threads, inputs.check_grammar, given)
            return given
        finally:
            self._num_waiting -= 1
