"""Caches grammars of tools' JSON schemas, since an agent sends the same tools in each turn.

A schema takes some milliseconds to translate and check, and agents have dozens of tools.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quire.text.grammars.schemas import translate
from quire.text.grammars.schemas.reader import read_schema
from quire.text.grammars.schemas.rewriter import SchemaRewriter
from quire.text.grammars.schemas.translate import PLAIN_STYLE, JsonStyle
from quire.text.parsers.call_forms import CallForm

_MAX_REMEMBERED_CHARACTERS = 16_000  # maximum length of a cached schema


SPACED_STYLE = JsonStyle(separators=(", ", ": "))
"""The separators of `json.dumps`, and of `tojson` in templates."""


def style_of(form: CallForm) -> JsonStyle:
    """The style of JSON in calls of this format. It allows no optional white space, because a model
    might write white space endlessly."""
    return JsonStyle(separators=(form.item_separator, form.key_separator))


def json_term(
    schema: Mapping[str, Any], origin: str, style: JsonStyle = PLAIN_STYLE, *, is_loose: bool
) -> str:
    """`translate.json_term` with a cache; it raises the same errors."""
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > _MAX_REMEMBERED_CHARACTERS:
        return translate.json_term(dict(schema), origin, style, is_loose=is_loose)
    return _remembered_term(text, origin, style, is_loose)


def understood_schema(
    schema: Mapping[str, Any], origin: str, *, is_loose: bool
) -> Mapping[str, Any]:
    """The schema without annotations and unsupported keywords.

    Unsupported keywords are dropped if is_loose; otherwise they raise InvalidRequestError.
    """
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > _MAX_REMEMBERED_CHARACTERS:
        return _understood(text, origin, is_loose)
    return _remembered_schema(text, origin, is_loose)


@lru_cache(maxsize=2_048)
def _remembered_term(text: str, origin: str, style: JsonStyle, is_loose: bool) -> str:
    return translate.json_term(json.loads(text), origin, style, is_loose=is_loose)


@lru_cache(maxsize=2_048)
def _remembered_schema(text: str, origin: str, is_loose: bool) -> Mapping[str, Any]:
    return _understood(text, origin, is_loose)


def _understood(text: str, origin: str, is_loose: bool) -> Mapping[str, Any]:
    root = read_schema(text, origin)
    assert isinstance(root, dict), "arguments are an object"
    return SchemaRewriter(root, origin, closes_objects=False, is_loose=is_loose).rewrite()


def forget_terms() -> None:
    """Empty both caches."""
    _remembered_term.cache_clear()
    _remembered_schema.cache_clear()
