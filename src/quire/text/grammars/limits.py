"""Bounds on the cost of writing, compiling and following a grammar.

llguidance counts its work in units called fuel, not in seconds, so a grammar is refused either on
every machine or on none. The bounds admit all real-world schemas that were tried, and stop the
compiling of an exploding grammar within about a second.
"""

from functools import cache

import llguidance

MAX_GRAMMAR_BYTES = 1 << 20
"""Maximum length of a schema in bytes. All texts of a choice together may have a quarter of it."""

MAX_EXPRESSION_CHARACTERS = 8_000
"""Maximum length of a regular expression, since its automaton may grow with the square of its
length."""

MAX_LARK_CHARACTERS = 64 << 10
"""Maximum length of a client's grammar."""

MAX_GBNF_CHARACTERS = 16 << 10
"""Maximum length of a client's grammar in GBNF, since converting it takes quadratic time."""

MAX_GRAMMAR_RULES = 500
"""Maximum number of rules in a client's grammar."""

MAX_GRAMMAR_PARTS = 3_000
"""Maximum number of rules, alternatives, groups and repetitions together in a client's grammar. It
also bounds their nesting, which llguidance processes by recursion."""

MAX_TAGS = 256
"""Maximum number of `format` objects in one structural tag."""

MAX_NESTING = 64
"""Maximum nesting of objects and arrays in a schema, and of formats in a structural tag."""

MAX_SUBSCHEMAS = 20_000
"""Maximum number of subschemas in one schema."""

MAX_ENUM_VALUES = 10_000
"""Maximum number of values in all enums of one schema together, and of texts in a choice."""

MAX_ARRAY_ITEMS = 10_000
"""Maximum value of minItems, maxItems, minProperties and maxProperties, since each item is a
rule."""

MAX_STRING_CHARACTERS = 100_000
"""Maximum value of minLength and maxLength."""


@cache
def parser_limits() -> llguidance.LLParserLimits:
    """llguidance's limits for one grammar: when it is compiled, and for each token."""
    return llguidance.LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        # If True, compiling would run a large expression over every token, with initial_lexer_fuel
        # for each: 28 s and 2 GB for 64 KiB of "a?".
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
