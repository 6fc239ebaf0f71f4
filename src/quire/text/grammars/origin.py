"""The first line of a grammar's text: which field of the request it comes from.

A grammar crosses processes as plain text, and whoever refuses it there names that field.
"""

_PREFIX = "// from "
UNKNOWN = "grammar"


def with_origin(grammar: str, origin: str) -> str:
    """`grammar` with a first line that names `origin` ("structured_outputs.regex")."""
    return f"{_PREFIX}{origin}\n{grammar}"


def without_origin(grammar: str) -> str:
    """What `with_origin` was given."""
    line, _, rest = grammar.partition("\n")
    return rest if line.startswith(_PREFIX) else grammar


def origin_of(grammar: str) -> str:
    """What `with_origin` wrote; "grammar" where it did not."""
    line, _, _ = grammar.partition("\n")
    return line.removeprefix(_PREFIX) if line.startswith(_PREFIX) else UNKNOWN
