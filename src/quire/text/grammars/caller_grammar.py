"""Checks grammars that clients write in Lark or GBNF, and converts them to llguidance's Lark.

JSON schemas in a grammar (`%json {...}`) are rewritten like a request's JSON schema. Rule options
that would end an answer early or have no effect (stop, temperature) are refused. Called by
`grammar_text`.
"""

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from quire.errors import InvalidRequestError
from quire.text.grammars.limits import (
    MAX_EXPRESSION_CHARACTERS,
    MAX_GBNF_CHARACTERS,
    MAX_GRAMMAR_PARTS,
    MAX_GRAMMAR_RULES,
)
from quire.text.grammars.schemas.translate import JsonStyle, json_term

_TOKEN = re.compile(
    r"""
      "(?:\\.|[^"\\\n])*"i?            # a text
    | //[^\n]* | \#[^\n]*              # a comment
    | /(?:\\.|[^/\\\n])+/[imslux]*     # a regular expression
    | (?P<json>%json\b)
    | (?P<directive>%[a-z_]+)
    | \[(?P<options>[^\]\n]*)\]
    | (?P<part>[(:|?*+~{])
    """,
    re.VERBOSE,
)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_REFUSED_OPTION = re.compile(r"\b(temperature|stop|max_tokens|capture|stop_capture)\b")
_DIRECTIVES = frozenset({"%ignore", "%import", "%regex", "%llguidance"})


def lark_of(text: str, origin: str, style: JsonStyle) -> str:
    """The checked Lark grammar for `text`, which is Lark or GBNF. Raises InvalidRequestError that
    names `origin`."""
    if _GBNF_RULE.search(text) and not is_lark_syntax(text):
        text = _from_gbnf(text, origin)
    return _checked(text, origin, style)


def _from_gbnf(text: str, origin: str) -> str:
    if len(text) > MAX_GBNF_CHARACTERS:
        raise InvalidRequestError(
            f"{origin}: it has {len(text)} characters; a grammar in GBNF may have up to"
            f" {MAX_GBNF_CHARACTERS}, in Lark's syntax (with a rule named start) more",
            origin,
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises plain Exception for undefined rules
        what = " ".join(str(error).split())[:300]
        raise InvalidRequestError(f"{origin}: not a grammar in GBNF: {what}", origin) from error


def _checked(text: str, origin: str, style: JsonStyle) -> str:
    written: list[str] = []
    position = num_parts = num_rules = 0
    while (token := _TOKEN.search(text, position)) is not None:
        # First, copy the text before the token, and replace a schema by its rewritten term.
        written.append(text[position : token.start()])
        position = token.end()
        if token["json"]:
            term, position = _schema(text, position, origin, style)
            written.append(term)
            continue
        written.append(token[0])
        # Second, check the token's length and the numbers of parts and rules.
        if len(token[0]) > MAX_EXPRESSION_CHARACTERS:
            raise InvalidRequestError(
                f"{origin}: a text, an expression or a comment in it is longer than"
                f" {MAX_EXPRESSION_CHARACTERS} characters",
                origin,
            )
        num_parts += token["part"] is not None
        if num_parts > MAX_GRAMMAR_PARTS:
            raise InvalidRequestError(
                f"{origin}: it has more than {MAX_GRAMMAR_PARTS} rules, alternatives, groups and"
                " repetitions",
                origin,
            )
        num_rules += token["part"] == ":"
        if num_rules > MAX_GRAMMAR_RULES:
            raise InvalidRequestError(
                f"{origin}: it has more than {MAX_GRAMMAR_RULES} rules", origin
            )
        _check_word(token, text, origin)
    return "".join([*written, text[position:]])


def _check_word(token: re.Match[str], text: str, origin: str) -> None:
    option = _REFUSED_OPTION.search(token["options"] or "")
    if option is not None:
        raise InvalidRequestError(
            f"{origin}: the option {option[1]} of a rule is not supported; leave it out", origin
        )
    directive = token["directive"]
    if directive is None:
        return
    if directive not in _DIRECTIVES:
        raise InvalidRequestError(f"{origin}: {directive} is not supported", origin)
    if directive == "%llguidance" and not re.match(r"\s*\{\s*\}", text[token.end() :]):
        raise InvalidRequestError(
            f"{origin}: %llguidance with options is not supported; write {{}}", origin
        )


def _schema(text: str, position: int, origin: str, style: JsonStyle) -> tuple[str, int]:
    """The Lark term for the schema after `%json`, and the position after the schema."""
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        schema, end = json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{origin}: %json: {error}", origin) from error
    return json_term(schema, origin, style), end
