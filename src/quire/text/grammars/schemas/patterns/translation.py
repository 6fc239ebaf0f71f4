"""Translates the regular expressions of one JSON schema to llguidance's syntax."""

from functools import lru_cache

from quire.text.grammars.limits import MAX_EXPRESSION_CHARACTERS
from quire.text.grammars.schemas.patterns.expressions import parsed
from quire.text.grammars.schemas.patterns.lookahead import conditions, single
from quire.text.grammars.schemas.refusals import refusal

MAX_AUTOMATA = 40
"""Maximum number of expressions in one schema that need automata. Each may take half a second."""


class PatternTranslator:
    """Translates the patterns of one JSON schema, and bounds the total work."""

    def __init__(self, origin: str) -> None:
        """`origin` is the name of the request's field that holds the schema, for errors."""
        self._origin = origin
        self._with_automata: set[tuple[str, ...]] = set()

    def conditions(self, pattern: object, pointer: str, keyword: str) -> tuple[str, ...]:
        """Expressions in llguidance's syntax that together replace `pattern`: a text must contain a
        match of each. `pattern` is at `pointer`, in `keyword`.

        Raises InvalidRequestError for an unsupported pattern.
        """
        text = self._checked(pattern, pointer, keyword)
        try:
            return _conditions(text)
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword} {text[:100]!r}: {error}") from error

    def single(self, pattern: object, pointer: str, keyword: str) -> str:
        """Like `conditions`, but a single expression, which property names require."""
        text = self._checked(pattern, pointer, keyword)
        try:
            return _single(text)
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword} {text[:100]!r}: {error}") from error

    def intersected(self, patterns: list[str]) -> str:
        """One expression in llguidance's syntax for the texts that contain a match of every
        pattern.

        Returns NOTHING if no text does. Raises ValueError if a pattern is unsupported or the result
        is too complex.
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
                " constrain a text together with other patterns"
            )


@lru_cache(maxsize=1_000)
def _conditions(pattern: str) -> tuple[str, ...]:
    return tuple(conditions(parsed(pattern)))


@lru_cache(maxsize=1_000)
def _single(*patterns: str) -> str:
    return single(*map(parsed, patterns))
