"""The compiler of grammars for one engine, made at the first grammar or at start.

Making it takes a moment and memory for the vocabulary, which a process without grammars need not
spend.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler
from quire.text.tokenizer import Tokenizer

LARGE_VOCABULARY = 8192
"""A server reads a vocabulary at start, for its engine and for the process that makes grammars, if
it has so many tokens. llguidance keeps Python's lock
while it reads a vocabulary, 2 us a token: with 150,000 tokens no stream would go on for 0.4 s."""


class SharedCompiler:
    """For any number of threads. An `engine.grammar_work.GrammarSource`, and its `compile` is an
    `inputs.CompileGrammar`."""

    def __init__(
        self,
        find_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """find_tokenizer: called once at most. vocab_size, end_token_ids: the model's; see
        `GrammarCompiler`."""
        self._find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._begun: Future[None] | None = None

    def compile(self, grammar: str, domain: str = "") -> CompiledGrammar:
        """See `GrammarCompiler.compile`. Raises InvalidRequestError that names what can't be
        obeyed."""
        return self._made().compile(grammar, domain)

    def begin(self) -> None:
        """Begin to make it, in a thread, if making it later would hold up other requests."""
        if self._vocab_size >= LARGE_VOCABULARY:
            thread = ThreadPoolExecutor(1, "quire-vocabulary")
            self._begun = thread.submit(lambda: self._made().vocabulary.make())
            thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for what `begin` has begun. Raises what kept it from being made."""
        if self._begun is not None:
            self._begun.result()

    def _made(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(
                    self._find_tokenizer(), self._vocab_size, self._end_token_ids
                )
            return self._compiler
