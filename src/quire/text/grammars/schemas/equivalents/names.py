"""Converts `propertyNames` to an object schema with properties or patternProperties.

llguidance does not support propertyNames. An object schema that allows only the listed properties
or patterns, combined with the original schema, allows the same names. Called by `equivalent`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from quire.text.grammars.limits import MAX_STRING_CHARACTERS
from quire.text.grammars.schemas.bounds import MAX_OPTIONAL_PROPERTIES
from quire.text.grammars.schemas.keywords import is_annotation
from quire.text.grammars.schemas.patterns.format_patterns import OF_LIBRARIES, OF_NAMES, STANDARD
from quire.text.grammars.schemas.patterns.translation import PatternTranslator

Resolve = Callable[[dict[str, Any]], Any]
"""Returns the schema to which the $ref in the given schema refers."""

Names = tuple[str, ...] | str | None
"""A list of names, or a pattern for names; None stands for all names."""

MAX_PARTS = 1_000
"""Maximum number of schemas that are read for one keyword, with references followed."""

MAX_DEPTH = 50
"""Maximum nesting of the schemas that are read for one keyword."""

_CONDITIONS = frozenset({"format", "maxLength", "minLength", "pattern"})
_FORMATS = {**OF_LIBRARIES, **STANDARD, **OF_NAMES}


def only_names(schema: Any, resolve: Resolve, patterns: PatternTranslator) -> dict[str, Any] | bool:
    """A schema for objects whose property names obey `schema`. Neither schema has been rewritten.

    `patterns` translates all patterns of the whole schema. Raises ValueError that names an
    unsupported part of `schema`.
    """
    names = _NameReader(resolve, patterns).names(schema)
    if names is None:
        return True
    # Each name would be an optional property, and the number of these is limited.
    if isinstance(names, tuple) and len(names) > MAX_OPTIONAL_PROPERTIES:
        names = pattern_of(names)
    if isinstance(names, str):
        return {"patternProperties": {names: True}, "additionalProperties": False}
    return {"properties": dict.fromkeys(names, True), "additionalProperties": False}


def pattern_of(texts: Iterable[str]) -> str:
    """An anchored pattern that matches exactly these texts."""
    return f"^(?:{'|'.join(re.sub(r'([^A-Za-z0-9_ ])', _escaped, text) for text in texts)})$"


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{{{ord(match[0]):x}}}"


class _NameReader:
    """Reads the schema of one propertyNames, with its subschemas."""

    def __init__(self, resolve: Resolve, patterns: PatternTranslator) -> None:
        self._resolve = resolve
        self._patterns = patterns
        self._num_read = 0

    def names(self, schema: Any, depth: int = 0) -> Names:
        """The names that obey `schema`. `depth` is its nesting depth. Raises ValueError."""
        self._num_read += 1
        if self._num_read > MAX_PARTS or depth > MAX_DEPTH:
            raise ValueError(f"it refers to itself, or has more than {MAX_PARTS} parts")
        if isinstance(schema, bool):
            return None if schema else ()
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object, true or false")
        rules = {key: value for key, value in schema.items() if not is_annotation(key, value)}
        types = rules.pop("type", "string")
        if types != "string" and (not isinstance(types, list) or "string" not in types):
            return ()
        if not rules:
            return None
        keyword, value = next(iter(rules.items()))
        if len(rules) > 1 or keyword in _CONDITIONS:
            return self._pattern(rules)
        if keyword == "$ref":
            return self.names(self._resolve(schema), depth + 1)
        if keyword == "const":
            return (value,) if isinstance(value, str) else ()
        if not isinstance(value, list):
            raise ValueError(f"{keyword} is not supported there")
        if keyword == "enum":
            return tuple(dict.fromkeys(each for each in value if isinstance(each, str)))
        return self._alternatives(keyword, value, depth + 1)

    def _alternatives(self, keyword: str, value: list[Any], depth: int) -> Names:
        parts = [self.names(part, depth) for part in value]
        if keyword not in ("anyOf", "oneOf"):
            raise ValueError(f"{keyword} is not supported there")
        listed = Counter(name for part in parts if isinstance(part, tuple) for name in part)
        if all(isinstance(part, tuple) for part in parts):
            return tuple(name for name, n in listed.items() if n == 1 or keyword == "anyOf")
        if keyword == "oneOf":
            raise ValueError("oneOf is supported there only for constants")
        if None in parts:
            return None
        texts = [part for part in parts if isinstance(part, str)]
        return "|".join(
            f"(?:{text})" for text in [*texts, *([pattern_of(listed)] if listed else [])]
        )

    def _pattern(self, rules: dict[str, Any]) -> Names:
        """A pattern for the names that obey all of `rules`: minLength, maxLength, pattern and
        format."""
        if others := sorted(rules.keys() - _CONDITIONS):
            raise ValueError(f"{others[0]} is not supported there")
        found: list[str] = []
        pattern, name = rules.get("pattern"), rules.get("format")
        if not isinstance(pattern, str | None) or not isinstance(name, str | None):
            raise ValueError("pattern and format must be strings")
        if pattern is not None:
            found.append(pattern)
        if name is not None and name in _FORMATS and not (name in OF_LIBRARIES and pattern):
            found.append(f"^(?:{_FORMATS[name]})$")
        lengths = {key: rules[key] for key in ("minLength", "maxLength") if key in rules}
        if not all(type(n) is int and 0 <= n <= MAX_STRING_CHARACTERS for n in lengths.values()):
            raise ValueError(f"lengths must be whole numbers from 0 to {MAX_STRING_CHARACTERS}")
        if lengths:
            least, most = lengths.get("minLength", 0), lengths.get("maxLength", "")
            if most != "" and least > most:
                return ()
            found.append(rf"^[\s\S]{{{least},{most}}}$")
        if not found:
            return None
        return found[0] if len(found) == 1 else self._patterns.intersected(found)
