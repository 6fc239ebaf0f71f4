"""Validates a grammar with llguidance, without a vocabulary, and rewrites its error messages."""

import re

import llguidance

from quire.text.grammars.deep_stack import GrammarEngineFaultError, on_deep_stack
from quire.text.grammars.limits import parser_limits

_PLACE = re.compile(r"\A(?:failed to compile JSON schema: |at )?\d+\(\d+\): ")


def fault_of(grammar: str) -> str | None:
    """llguidance's error message for `grammar`, a Lark text; None if the grammar is valid.

    Special tokens in the grammar are not checked, since they depend on the vocabulary.
    """
    try:
        is_error, messages = on_deep_stack(
            lambda: llguidance.LLMatcher.validate_grammar_with_warnings(
                grammar, limits=parser_limits()
            )
        )
    except GrammarEngineFaultError as error:
        return fault_text(error)
    if not is_error or "unknown special token" in messages[0]:
        return None
    return readable(messages[0])


def fault_text(error: GrammarEngineFaultError) -> str:
    """The error message for a grammar that made llguidance panic; contains the panic's text."""
    return f"the grammar engine fails on it ({error}); write it in another way"


def readable(message: str) -> str:
    """llguidance's error message without source listing, back trace and line number."""
    lines = [line for line in message.splitlines() if not re.match(r"\s*\d+ \| |\s*\^|\s*$", line)]
    text = " ".join(line.strip() for line in lines).partition("<backtrace>")[0]
    if "NoExtension" in text:
        return "no answer can ever complete it: its rules have no end"
    if "assertion failed" in text or text.startswith("panic"):
        return "too large: it has more than 65,000 rules"
    return _PLACE.sub("", text).strip()
