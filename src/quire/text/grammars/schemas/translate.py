"""Translates a request's JSON schema to a term of a Lark grammar.

The term has the form `%json {...}` of llguidance, and can be part of any grammar. Called by
`grammar_text`, and by modules that use schemas in larger grammars (tool calls).
"""

import json
from dataclasses import dataclass
from typing import Any

from quire.text.grammars.check import fault_of
from quire.text.grammars.schemas.intersected_strings import StringIntersections
from quire.text.grammars.schemas.reader import read_schema
from quire.text.grammars.schemas.refusals import refusal
from quire.text.grammars.schemas.rewriter import SchemaRewriter

_PLAIN_ESCAPES = 'nrbtf\\"'
"""The allowed escapes in JSON strings, without \\u. So each character has a single spelling, and a
property can't be written a second time under a different spelling of its name."""

WHITESPACE = r" ?|\n[ \t]{0,32}"
"""The default white space between JSON tokens, on one line or indented. Its length is bounded,
since some models would write white space until their context is full."""

_MAX_LOCATED = 64
"""Maximum number of subschemas that are compiled one by one to find the one with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """Options for the white space in JSON and for unlisted properties.

    All fields except `separators` are explained in `StructuredOutputsParams`.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    #: The exact texts between two members or items, and between a key and its value; no other white
    #: space is allowed. If None, the other fields determine the white space.
    separators: tuple[str, str] | None = None


PLAIN_STYLE = JsonStyle()


def json_term(
    schema: object, origin: str, style: JsonStyle = PLAIN_STYLE, *, is_loose: bool = False
) -> str:
    """A Lark term for the values that obey `schema`, which is an object, true, or its JSON text.

    `origin` is the name of the request's field that holds the schema, for errors. If `is_loose`,
    unsupported keywords are ignored instead of refused. Raises InvalidRequestError that names the
    place in the schema and the keyword.
    """
    root = read_schema(schema, origin)
    if root is False:
        raise refusal(origin, "#", "the schema is false, so no value obeys it")
    if root is True:
        root = {}
    rewriter = SchemaRewriter(
        root, origin, closes_objects=style.disable_additional_properties, is_loose=is_loose
    )
    rewritten = rewriter.rewrite()
    StringIntersections(rewritten, origin).check(rewriter.subschemas)
    options = _options(style, rewriter.has_open_names)
    term = _term(options, rewritten)
    error = fault_of(f"start: {term}")
    if error is not None:
        raise _located(error, options, rewritten, rewriter.subschemas, origin)
    return term


def _options(style: JsonStyle, has_open_names: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if style.separators is not None:
        item, key = style.separators
        options |= {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    elif style.whitespace_pattern is not None:
        options["whitespace_pattern"] = style.whitespace_pattern
    elif style.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = WHITESPACE
    if has_open_names:
        options["json_allowed_escapes"] = _PLAIN_ESCAPES
    return options


def _term(options: dict[str, Any], schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": options, **schema}, ensure_ascii=False)


def _located(
    error: str,
    options: dict[str, Any],
    rewritten: dict[str, Any],
    subschemas: list[tuple[str, dict[str, Any]]],
    origin: str,
) -> Exception:
    """The error for the innermost subschema that llguidance also refuses when it is compiled
    alone."""
    definitions = {"$defs": rewritten["$defs"]} if "$defs" in rewritten else {}
    if "too big" in error or "too large" in error:  # each part alone may be small enough
        return refusal(origin, "#", _explained(error))
    named = [part for part in subschemas if any(key in error for key in part[1])]
    for pointer, schema in (named or subschemas)[:_MAX_LOCATED]:
        own = fault_of(f"start: {_term(options, {**schema, **definitions})}")
        if own is not None:
            return refusal(origin, pointer, _explained(own))
    return refusal(origin, "#", _explained(error))


def _explained(error: str) -> str:
    error = error.removeprefix("failed to compile JSON schema: ")
    if error.startswith("oneOf"):
        return (
            "oneOf is supported only if its schemas obviously exclude each other (by"
            " type, or by a required property with different constants); use anyOf"
        )
    return error
