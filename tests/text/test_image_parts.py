"""Images are taken out of messages in every form that clients send."""

from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.text.image_parts import MediaRoles, has_images, take_images

URL = "data:image/png;base64,aGk="
TEXT = {"type": "text", "text": "What is it?"}
USER = MediaRoles({"user"})


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL, "cache_control": {"type": "ephemeral"}},
        {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL},
    ],
)
def test_each_form_of_an_image_is_taken(part: dict[str, Any]) -> None:
    given = [message(TEXT, role="system"), message(part, TEXT)]
    assert has_images(given)
    messages, images = take_images(given, USER, None)
    assert messages == [given[0], message({"type": "image"}, TEXT)]
    assert images == [("messages[1].content[0]", URL, False)]
    assert given[1]["content"][0] is part


def test_pictures_of_the_offline_api_are_taken_as_they_are() -> None:
    picture = object()
    for part in ({"type": "image", "image": picture}, {"type": "image_pil", "image_pil": picture}):
        assert take_images([message(part)], USER, None)[1][0].source is picture


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url"}, "has no image_url"),
        ({"type": "image"}, "has no image_url"),
        ({"type": "input_image", "file_id": "f"}, "by its file_id"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "url is None"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "x"}}, "detail is 'x'"),
        ({"type": "image_url", "image_url": URL, "other": 1}, "'other'"),
    ],
)
def test_malformed_images_are_refused(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        take_images([message(part)], USER, None)
    assert refused.value.param == "messages"


def test_labels_are_left_out_where_the_caller_allows_it() -> None:
    left_out: dict[str, None] = {}
    part = {"type": "image_url", "image_url": URL, "other": 1}
    take_images([message(part)], USER, left_out)
    assert list(left_out) == ["messages.content.other"]


def test_images_stay_with_the_roles_that_may_have_them() -> None:
    part = {"type": "image_url", "image_url": URL}
    for role in ("assistant", "system"):
        with pytest.raises(InvalidRequestError, match="places images in messages of user"):
            take_images([message(part, role=role)], USER, None)
    result = message(part, role="tool")
    left_out: dict[str, None] = {}
    messages, images = take_images([result], USER, left_out)
    assert "image left out" in messages[0]["content"][0]["text"] and not images
    assert list(left_out) == ["messages.content (image_url)"]
    with pytest.raises(InvalidRequestError, match="the role 'tool', but"):
        take_images([result], USER, None)
    assert take_images([result], MediaRoles({"user", "tool"}), None)[1]


@pytest.mark.parametrize("given", [None, "a", [None], [{"content": "a"}], [message(TEXT, "x", 3)]])
def test_other_messages_have_no_images(given: Any) -> None:
    assert not has_images(given)


def test_videos_are_taken_beside_images() -> None:
    roles, frames = MediaRoles({"user"}, {"user"}), [object()]
    image = {"type": "image_url", "image_url": {"url": URL}}
    videos = [
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "video", "video": frames, "fps": 2.0},
        {"type": "video", "video": frames},
    ]
    given = [message(videos[0], image, *videos[1:], TEXT)]
    messages, taken = take_images(given, roles, None)
    kinds = [part["type"] for part in messages[0]["content"]]
    assert kinds == ["video", "image", "video", "video", "text"]
    assert [each.is_video for each in taken] == [True, False, True, True]
    assert [each.source for each in taken] == [URL, URL, (frames, {"fps": 2.0}), frames]


@pytest.mark.parametrize(
    ("part", "videos", "reason"),
    [
        ({"type": "video_url", "video_url": {"url": URL}}, set(), "a video, but this model takes"),
        ({"type": "video", "video": URL}, {"tool"}, "places videos in messages of tool"),
        ({"type": "video_url"}, {"user"}, "has no video_url"),
        ({"type": "video_url", "video_url": {"url": 3}}, {"user"}, "video_url.url is 3"),
        ({"type": "video_url", "video_url": URL, "fps": 2}, {"user"}, "'fps', which is not"),
    ],
)
def test_videos_that_cannot_be_taken_are_refused(
    part: dict[str, Any], videos: set[str], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        take_images([message(part)], MediaRoles({"user"}, videos), None)
