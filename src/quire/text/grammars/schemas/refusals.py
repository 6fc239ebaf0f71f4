"""Makes the errors for refused JSON schemas, with the place in the schema."""

from quire.errors import InvalidRequestError


def at(pointer: str, *parts: str | int) -> str:
    """`pointer` extended by `parts`, in the form of RFC 6901 for URI fragments: "#/items/0"."""
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "/".join((pointer, *escaped))


def refusal(origin: str, pointer: str, what: str) -> InvalidRequestError:
    """The error for the schema in the request's field `origin`.

    `pointer` is the JSON pointer of the subschema. `what` is the message; it begins with the
    keyword ("oneOf is not supported").
    """
    return InvalidRequestError(f"{origin}: {pointer}: {what}", origin)
