"""Regular expressions of one schema in the dialect of llguidance."""

from functools import lru_cache

from quire.text.grammars.limits import MAX_EXPRESSION_CHARACTERS
from quire.text.grammars.schemas.patterns.expressions import parsed
from quire.text.grammars.schemas.patterns.lookahead import conditions, single
from quire.text.grammars.schemas.refusals import refusal

MAX_AUTOMATA = 40
"""Different expressions in one schema for which automata are made: each may take half a second."""


class PatternTranslator:
    """Translates the patterns of one document, and bounds the work on them together."""

    def __init__(self, origin: str) -> None:
        """origin: the field of the request that has the schema, for messages."""
        self._origin = origin
        self._with_automata: set[tuple[str, ...]] = set()

    def conditions(self, pattern: object, pointer: str, keyword: str) -> tuple[str, ...]:
        """What `pattern`, at `pointer` under `keyword`, is for llguidance: all are found in a text.

        Raises InvalidRequestError for what can't be written.
        """
        text = self._checked(pattern, pointer, keyword)
        try:
            return _conditions(text)
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword} {text[:100]!r}: {error}") from error

    def single(self, pattern: object, pointer: str, keyword: str) -> str:
        """The same as one expression, which names of properties need."""
        text = self._checked(pattern, pointer, keyword)
        try:
            return _single(text)
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword} {text[:100]!r}: {error}") from error

    def intersected(self, patterns: list[str]) -> str:
        """One expression of llguidance that is found in a text if all the patterns are.

        It is NOTHING if no text has them all. Raises ValueError for what can't be written, or gets
        too complex.
        """
        if any(len(pattern) > MAX_EXPRESSION_CHARACTERS for pattern in patterns):
            raise ValueError(f"a pattern has more than {MAX_EXPRESSION_CHARACTERS} characters")
        self._count(*patterns)
        return _single(*patterns)

    def _checked(self, pattern: object, pointer: str, keyword: str) -> str:
        if not isinstance(pattern, str):
            raise refusal(self._origin, pointer, f"{keyword} must be a string")
        if len(pattern) > MAX_EXPRESSION_CHARACTERS:
            raise refusal(
                self._origin,
                pointer,
                f"{keyword} has {len(pattern)} characters;"
                f" it may have up to {MAX_EXPRESSION_CHARACTERS}",
            )
        if "(?=" in pattern or "(?!" in pattern:
            try:
                self._count(pattern)
            except ValueError as error:
                raise refusal(self._origin, pointer, f"{keyword}: {error}") from error
        return pattern

    def _count(self, *patterns: str) -> None:
        self._with_automata.add(patterns)
        if len(self._with_automata) > MAX_AUTOMATA:
            raise ValueError(
                f"more than {MAX_AUTOMATA} different patterns of the schema have look-ahead, or"
                " hold together with others"
            )


@lru_cache(maxsize=1_000)
def _conditions(pattern: str) -> tuple[str, ...]:
    return tuple(conditions(parsed(pattern)))


@lru_cache(maxsize=1_000)
def _single(*patterns: str) -> str:
    return single(*map(parsed, patterns))
