"""The first lines of a grammar: the origin and the option for forced tokens.

A grammar is sent between processes as plain text, and a process that refuses it names the field of
the request. A text is forced if the grammar allows nothing else; without the option for forced
tokens, any tokens may write it. Called by the modules that write grammars, and by `compiler`.
"""

_PREFIX = "// from "
UNKNOWN = "grammar"

_FORCED = '%llguidance {"no_forcing": false}\n'
_FREE = '\n%llguidance {"no_forcing": true}\n'


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


def with_forced_tokens(grammar: str) -> str:
    """The grammar with the option that forced texts are written as the tokenizer splits them.

    When such an answer comes back in a prompt, the prefix cache has its tokens, and models saw the
    same tokens in training. To be called before `with_origin`.
    """
    return _FORCED + grammar


def forces_tokens(grammar: str) -> bool:
    """Whether `with_forced_tokens` has made this grammar."""
    return without_origin(grammar).startswith(_FORCED)


def with_options(grammar: str, *, can_force: bool) -> str:
    """The grammar with llguidance's option for forced tokens, which is on by default in llguidance.

    `can_force` says whether the vocabulary can write every text; otherwise no tokens are forced.
    """
    if not forces_tokens(grammar):
        return grammar + _FREE
    return grammar if can_force else grammar.replace(_FORCED, "", 1) + _FREE
