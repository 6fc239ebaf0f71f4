"""The grammar compiler of one engine, created for the first grammar or ahead of it.

The compiler reads the tokenizer's vocabulary, which takes time and memory that a process without
grammars should not spend. So the first grammar creates the compiler. With a large vocabulary, this
would delay other requests, so `prepare` creates the compiler ahead of it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the first grammar imports it
    from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler

LARGE_VOCABULARY = 8192
"""A server reads a vocabulary of at least this many tokens once it is ready, in its engine and in
the process that compiles grammars. llguidance holds the GIL while it reads a vocabulary, for 2 us a
token. Later, with 150,000 tokens, all streams would stop for 0.4 s."""


class SharedCompiler:
    """A compiler for any number of threads. It is an `engine.grammar_work.GrammarSource`, and its
    `compile` is an `inputs.CompileGrammar`."""

    def __init__(
        self,
        find_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """`find_tokenizer` is called at most once. `vocab_size` and `end_token_ids` are the
        model's; see `GrammarCompiler`."""
        self._find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def compile(self, grammar: str, domain: str = "") -> "CompiledGrammar":
        """See `GrammarCompiler.compile`. Raises InvalidRequestError, which names a part that is not
        supported."""
        return self._made().compile(grammar, domain)

    def prepare(self) -> None:
        """Make the compiler, if making it for the first grammar would delay other requests."""
        if self._vocab_size >= LARGE_VOCABULARY:
            self._made().vocabulary.make()

    def _made(self) -> "GrammarCompiler":
        with self._lock:
            if self._compiler is None:
                from quire.text.grammars.compiler import GrammarCompiler  # 20 ms of the start

                self._compiler = GrammarCompiler(
                    self._find_tokenizer(), self._vocab_size, self._end_token_ids
                )
            return self._compiler
