"""Translates the regular expressions of one schema to llguidance's dialect."""

from functools import lru_cache

from quire.text.grammars.limits import MAX_EXPRESSION_CHARACTERS
from quire.text.grammars.schemas.patterns.expressions import parsed
from quire.text.grammars.schemas.patterns.lookahead import conditions, single
from quire.text.grammars.schemas.refusals import refusal

MAX_AUTOMATA = 40
"""The most expressions in one schema that need automata, each of which may take half a second."""


class PatternTranslator:
    """Translates the patterns of one document, and bounds the total work."""

    def __init__(self, origin: str) -> None:
        """`origin` names the request's field with the schema in messages."""
        self._origin = origin
        self._with_automata: set[tuple[str, ...]] = set()

    def conditions(self, pattern: object, pointer: str, keyword: str) -> tuple[str, ...]:
        """Expressions for llguidance that together replace `pattern`, at `pointer` under `keyword`.
        A text matches if it contains all of them.

        Raises InvalidRequestError for an unsupported pattern.
        """
        text = self._checked(pattern, pointer, keyword)
        try:
            return _conditions(text)
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword} {text[:100]!r}: {error}") from error

    def single(self, pattern: object, pointer: str, keyword: str) -> str:
        """Does the same as `conditions`, but in a single expression, as property names require."""
        text = self._checked(pattern, pointer, keyword)
        try:
            return _single(text)
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword} {text[:100]!r}: {error}") from error

    def intersected(self, patterns: list[str]) -> str:
        """One expression for llguidance that is found in a text if all the patterns are.

        Returns NOTHING for contradictory patterns. Raises ValueError if a pattern is unsupported or
        the result gets too complex.
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
