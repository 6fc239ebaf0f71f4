"""How much a grammar may cost to write, to compile and to follow.

llguidance counts its work in units of its own instead of seconds, so a grammar that is refused is
refused on every machine. The figures leave room for all schemas in use that were tried and end what
explodes within about a second.
"""

from functools import cache

import llguidance

MAX_GRAMMAR_BYTES = 1 << 20
"""Of a schema; all texts of a choice together may have a quarter of it."""

MAX_EXPRESSION_CHARACTERS = 8_000
"""Of a regular expression: its automaton may grow with the square of that."""

MAX_LARK_CHARACTERS = 64 << 10
"""Of a grammar as the caller writes it."""

MAX_GBNF_CHARACTERS = 16 << 10
"""Of a grammar in GBNF: converting it takes a time that grows with the square of its length."""

MAX_GRAMMAR_RULES = 500
"""Of a grammar as the caller writes it."""

MAX_GRAMMAR_PARTS = 3_000
"""Rules, alternatives, groups and repetitions of a grammar as the caller writes it:
how deep they may stand in one another, which llguidance follows by recursion."""

MAX_TAGS = 256
"""Formats in one structural tag."""

MAX_NESTING = 64
"""Of objects and arrays in a schema; of rules that stand in one another by structural tags."""

MAX_SUBSCHEMAS = 20_000
"""In one schema: every object or boolean that stands where a schema may."""

MAX_ENUM_VALUES = 10_000
"""In one schema, all lists together; and texts in a choice."""

MAX_ARRAY_ITEMS = 10_000
"""Of minItems, maxItems, minProperties and maxProperties: each item is a rule of its own."""

MAX_STRING_CHARACTERS = 100_000
"""Of minLength and maxLength."""


@cache
def parser_limits() -> llguidance.LLParserLimits:
    """Bounds on the automata that one grammar may make, at compilation and in each step."""
    return llguidance.LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        # Else a large expression is run over all tokens while it is compiled, with the fuel of
        # initial_lexer_fuel for each: 28 s and 2 GB for 64 KiB of "a?".
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
