"""Converts a request's structured-output parameters to the text of a grammar.

The text is sent to other processes and serves as a cache key. The matcher's state within an answer
can be rebuilt from the text and the answer's tokens. Called by the API server and the offline API.
"""

from collections.abc import Callable

from quire.core.structured_outputs import KINDS, StructuredOutputsParams
from quire.errors import InvalidRequestError, check_characters
from quire.text.grammars.caller_grammar import lark_of
from quire.text.grammars.check import fault_of
from quire.text.grammars.grammar_header import with_origin
from quire.text.grammars.intersections.lark_check import check_lark
from quire.text.grammars.intersections.set_counts import TooManyMembersError
from quire.text.grammars.lark import expression, literal
from quire.text.grammars.limits import (
    MAX_ENUM_VALUES,
    MAX_EXPRESSION_CHARACTERS,
    MAX_GRAMMAR_BYTES,
    MAX_LARK_CHARACTERS,
)
from quire.text.grammars.schemas.translate import JsonStyle, json_term
from quire.text.grammars.structural_tags import structural_tag_rules


def grammar_of(params: StructuredOutputsParams, field: str = "structured_outputs") -> str:
    """The grammar of all answers that obey `params`, as text for `GrammarCompiler.compile`.

    `field` is the name of the request's field that holds `params`, for errors. Raises
    InvalidRequestError that names the field, and for a schema also the place and the keyword.
    """
    kind = next(name for name in KINDS if getattr(params, name) not in (None, False))
    origin = field if kind == "json" and field != "structured_outputs" else f"{field}.{kind}"
    return with_origin(_MAKERS[kind](params, origin), origin)


def style_of(params: StructuredOutputsParams) -> JsonStyle:
    """The JSON style in `params`. Raises InvalidRequestError if whitespace_pattern is invalid."""
    pattern, field = params.whitespace_pattern, "structured_outputs.whitespace_pattern"
    if pattern is not None:
        _text(pattern, field, MAX_EXPRESSION_CHARACTERS)
    return JsonStyle(
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        whitespace_pattern=params.whitespace_pattern,
    )


def _json(params: StructuredOutputsParams, origin: str) -> str:
    return f"start: {json_term(params.json, origin, style_of(params))}"


def _json_object(params: StructuredOutputsParams, origin: str) -> str:
    return f"start: {json_term({'type': 'object'}, origin, style_of(params))}"


def _regex(params: StructuredOutputsParams, origin: str) -> str:
    return _checked(
        f"start: {expression(_text(params.regex, origin, MAX_EXPRESSION_CHARACTERS))}", origin
    )


def _choice(params: StructuredOutputsParams, origin: str) -> str:
    choice = params.choice
    if isinstance(choice, str) or not choice:
        raise InvalidRequestError(f"{origin} must be a list with at least one text", origin)
    if len(choice) > MAX_ENUM_VALUES:
        raise InvalidRequestError(
            f"{origin} has {len(choice)} texts; it may have up to {MAX_ENUM_VALUES}", origin
        )
    texts = [_text(text, origin, MAX_GRAMMAR_BYTES) for text in choice]
    _check_length(sum(map(len, texts)), origin, MAX_GRAMMAR_BYTES // 4)
    return _checked("start: CHOICE\nCHOICE: " + " | ".join(map(literal, texts)), origin)


def _grammar(params: StructuredOutputsParams, origin: str) -> str:
    text = _text(params.grammar, origin, MAX_LARK_CHARACTERS)
    return _checked(lark_of(text, origin, style_of(params)), origin)


def _structural_tag(params: StructuredOutputsParams, origin: str) -> str:
    return _checked(structural_tag_rules(params.structural_tag, origin, style_of(params)), origin)


_MAKERS: dict[str, Callable[[StructuredOutputsParams, str], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _text(value: object, origin: str, bound: int) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{origin} must be text, not a {type(value).__name__}", origin)
    check_characters(value, origin)
    _check_length(len(value), origin, bound)
    return value


def _check_length(length: int, origin: str, bound: int) -> None:
    if length > bound:
        raise InvalidRequestError(
            f"{origin} has {length} characters; it may have up to {bound}", origin
        )


def _checked(grammar: str, origin: str) -> str:
    """Return `grammar` after a check that it is valid and not too costly to match. Unlike
    compiling, this needs no vocabulary."""
    try:
        check_lark(grammar)
    except TooManyMembersError as error:
        raise InvalidRequestError(f"{origin}: {error}", origin) from error
    fault = fault_of(grammar)
    if fault is not None:
        raise InvalidRequestError(f"{origin}: {fault}", origin)
    return grammar
