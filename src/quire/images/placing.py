"""Finds the places of images in a prompt's tokens."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from quire.core.content_spans import Content, ContentSpan
from quire.errors import InvalidRequestError
from quire.images.processors.processor import ProcessedImage


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


def replace_placeholders(text: str, placeholder: str, texts: Sequence[str]) -> str:
    """The text with each placeholder replaced by the text of its image, in order. Raises
    InvalidRequestError if their numbers differ."""
    pieces = text.split(placeholder)
    _check_count(len(pieces) - 1, placeholder, len(texts))
    return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)


def expand_token_ids(
    token_ids: Sequence[int],
    placeholder: str,
    placeholder_id: int,
    images: Sequence[ProcessedImage],
    encode: Callable[[str], list[int]],
) -> list[int]:
    """The tokens with each placeholder replaced by the tokens of its image's text, in order.
    Raises InvalidRequestError if their numbers differ."""
    _check_count(list(token_ids).count(placeholder_id), placeholder, len(images))
    expanded: list[int] = []
    rest = iter(images)
    for token_id in token_ids:
        expanded += encode(next(rest).text) if token_id == placeholder_id else [token_id]
    return expanded


def place_images(
    token_ids: Sequence[int],
    images: Sequence[ProcessedImage],
    span_ids: Collection[int],
    held: object = None,
) -> PromptImages:
    """The spans of images in the tokens of a prompt whose placeholders were replaced.

    span_ids: the tokens of which spans consist. Raises InvalidRequestError if the prompt has other
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


def _check_count(num_places: int, placeholder: str, num_images: int) -> None:
    if num_places != num_images:
        raise InvalidRequestError(
            f"the prompt has {num_places} placeholders of images ({placeholder}), but"
            f" {num_images} images are given; write one for each image",
            "prompt",
        )
