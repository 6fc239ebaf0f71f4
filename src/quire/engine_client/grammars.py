"""The compiler of grammars for one model, made when the first grammar comes, or at start.

One for the front and one for the engine, or one for both where they are one process: making it
takes a moment and memory for the vocabulary, which a process without grammars need not spend.
"""

import threading
from collections.abc import Callable

from quire.core.sampling_params import ModelLimits
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler
from quire.text.tokenizer import Tokenizer

LARGE_VOCABULARY = 8192
"""A server makes its compiler at start for so many tokens and more. llguidance keeps Python's lock
while it reads a vocabulary, 5 us a token: with 150,000 tokens no stream would go on for 0.8 s."""


class SharedCompiler:
    """For any number of threads. An `engine.grammar_work.GrammarSource`, and its `compile` is an
    `inputs.CompileGrammar`."""

    def __init__(self, find_tokenizer: Callable[[], Tokenizer], limits: ModelLimits) -> None:
        """find_tokenizer: called once at most."""
        self._find_tokenizer = find_tokenizer
        self._limits = limits
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def compile(self, grammar: str) -> CompiledGrammar:
        """Raises InvalidRequestError that names what can't be obeyed."""
        return self._made().compile(grammar)

    def prepare(self) -> None:
        """Make it now where making it later would hold up other requests."""
        if self._limits.generates and self._limits.vocab_size >= LARGE_VOCABULARY:
            self._made().vocabulary.make()

    def _made(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                limits = self._limits
                self._compiler = GrammarCompiler(
                    self._find_tokenizer(), limits.vocab_size, limits.end_token_ids
                )
            return self._compiler
