"""Fake grammars of token ids, in which the allowed tokens depend on all earlier tokens.

    "3 5 12"    each token equals the sum of all earlier tokens modulo 3; the output may end after 5
                tokens and ends after 12 tokens at the latest

If no token of a small vocabulary fits, all tokens except the end are allowed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.grammar_work import GrammarWork
from quire.engine.token_masks import GrammarConstraint
from quire.errors import InvalidRequestError

P = ParamSpec("P")
T = TypeVar("T")


class InlineExecutor(Executor):
    """Runs each function at once in the calling thread, so that results are deterministic."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # raised again when the caller asks for the result
            done.set_exception(error)
        return done


@dataclass(frozen=True, slots=True)
class FakeGrammar:
    """A grammar in the form that the module's docstring explains. The model's end token is 0."""

    modulus: int
    #: The minimum number of tokens of an output.
    fewest: int
    #: The maximum number of tokens of an output.
    most: int
    vocab_size: int

    def start(self) -> "FakeGrammarState":
        return FakeGrammarState(self)


class FakeGrammarState:
    """The state of a grammar after some tokens: an `engine.token_masks.FollowedGrammar`."""

    def __init__(self, grammar: FakeGrammar, total: int = 0, count: int = 0) -> None:
        self._grammar = grammar
        self._total = total
        self._count = count

    @property
    def is_finished(self) -> bool:
        return self._count >= self._grammar.most

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self._allowed():
                raise ValueError(f"token {token_id} is not allowed after {self._count} others")
            self._total += token_id
            self._count += 1

    def mask(self) -> bytes:
        mask = bytearray(-(-self._grammar.vocab_size // 8))
        for token_id in self._allowed():
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    def forced_tokens(self, most: int) -> list[int]:
        forced: list[int] = []
        state = self.copy()
        while len(forced) < most and len(state._allowed()) == 1:
            forced += state._allowed()
            if state.is_finished:
                break
            state.consume(forced[-1:])
        return forced

    def copy(self) -> "FakeGrammarState":
        return FakeGrammarState(self._grammar, self._total, self._count)

    def _allowed(self) -> Sequence[int]:
        grammar = self._grammar
        if self.is_finished:
            return (0,)
        first = self._total % grammar.modulus or grammar.modulus
        allowed = range(first, grammar.vocab_size, grammar.modulus)
        found = list(allowed or range(1, grammar.vocab_size))
        return [0, *found] if self._count >= grammar.fewest else found


class FakeGrammars:
    """Compiles fake grammars: an `engine.grammar_work.GrammarSource`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def compile(self, grammar: str, domain: str = "") -> FakeGrammar:
        try:
            modulus, fewest, most = map(int, grammar.split())
        except ValueError as error:
            raise InvalidRequestError(
                f"{grammar!r:.80} is not three numbers", "structured_outputs"
            ) from error
        return FakeGrammar(modulus, fewest, most, self._vocab_size)

    def prepare(self) -> None:
        """See `GrammarSource`; there is nothing to prepare."""


def fake_grammar_work(vocab_size: int, **options: Any) -> GrammarWork:
    """A `GrammarWork` for the fake model. It compiles in the calling thread; no mask is slow."""
    return GrammarWork(
        FakeGrammars(vocab_size), (0,), threads=InlineExecutor(), clock=lambda: 0.0, **options
    )


def constraint_of(
    request: Request, vocab_size: int, token_ids: Sequence[int] = ()
) -> GrammarConstraint | None:
    """The constraint of a request after the tokens `token_ids`; None if it has no grammar."""
    params: DecodingParams = request.params
    if params.grammar is None:
        return None
    state = FakeGrammars(vocab_size).compile(params.grammar).start()
    return GrammarConstraint(state, params, (0,), token_ids)
