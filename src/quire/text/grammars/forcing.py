"""Whether a text about which a grammar leaves no choice is written in certain tokens.

In most grammars any tokens may write it. Called by whoever writes grammars, and by `compiler`.
"""

from quire.text.grammars.origin import without_origin

_FORCED = '%llguidance {"no_forcing": false}\n'
_FREE = '\n%llguidance {"no_forcing": true}\n'


def with_forced_tokens(grammar: str) -> str:
    """The grammar, for answers whose forced texts are written as the tokenizer splits them.

    What an answer wrote so is found in the prefix cache when it comes back in a prompt, and it is
    what models saw in training. Before `with_origin`.
    """
    return _FORCED + grammar


def forces_tokens(grammar: str) -> bool:
    """Whether `with_forced_tokens` made it."""
    return without_origin(grammar).startswith(_FORCED)


def with_options(grammar: str, *, can_force: bool) -> str:
    """The grammar as llguidance takes it, which by itself would force tokens in all of them.

    can_force: whether the vocabulary can write every text; in others no tokens are forced.
    """
    if not forces_tokens(grammar):
        return grammar + _FREE
    return grammar if can_force else grammar.replace(_FORCED, "", 1) + _FREE
