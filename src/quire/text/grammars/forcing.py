"""Grammar options that decide which tokens write a text that the grammar forces.

A text is forced if the grammar allows nothing else. Without the option, any tokens may write it.
Called by the modules that write grammars, and by `compiler`.
"""

from quire.text.grammars.origin import without_origin

_FORCED = '%llguidance {"no_forcing": false}\n'
_FREE = '\n%llguidance {"no_forcing": true}\n'


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
