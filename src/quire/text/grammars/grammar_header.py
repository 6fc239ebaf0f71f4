"""Reads and writes a grammar's first lines: the origin, and the option for forced tokens.

Grammars are sent between processes as plain text. The origin is the request's field that a grammar
comes from; a process that refuses the grammar names the origin in its error. A text is forced if
the grammar allows only this text at its place. Without the option for forced tokens, the model may
choose any tokens that spell it. Called by the modules that write grammars, and by `compiler`.
"""

_PREFIX = "// from "
UNKNOWN = "grammar"

_FORCED = '%llguidance {"no_forcing": false}\n'
_FREE = '\n%llguidance {"no_forcing": true}\n'


def with_origin(grammar: str, origin: str) -> str:
    """`grammar` with a first line that names `origin`, such as "structured_outputs.regex"."""
    return f"{_PREFIX}{origin}\n{grammar}"


def without_origin(grammar: str) -> str:
    """`grammar` without the first line that `with_origin` adds."""
    line, _, rest = grammar.partition("\n")
    return rest if line.startswith(_PREFIX) else grammar


def origin_of(grammar: str) -> str:
    """The origin that `with_origin` added; "grammar" if there is none."""
    line, _, _ = grammar.partition("\n")
    return line.removeprefix(_PREFIX) if line.startswith(_PREFIX) else UNKNOWN


def with_forced_tokens(grammar: str) -> str:
    """The grammar with the option that a forced text gets exactly the tokens of the tokenizer.

    So the prefix cache has these tokens when the answer is part of a later prompt, and the model
    sees the same tokens as in training. Must be called before `with_origin`.
    """
    return _FORCED + grammar


def forces_tokens(grammar: str) -> bool:
    """True if `with_forced_tokens` was applied to this grammar."""
    return without_origin(grammar).startswith(_FORCED)


def with_options(grammar: str, *, can_force: bool) -> str:
    """The grammar with llguidance's option for forced tokens set explicitly.

    `can_force` is True if the vocabulary can spell every text; otherwise no tokens are forced.
    """
    if not forces_tokens(grammar):
        return grammar + _FREE
    return grammar if can_force else grammar.replace(_FORCED, "", 1) + _FREE
