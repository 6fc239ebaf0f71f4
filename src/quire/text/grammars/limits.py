"""Bounds on the cost of writing, compiling and following a grammar.

llguidance counts its work in units of its own instead of seconds, so a grammar that is refused is
refused on every machine. The bounds admit all real-world schemas that were tried, and stop the
compiling of an exploding grammar within about a second.
"""

from functools import cache

import llguidance

MAX_GRAMMAR_BYTES = 1 << 20
"""The largest schema; all texts of a choice together may have a quarter of it."""

MAX_EXPRESSION_CHARACTERS = 8_000
"""The longest regular expression; its automaton may grow with the square of its length."""

MAX_LARK_CHARACTERS = 64 << 10
"""The longest grammar written by a caller."""

MAX_GBNF_CHARACTERS = 16 << 10
"""The longest grammar in GBNF, since converting it takes time quadratic in its length."""

MAX_GRAMMAR_RULES = 500
"""The most rules of a grammar written by a caller."""

MAX_GRAMMAR_PARTS = 3_000
"""The most rules, alternatives, groups and repetitions of a grammar written by a caller. It bounds
their nesting, which llguidance processes by recursion."""

MAX_TAGS = 256
"""The most `format` objects in one structural tag."""

MAX_NESTING = 64
"""The deepest nesting of objects and arrays in a schema, and of rules of structural tags."""

MAX_SUBSCHEMAS = 20_000
"""The most objects and booleans in one schema that are themselves schemas."""

MAX_ENUM_VALUES = 10_000
"""The most values of all enums in one schema together, and the most texts of a choice."""

MAX_ARRAY_ITEMS = 10_000
"""The largest minItems, maxItems, minProperties and maxProperties: each item is a rule."""

MAX_STRING_CHARACTERS = 100_000
"""The largest minLength and maxLength."""


@cache
def parser_limits() -> llguidance.LLParserLimits:
    """Bounds on the automata of one grammar, when it is compiled and in each step."""
    return llguidance.LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        # Otherwise compiling runs a large expression over all tokens, with initial_lexer_fuel for
        # each: 28 s and 2 GB for 64 KiB of "a?".
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
