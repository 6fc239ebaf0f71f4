"""Makes the errors that blame an image or a video of a call."""

from quire.errors import InvalidRequestError

VIDEO = "video "
"""A prefix of `where` if it is the place of a video in the call."""


def wrong_media(where: str, what: str) -> InvalidRequestError:
    """The error for an image or a video. `where` names its place in the call, whose part before the
    first bracket is the blamed field, and `what` says what is wrong with it."""
    place = where.removeprefix(VIDEO)
    kind = "image" if place == where else "video"
    return InvalidRequestError(f"the {kind} {place} {what}", place.partition("[")[0])
