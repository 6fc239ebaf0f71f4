"""From a JSON schema, as a request has it, to a rule of a grammar.

The rule is a `%json` term of llguidance's Lark dialect; any grammar may have it in it. Called by
`front`, and by whoever builds grammars around schemas (tool calls).
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
"""Without \\u: each character has one spelling, so that no name can be written in a second way to
pass for another one."""

WHITESPACE = r" ?|\n[ \t]{0,32}"
"""Between the parts of JSON, where the caller says nothing: what is usual, on a line or indented. A
model that likes blanks would else write them until its context is full."""

_MAX_LOCATED = 64
"""Parts of a schema that are tried one by one to find which of them is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """How the JSON is written, and whether objects have properties beyond those named.

    The fields are those of `StructuredOutputsParams` with the same names, but for `separators`:
    what stands between two members or elements, and between a key and its value; no other white
    space is written then. None: as the other fields say.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    separators: tuple[str, str] | None = None


PLAIN_STYLE = JsonStyle()


def json_term(
    schema: object, origin: str, style: JsonStyle = PLAIN_STYLE, *, is_loose: bool = False
) -> str:
    """A Lark term for what obeys `schema`: an object, true, or JSON text of these.

    origin: the field of the request that has the schema, for messages. is_loose: keywords that
    can't be enforced are left out, instead of being refused.
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
    """The refusal for the innermost subschema that is refused by itself."""
    definitions = {"$defs": rewritten["$defs"]} if "$defs" in rewritten else {}
    if "too big" in error or "too large" in error:  # the parts together, maybe none by itself
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
