"""Terms of JSON schemas, remembered: an agent sends the same tools with every turn.

A schema takes some milliseconds to translate and check, and agents have dozens of tools.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quire.text.grammars.schemas import translate
from quire.text.grammars.schemas.translate import PLAIN_STYLE, JsonStyle

SPACED_STYLE = JsonStyle(separators=(", ", ": "))
"""As templates write the calls of a history, by `tojson` or `json.dumps`: what a call wrote is then
found in the prefix cache. A model can't write white space without end, either."""

_MAX_REMEMBERED_CHARACTERS = 16_000  # of one schema


def json_term(schema: Mapping[str, Any], origin: str, style: JsonStyle = PLAIN_STYLE) -> str:
    """As `translate.json_term`, which also says what is raised."""
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > _MAX_REMEMBERED_CHARACTERS:
        return translate.json_term(dict(schema), origin, style)
    return _remembered(text, origin, style)


@lru_cache(maxsize=2_048)
def _remembered(text: str, origin: str, style: JsonStyle) -> str:
    return translate.json_term(json.loads(text), origin, style)
