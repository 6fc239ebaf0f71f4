"""Spans are where the images' tokens are, and nowhere else."""

import pytest
from tests.images.pictures import random_picture

from quire.core.content_spans import ContentSpan
from quire.errors import InvalidRequestError
from quire.images.placing import (
    Placeholder,
    expand_token_ids,
    place_images,
    replace_placeholders,
)
from quire.images.processors.gemma3 import Gemma3Processor
from quire.images.processors.processor import ProcessedImage

MARK, START = 7, 8
PROCESSOR = Gemma3Processor({"mm_tokens_per_image": 3}, {"size": {"height": 4, "width": 4}}, {})


def image(seed: int) -> ProcessedImage:
    return PROCESSOR.process(random_picture(4, 4, seed))


def digest(seed: int) -> str:
    return image(seed).items[0].content.digest


IMAGES, VIDEOS = Placeholder("<i>", START, "images"), Placeholder("<v>", START + 1, "videos")


def test_each_placeholder_becomes_its_images_text() -> None:
    first, video = ProcessedImage("<i><i>", ()), ProcessedImage("y", (), is_video=True)
    second = ProcessedImage("x", ())
    found = replace_placeholders("a<i>b<i>", [IMAGES], [first, second])
    assert found == ("a<i><i>bx", [first, second])
    assert replace_placeholders("a<v>", [IMAGES], []) == ("a<v>", [])
    found = replace_placeholders("<v>a<i>", [IMAGES, VIDEOS], [second, video])
    assert found == ("yax", [video, second])
    for text, given, reason in (
        ("a<i>", [first, second], r"has 1 placeholders of images .* 2 images"),
        ("<i>", [video], r"has 1 placeholders of images .* 0 images"),
        ("", [video], r"has 0 placeholders of videos \(<v>\), but 1 videos"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            replace_placeholders(text, [IMAGES, VIDEOS], given)


def test_placeholders_among_tokens_are_expanded() -> None:
    images, video = [image(0), image(1)], ProcessedImage("abc", (), is_video=True)
    found, ordered = expand_token_ids(
        [1, START, START + 1, START],
        [IMAGES, VIDEOS],
        [*images, video],
        lambda text: [9, len(text)],
    )
    assert found == [1, 9, len(images[0].text), 9, 3, 9, len(images[1].text)]
    assert ordered == [images[0], video, images[1]]
    with pytest.raises(InvalidRequestError, match="has 0 placeholders"):
        expand_token_ids([1], [IMAGES], images, lambda text: [])


def test_spans_follow_the_order_of_the_images() -> None:
    found = place_images([1, 7, 7, 7, 7, 7, 7, 2, 7, 7, 7, 3], [image(0), image(1), image(0)], {7})
    assert found.spans == (
        ContentSpan(1, 3, digest(0)),
        ContentSpan(4, 3, digest(1)),
        ContentSpan(8, 3, digest(0)),
    )
    assert [content.digest for content in found.contents] == [digest(0), digest(1)]
    assert found.num_prompt_tokens == 12


@pytest.mark.parametrize(
    "token_ids", [[7, 7], [7, 7, 7, 7], [7, 1, 7, 7], [1, 7, 7, 7, 2, 7], [1, 2], [7, 7, 1, 7]]
)
def test_other_tokens_of_images_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="tokens of images beside those"):
        place_images(token_ids, [image(0)], {7})


def test_tenants_name_one_image_differently() -> None:
    found = place_images([7, 7, 7, 2, 7, 7, 7, 3], [image(0), image(1)], {7})
    first, again, other = found.in_domain("1:a"), found.in_domain("1:a"), found.in_domain("1:b")
    assert first == again
    digests = [{span.digest for span in each.spans} for each in (found, first, other)]
    assert len(set.union(*digests)) == 6
    for each, names in zip((found, first, other), digests, strict=True):
        assert {content.digest for content in each.contents} == names
        assert [content.values for content in each.contents] == [
            content.values for content in found.contents
        ]
