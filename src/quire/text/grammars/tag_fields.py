"""Reads the fields of structural tags; refuses missing, unknown and mistyped fields."""

from collections.abc import Sequence
from typing import Any

from quire.text.grammars.limits import MAX_TAGS
from quire.text.grammars.schemas.refusals import at, refusal


class TagFields:
    """Reads the fields of one request's structural tag. In all methods, `pointer` is the JSON
    pointer to `value`. All raise InvalidRequestError."""

    def __init__(self, origin: str) -> None:
        """`origin` is the name of the request's field that holds the tag, for errors."""
        self._origin = origin

    def objects(self, pointer: str, value: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """The field `name` of `value`: a list of at least one object."""
        found = value.get(name)
        if not isinstance(found, list) or not found:
            raise refusal(self._origin, pointer, f"{name} must be a list with at least one object")
        for index, part in enumerate(found):
            if not isinstance(part, dict):
                raise refusal(self._origin, at(pointer, name, index), "this must be an object")
        return found

    def text(self, pointer: str, value: dict[str, Any], name: str) -> str:
        """The field `name` of `value`: a string."""
        found = value.get(name)
        if not isinstance(found, str):
            raise refusal(self._origin, pointer, f"{name} must be a text")
        return found

    def texts(self, pointer: str, value: dict[str, Any], name: str) -> list[str]:
        """The field `name` of `value`, a list of strings or a single string, as a list; empty if
        missing."""
        found = value.get(name, [])
        texts = [found] if isinstance(found, str) else found
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise refusal(self._origin, pointer, f"{name} must be a list of texts")
        if len(texts) > MAX_TAGS:
            raise refusal(self._origin, pointer, f"{name} has more than {MAX_TAGS} texts")
        return texts

    def check_names(self, pointer: str, value: dict[str, Any], names: Sequence[str]) -> None:
        """Raises InvalidRequestError if `value` has a field that is neither `type` nor one of
        `names`."""
        for name in value:
            if name != "type" and name not in names:
                raise refusal(self._origin, pointer, f"{name[:100]} is not supported; leave it out")
