"""Translates a JSON schema of a request to a term of a grammar.

The term is a `%json` term of llguidance's Lark dialect, which can be part of any grammar. Called by
`grammar_text`, and by modules that build grammars around schemas (tool calls).
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
"""Escapes without \\u: each character has one spelling, so a name can't be written in a second way
to pass for another name."""

WHITESPACE = r" ?|\n[ \t]{0,32}"
"""The usual white space between the parts of JSON, on one line or indented, if the caller sets
none. Without a bound, a model that likes blanks would write them until its context is full."""

_MAX_LOCATED = 64
"""The most parts of a schema that are compiled one by one to find the one with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """Options for writing JSON, and whether objects have properties beyond those named.

    Except for `separators`, the fields are those of `StructuredOutputsParams`.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    #: The texts between two members or elements, and between a key and its value, with no other
    #: white space. None leaves white space to the other fields.
    separators: tuple[str, str] | None = None


PLAIN_STYLE = JsonStyle()


def json_term(
    schema: object, origin: str, style: JsonStyle = PLAIN_STYLE, *, is_loose: bool = False
) -> str:
    """A Lark term for the values of `schema`: an object, true, or JSON text of these.

    `origin` names the request's field with the schema in messages. If `is_loose`, unsupported
    keywords are left out instead of being refused.
    Raises InvalidRequestError that names the place in the schema and the keyword.
    """
    root = read_schema(schema, origin)
    if root is False:
        raise refusal(origin, "#", "the schema is false; nothing obeys it")
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
    """The refusal for the innermost subschema that llguidance refuses on its own."""
    definitions = {"$defs": rewritten["$defs"]} if "$defs" in rewritten else {}
    if "too big" in error or "too large" in error:  # perhaps no part is too large on its own
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
            "oneOf is supported only where it is plain that its schemas exclude each other (by"
            " type, or by a required property with different constants); use anyOf"
        )
    return error
