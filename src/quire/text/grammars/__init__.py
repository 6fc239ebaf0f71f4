"""Grammars for answers (JSON Schema, regular expressions, EBNF) and their token masks.

params ──grammar_text──▶ text of a grammar ──compiler──▶ CompiledGrammar ──start──▶ GrammarState
                  (plain data)                    (one per vocabulary)      (one per sequence)
"""

from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.state import GrammarState

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarState", "grammar_of"]
