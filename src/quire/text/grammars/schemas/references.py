"""Resolves $ref within one JSON schema; nothing is fetched."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from quire.text.grammars.schemas.refusals import at, refusal

_OPAQUE = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose value is never a schema, even if it looks like one."""


class References:
    """Finds the subschemas of one JSON schema by JSON pointer, $id or $anchor."""

    def __init__(self, root: dict[str, Any], origin: str, *, refs_stand_alone: bool) -> None:
        """If refs_stand_alone, keywords next to a $ref are ignored, even $id, as in drafts up to
        7."""
        self._root = root
        self._origin = origin
        self._bases: dict[int, str] = {}
        self._named: dict[str, tuple[str, Any]] = {"": ("#", root)}
        for pointer, schema, base in _objects(root, refs_stand_alone):
            self._bases[id(schema)] = base
            if refs_stand_alone and "$ref" in schema:
                continue
            if pointer == "#" or _own_id(schema) is not None:
                self._named.setdefault(base, (pointer, schema))
            for key in ("$anchor", "id", "$id"):
                name = schema.get(key)
                if isinstance(name, str) and (key == "$anchor" or name.startswith("#")):
                    self._named.setdefault(f"{base}#{name.lstrip('#')}", (pointer, schema))

    def find(self, schema: dict[str, Any], pointer: str) -> tuple[str, Any]:
        """The JSON pointer and the value that the $ref in `schema` refers to. `schema` is at
        `pointer`.

        Raises InvalidRequestError if the document has no value at that address.
        """
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise refusal(self._origin, pointer, "$ref must be a string")
        address = urljoin(self._bases.get(id(schema), ""), reference)
        base, fragment = urldefrag(address)
        fragment = unquote(fragment)
        if base not in self._named:
            raise refusal(
                self._origin,
                pointer,
                f"$ref {reference[:200]!r} points outside of the schema, but nothing is fetched;"
                " put what it names under $defs",
            )
        if fragment and not fragment.startswith("/"):
            found = self._named.get(f"{base}#{fragment}")
        else:
            found = _step(*self._named[base], fragment)
        if found is None:
            raise refusal(
                self._origin, pointer, f"$ref {reference[:200]!r} points at nothing in the schema"
            )
        return found


def _step(pointer: str, value: Any, fragment: str) -> tuple[str, Any] | None:
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
        pointer = at(pointer, key)
    return pointer, value


def _own_id(schema: dict[str, Any]) -> str | None:
    own = schema.get("$id", schema.get("id"))
    return own if isinstance(own, str) and not own.startswith("#") else None


def _objects(
    root: dict[str, Any], refs_stand_alone: bool
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields (pointer, object, base URI) of each object that may be a schema."""
    pending: list[tuple[str, Any, str]] = [("#", root, "")]
    while pending:
        pointer, value, base = pending.pop()
        if isinstance(value, dict):
            own = _own_id(value)
            if own is not None and not (refs_stand_alone and "$ref" in value):
                base = urldefrag(urljoin(base, own)).url
            yield pointer, value, base
            pending.extend((at(pointer, k), v, base) for k, v in value.items() if k not in _OPAQUE)
        elif isinstance(value, list):
            pending.extend((at(pointer, i), v, base) for i, v in enumerate(value))
