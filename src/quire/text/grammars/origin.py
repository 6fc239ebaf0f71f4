"""The first line of a grammar's text, which names the request's field that it comes from.

A grammar is sent between processes as plain text, and a process that refuses it names that field.
"""

_PREFIX = "// from "
UNKNOWN = "grammar"


def with_origin(grammar: str, origin: str) -> str:
    """`grammar` with a first line that names `origin` ("structured_outputs.regex")."""
    return f"{_PREFIX}{origin}\n{grammar}"


def without_origin(grammar: str) -> str:
    """`grammar` without the first line that `with_origin` adds."""
    line, _, rest = grammar.partition("\n")
    return rest if line.startswith(_PREFIX) else grammar


def origin_of(grammar: str) -> str:
    """The field that `with_origin` has written; "grammar" if there is none."""
    line, _, _ = grammar.partition("\n")
    return line.removeprefix(_PREFIX) if line.startswith(_PREFIX) else UNKNOWN
