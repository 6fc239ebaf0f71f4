"""Parses Python sources for the scripts and tests that check all of them."""

import ast
import gc


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source. Raises SyntaxError.

    The garbage collector is off meanwhile: a tree has no garbage, and visiting the nodes of all
    trees again and again took two thirds of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
