"""Finds the places of images in a prompt's tokens."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from quire.core.content_spans import Content, ContentSpan
from quire.errors import InvalidRequestError
from quire.images.processors.processor import ProcessedImage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The contents of one prompt, and the positions that stand for them."""

    spans: tuple[ContentSpan, ...] = ()
    #: Each content once.
    contents: tuple[Content, ...] = ()
    #: Number of tokens of the whole prompt.
    num_prompt_tokens: int = 0
    #: The memory of the contents counts in the reader's budget until this is collected.
    held: object = field(default=None, compare=False, repr=False)

    def in_domain(self, domain: str) -> "PromptImages":
        """The same images, named for one cache domain.

        An engine keeps the embeddings of contents by their digests. With the domain in a digest, no
        tenant learns from the time of its own answer which images another tenant has sent.
        """
        key = hashlib.blake2b(domain.encode()).digest()
        names = {
            content.digest: hashlib.blake2b(
                bytes.fromhex(content.digest), key=key, digest_size=16
            ).hexdigest()
            for content in self.contents
        }
        return replace(
            self,
            spans=tuple(span._replace(digest=names[span.digest]) for span in self.spans),
            contents=tuple(each._replace(digest=names[each.digest]) for each in self.contents),
        )


NO_IMAGES = PromptImages()


class Placeholder(NamedTuple):
    """The text that a chat template writes for each image, or for each video, and its token."""

    text: str
    token_id: int
    #: "images" or "videos".
    what: str


def replace_placeholders(
    text: str, placeholders: Sequence[Placeholder], images: Sequence[ProcessedImage]
) -> tuple[str, list[ProcessedImage]]:
    """The text with each placeholder replaced by the text of its image, and the images in the order
    of the text. Raises InvalidRequestError if their numbers differ.

    placeholders: one for images and, if the model takes videos, one for videos.
    """
    pieces = re.split("(" + "|".join(re.escape(each.text) for each in placeholders) + ")", text)
    ordered = _in_order(pieces[1::2], [each.text for each in placeholders], placeholders, images)
    pieces[1::2] = [image.text for image in ordered]
    return "".join(pieces), ordered


def expand_token_ids(
    token_ids: Sequence[int],
    placeholders: Sequence[Placeholder],
    images: Sequence[ProcessedImage],
    encode: Callable[[str], list[int]],
) -> tuple[list[int], list[ProcessedImage]]:
    """The tokens with each placeholder replaced by the tokens of its image's text, and the images
    in their order. The arguments and errors are those of `replace_placeholders`."""
    ids = [each.token_id for each in placeholders]
    places = [token_id for token_id in token_ids if token_id in ids]
    ordered = _in_order(places, ids, placeholders, images)
    expanded: list[int] = []
    rest = iter(ordered)
    for token_id in token_ids:
        expanded += encode(next(rest).text) if token_id in ids else [token_id]
    return expanded, ordered


def place_images(
    token_ids: Sequence[int],
    images: Sequence[ProcessedImage],
    span_ids: Collection[int],
    held: object = None,
) -> PromptImages:
    """The spans of images in the tokens of a prompt whose placeholders were replaced.

    span_ids: the special tokens that fill spans. Raises InvalidRequestError if the prompt has other
    such tokens, which would be read as parts of an image.
    """
    places = [at for at, token_id in enumerate(token_ids) if token_id in span_ids]
    items = [item for image in images for item in image.items]
    num_expected = sum(item.num_tokens for item in items)
    spans, contents, first = [], {}, 0
    for item in items:
        run = places[first : first + item.num_tokens]
        if len(run) < item.num_tokens or run[-1] - run[0] != item.num_tokens - 1:
            num_expected = -1
            break
        digest = item.content.digest
        spans.append(ContentSpan(run[0], item.num_tokens, digest, item.grid))
        contents[digest] = item.content
        first += item.num_tokens
    if num_expected != len(places):
        raise InvalidRequestError(
            "the prompt has tokens of images beside those of the given images; leave them out",
            "prompt",
        )
    return PromptImages(tuple(spans), tuple(contents.values()), len(token_ids), held)


def _in_order(
    places: Sequence[T],
    names: Sequence[T],
    placeholders: Sequence[Placeholder],
    images: Sequence[ProcessedImage],
) -> list[ProcessedImage]:
    """The images in the order of their `places`, each of which is one of `names`. `names` are what
    the placeholders are called there."""
    waiting: dict[T, Iterator[ProcessedImage]] = {}
    for is_video, (name, placeholder) in enumerate(zip(names, placeholders, strict=True)):
        given = [image for image in images if image.is_video == bool(is_video)]
        num_places = sum(place == name for place in places)
        if num_places != len(given):
            what = placeholder.what
            raise InvalidRequestError(
                f"the prompt has {num_places} placeholders of {what} ({placeholder.text}), but"
                f" {len(given)} {what} are given; write one for each",
                "prompt",
            )
        waiting[name] = iter(given)
    return [next(waiting[place]) for place in places]
