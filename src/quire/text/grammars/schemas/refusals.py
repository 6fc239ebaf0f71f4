"""How a schema is refused: the place in it, the keyword there, what to do."""

from quire.errors import InvalidRequestError


def at(pointer: str, *parts: str | int) -> str:
    """`pointer` continued by `parts`, as RFC 6901 writes it in a URI fragment: "#/items/0"."""
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "/".join((pointer, *escaped))


def refusal(origin: str, pointer: str, what: str) -> InvalidRequestError:
    """The error for the schema that the request has in the field `origin`.

    pointer: of the subschema. what: begins with the keyword ("oneOf is not supported").
    """
    return InvalidRequestError(f"{origin}: {pointer}: {what}", origin)
