"""Rewrites a JSON Schema into the subset of JSON Schema that llguidance enforces.

Annotations are removed, keywords of older drafts are converted to draft 2020-12, and all referenced
schemas are moved to one flat $defs. A keyword that llguidance would not enforce is refused, and the
error names its place. Unreferenced definitions are ignored. Called by `translate`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from quire.errors import InvalidRequestError
from quire.text.grammars.limits import MAX_SUBSCHEMAS
from quire.text.grammars.schemas import keywords, values
from quire.text.grammars.schemas.bounds import SchemaBounds
from quire.text.grammars.schemas.endless import can_end, endless_definitions
from quire.text.grammars.schemas.equivalents.equivalent import KEYWORDS, equivalent
from quire.text.grammars.schemas.formats import enforced_format, pattern_with_format
from quire.text.grammars.schemas.patterns.translation import PatternTranslator
from quire.text.grammars.schemas.references import References
from quire.text.grammars.schemas.refusals import at, refusal

Rewritten = dict[str, Any] | bool
_IGNORES_SIBLINGS = ("draft-04", "draft-06", "draft-07", "draft-03")
"""The drafts (parts of $schema) in which keywords next to a $ref have no effect."""


class SchemaRewriter:
    """Rewrites one JSON schema. After `rewrite`, `subschemas` lists (pointer, rewritten schema) of
    all subschemas, inner ones first."""

    def __init__(
        self, root: dict[str, Any], origin: str, *, closes_objects: bool, is_loose: bool = False
    ) -> None:
        """If closes_objects, an object with properties allows no other properties, unless it has
        additionalProperties. If is_loose, unsupported keywords are dropped, and oneOf is treated as
        anyOf.
        """
        self._root = root
        self._is_loose = is_loose
        self._origin = origin
        self._closes_objects = closes_objects
        self._ref_stands_alone = any(
            draft in str(root.get("$schema", "")) for draft in _IGNORES_SIBLINGS
        )
        self._references = References(root, origin, refs_stand_alone=self._ref_stands_alone)
        self._names: dict[str, str] = {}
        self._pending: list[tuple[str, Any]] = []
        self._values = values.ValueChecker(origin)
        self._patterns = PatternTranslator(origin)
        self.subschemas: list[tuple[str, dict[str, Any]]] = []
        self._bounds = SchemaBounds(origin)
        self._handlers: dict[str, Callable[[str, dict[str, Any], str], Iterator[Item]]] = {
            **dict.fromkeys(keywords.ANNOTATIONS, _nothing),
            **dict.fromkeys(keywords.SCHEMA_KEYWORDS, self._one_schema),
            **dict.fromkeys(keywords.LIST_KEYWORDS, self._schemas),
            **dict.fromkeys(keywords.COUNT_KEYWORDS, self._values.plain),
            **dict.fromkeys(keywords.NUMBER_KEYWORDS, self._values.number),
            **dict.fromkeys(("const", "enum", "required"), self._values.plain),
            **dict.fromkeys(KEYWORDS, self._equivalent),
            **dict.fromkeys(("contentEncoding", "contentMediaType"), self._content),
            "$ref": self._reference,
            "type": self._values.types,
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "pattern": self._pattern,
            "format": self._format,
            "nullable": _nothing,
        }

    def rewrite(self) -> dict[str, Any]:
        """The rewritten schema. Raises InvalidRequestError for keywords that can't be enforced."""
        body = self._schema("#", self._root)
        assert isinstance(body, dict)
        definitions: dict[str, Rewritten] = {}
        while self._pending:
            pointer, target = self._pending.pop()
            definitions[self._names[pointer]] = self._schema(pointer, target)
        rewritten = {"$defs": definitions, **body} if definitions else body
        self._bounds.check_depth(rewritten)
        self._check_ends(body, definitions)
        return rewritten

    def _check_ends(self, body: dict[str, Any], definitions: dict[str, Rewritten]) -> None:
        endless = endless_definitions(definitions)
        pointers = {name: pointer for pointer, name in self._names.items()}
        place = pointers[endless[0]] if endless else "#"
        if endless or not can_end(body, set(definitions)):
            raise refusal(
                self._origin,
                place,
                "no answer can ever complete it: a required value can't exist, or would contain"
                " values of its own kind without end",
            )

    @property
    def has_open_names(self) -> bool:
        """True if an object lists properties and also allows unlisted ones."""
        return self._bounds.has_open_names

    def _schema(self, pointer: str, schema: Any) -> Rewritten:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refusal(self._origin, pointer, "a schema is an object, true or false")
        if len(self.subschemas) >= MAX_SUBSCHEMAS:
            raise refusal(
                self._origin, pointer, f"the schema has more than {MAX_SUBSCHEMAS} subschemas"
            )
        keys = [name for name, value in schema.items() if not keywords.is_absent(name, value)]
        if "$ref" in keys and self._ref_stands_alone:
            keys = ["$ref"]
        rewritten: dict[str, Any] = {}
        for keyword in keys:
            for name, value in self._items(pointer, schema, keyword):
                if name == "allOf":  # several keywords may be rewritten to an allOf
                    value = [*rewritten.get(name, []), *value]
                rewritten[name] = value
        if (
            self._closes_objects
            and ("properties" in keys or "patternProperties" in keys)
            and "additionalProperties" not in keys
        ):
            rewritten["additionalProperties"] = False
        self._bounds.add(pointer, rewritten)
        self.subschemas.append((pointer, rewritten))
        return rewritten

    def _items(self, pointer: str, schema: dict[str, Any], keyword: str) -> "list[Item]":
        try:
            return list(self._keyword(pointer, schema, keyword))
        except InvalidRequestError:
            if not self._is_loose:
                raise
            return []

    def _keyword(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        handler = self._handlers.get(keyword)
        if handler is not None:
            return handler(pointer, schema, keyword)
        if keyword in keywords.REFUSED:
            raise self._unsupported(pointer, keyword)
        meant = keywords.meant_keyword(keyword)
        if meant is not None:
            raise refusal(self._origin, pointer, f"{keyword[:100]} is not a keyword; use {meant}")
        return iter(())

    def _unsupported(self, pointer: str, keyword: str) -> InvalidRequestError:
        advice = keywords.REFUSED[keyword]
        return refusal(self._origin, pointer, f"{keyword} is not supported; {advice}")

    def _content(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        if "draft-07" in str(self._root.get("$schema", "")):
            raise refusal(
                self._origin,
                pointer,
                f"{keyword} is not supported in draft 7; in draft 2020-12 it is only an annotation",
            )
        yield from ()

    def _one_schema(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        value = schema[keyword]
        if keyword == "items" and isinstance(value, list):
            yield "prefixItems", self._all(pointer, keyword, value)
            if schema.get("additionalItems") is not None:
                below = at(pointer, "additionalItems")
                yield "items", self._schema(below, schema["additionalItems"])
        elif keyword != "additionalItems":  # it has an effect only next to a list of items
            yield keyword, self._schema(at(pointer, keyword), value)

    def _schemas(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        value = schema[keyword]
        if not isinstance(value, list) or (not value and keyword != "prefixItems"):
            raise refusal(self._origin, pointer, f"{keyword} must be a list of schemas")
        rewritten = self._all(pointer, keyword, value)
        name = _discriminator(schema)
        if keyword == "oneOf" and name is not None:
            rewritten = [{"allOf": [part], "required": [name]} for part in rewritten]
        if keyword == "oneOf" and self._is_loose:
            yield "allOf", [{"anyOf": rewritten}]
        else:
            yield keyword, rewritten

    def _all(self, pointer: str, keyword: str, value: list[Any]) -> list[Rewritten]:
        return [self._schema(at(pointer, keyword, i), part) for i, part in enumerate(value)]

    def _properties(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        yield keyword, self._map(pointer, schema, keyword)

    def _pattern_properties(
        self, pointer: str, schema: dict[str, Any], keyword: str
    ) -> "Iterator[Item]":
        rewritten: dict[str, Rewritten] = {}
        for pattern, value in self._map(pointer, schema, keyword).items():
            name = self._patterns.single(pattern, at(pointer, keyword), keyword)
            # If two patterns have the same translation, such as \d and [0-9], both values apply.
            rewritten[name] = {"allOf": [rewritten[name], value]} if name in rewritten else value
        yield keyword, rewritten

    def _map(self, pointer: str, schema: dict[str, Any], keyword: str) -> dict[str, Rewritten]:
        value = schema[keyword]
        if not isinstance(value, dict):
            raise refusal(self._origin, pointer, f"{keyword} must be an object of schemas")
        return {
            name: self._schema(at(pointer, keyword, name), part) for name, part in value.items()
        }

    def _reference(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        target_pointer, target = self._references.find(schema, pointer)
        name = self._names.get(target_pointer)
        if name is None:
            name = self._names[target_pointer] = f"d{len(self._names)}"
            self._pending.append((target_pointer, target))
        yield "$ref", f"#/$defs/{name}"

    def _pattern(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        together = pattern_with_format(schema, self._patterns)
        if together is not None:
            patterns: tuple[str, ...] = (together,)
        else:
            patterns = self._patterns.conditions(schema[keyword], pointer, keyword)
        if len(patterns) == 1:
            yield keyword, patterns[0]
        else:
            yield "allOf", [{"pattern": pattern} for pattern in patterns]

    def _format(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        yield from enforced_format(schema, pointer, self._origin, self._patterns)

    def _equivalent(self, pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
        def resolve(part: dict[str, Any]) -> Any:
            return self._references.find(part, pointer)[1]

        try:
            other = equivalent(keyword, schema, resolve, self._patterns)
        except InvalidRequestError:
            raise
        except ValueError as error:
            raise refusal(self._origin, pointer, f"{keyword}: {error}") from error
        if other is None:
            raise self._unsupported(pointer, keyword)
        if other is not True:
            yield "allOf", [self._schema(at(pointer, keyword), other)]


def _discriminator(schema: dict[str, Any]) -> str | None:
    """The name of the property that OpenAPI's discriminator requires in each object of a oneOf;
    None if there is no discriminator."""
    value = schema.get("discriminator")
    name = value.get("propertyName") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def _nothing(pointer: str, schema: dict[str, Any], keyword: str) -> "Iterator[Item]":
    yield from ()


Item = tuple[str, Any]
"""(keyword, value) in the rewritten schema."""
