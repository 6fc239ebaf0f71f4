"""Compiles grammars for one model's vocabulary, and caches compiled grammars.

A grammar is a text in llguidance's variant of Lark, written by `grammar_text`. Its first line names
the request's field that it comes from.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

import llguidance

from quire.errors import InvalidRequestError
from quire.text.grammars.check import fault_text, readable
from quire.text.grammars.deep_stack import GrammarEngineFaultError, on_deep_stack
from quire.text.grammars.domain_cache import DomainCache
from quire.text.grammars.grammar_header import origin_of, with_options
from quire.text.grammars.limits import parser_limits
from quire.text.grammars.state import GrammarState
from quire.text.grammars.vocabulary import GrammarVocabulary
from quire.text.tokenizer import Tokenizer


class CompiledGrammar:
    """A compiled grammar, from which any number of answers can start. Thread-safe.

    The matchers of all its answers share one lexer. The lexer stores every state that any answer
    has reached, up to `max_lexer_states`; beyond that, all answers that use the lexer fail.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: GrammarVocabulary,
        on_too_complex: Callable[[], None],
    ) -> None:
        """Takes ownership of `matcher`. For `on_too_complex` see `GrammarState`."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._on_too_complex = on_too_complex
        self._lock = Lock()

    def start(self) -> GrammarState:
        """A new state, before the first token of an answer."""
        with self._lock:
            return GrammarState(self._matcher.deep_copy(), self._vocabulary, self._on_too_complex)


class GrammarCompiler:
    """Compiles and caches the grammars of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        *,
        max_cached: int = 128,
        max_cached_bytes: int = 4 << 20,
    ) -> None:
        """`vocab_size` is the size of the model's vocabulary. Any of `end_token_ids` may end an
        answer; if it is empty, an answer ends without a token.

        `max_cached` bounds the number of cached grammars, and `max_cached_bytes` the length of
        their texts. The least recently used grammars are evicted.
        """
        self.tokenizer = tokenizer
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size, end_token_ids)
        self._cache: DomainCache[CompiledGrammar] = DomainCache(max_cached, max_cached_bytes)
        self._lock = Lock()

    def compile(self, grammar: str, domain: str = "") -> CompiledGrammar:
        """The compiled `grammar`, from the cache if it is there. Compiling releases the GIL.

        A grammar that was cached in one cache domain is never used in another domain. Raises
        InvalidRequestError that names the field and the error in the grammar.
        """
        with self._lock:
            known = self._cache.find(domain, grammar)
        if known is not None:
            return known
        # Called if the lexer has too many states. The next answer then compiles a new lexer.
        forget = partial(self._forget, grammar, domain)
        compiled = CompiledGrammar(self._matcher(grammar), self.vocabulary, forget)
        with self._lock:
            self._cache.store(domain, grammar, compiled, len(grammar))
        return compiled

    def _forget(self, grammar: str, domain: str) -> None:
        with self._lock:
            self._cache.forget(domain, grammar)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A new matcher. Computes the first token mask, so that a grammar that allows no first
        token is refused here."""
        tokenizer, limits = self.vocabulary.tokenizer, parser_limits()
        can_force = self.vocabulary.writes_all_bytes

        def make() -> tuple[llguidance.LLMatcher, str]:
            matcher = llguidance.LLMatcher(
                tokenizer, with_options(grammar, can_force=can_force), log_level=0, limits=limits
            )
            if not matcher.is_error():
                matcher.compute_bitmask()
            return matcher, matcher.get_error() if matcher.is_error() else ""

        origin = origin_of(grammar)
        try:
            matcher, error = on_deep_stack(make)
        except GrammarEngineFaultError as fault:
            raise InvalidRequestError(f"{origin}: {fault_text(fault)}", origin) from fault
        if error:
            raise InvalidRequestError(f"{origin}: {readable(error)}", origin)
        return matcher
