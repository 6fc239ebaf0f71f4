"""Images are read in threads, and their number, tokens and memory are bounded."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from tests.images.pictures import file_of, random_picture

from quire.core.sampling_params import ModelLimits
from quire.errors import InvalidRequestError, UploadsFullError
from quire.images import reader as reader_module
from quire.images.image_options import ImageOptions
from quire.images.processors.gemma3 import Gemma3Processor
from quire.images.processors.pixtral import PixtralProcessor
from quire.images.reader import GivenImage, ImageReader

LIMITS = ModelLimits(vocab_size=99, max_model_len=50, max_content_tokens=9)
NUM_BYTES = 3 * 8 * 8 * 4
PROCESSOR = Gemma3Processor({"mm_tokens_per_image": 9}, {"size": {"height": 8, "width": 8}}, {})


def make_reader(**options: Any) -> ImageReader:
    ids = {"<image_soft_token>": 7, "<start_of_image>": 8}
    held = options.pop("max_held_bytes", None)
    return ImageReader(PROCESSOR, ImageOptions(**options), ids.get, max_held_bytes=held)


@pytest.fixture
def reader() -> Iterator[ImageReader]:
    made = make_reader(max_held_bytes=3 * NUM_BYTES)
    yield made
    made.close()


def given(seed: int = 0) -> GivenImage:
    return GivenImage(f"messages[{seed}]", random_picture(20, 10, seed))


def test_all_kinds_of_sources_give_one_image(reader: ImageReader, tmp_path: Any) -> None:
    data = file_of(random_picture(20, 10))
    (tmp_path / "a.png").write_bytes(data)
    reading = make_reader(allowed_local_media_path=str(tmp_path))
    sources = [random_picture(20, 10), data, f"file://{tmp_path}/a.png"]
    call = reading.open_call(LIMITS)
    found = call.read_all([GivenImage("a", source) for source in sources])
    reading.close()
    assert len({image.items[0].content.digest for image in found}) == 1


def test_failures_name_the_field(reader: ImageReader) -> None:
    call = reader.open_call(LIMITS)
    for source in ("https://example.com/a.png", b"x", None):
        with pytest.raises(InvalidRequestError) as refused:
            call.read_all([GivenImage("input[1]", source)])
        assert refused.value.param == "input"


def test_the_number_of_images_is_bounded() -> None:
    reading = make_reader(limit_mm_per_prompt={"image": 2})
    reading.check_count([given()] * 2, "messages")
    with pytest.raises(InvalidRequestError, match="has 3 images, but may have at most 2"):
        reading.check_count([given()] * 3, "messages")


@pytest.mark.parametrize("name", ["max_content_tokens", "max_model_len"])
def test_images_above_the_models_bounds_are_not_processed(reader: ImageReader, name: str) -> None:
    limits = ModelLimits(**{"vocab_size": 9, "max_model_len": 99, "max_content_tokens": 9, name: 8})
    with pytest.raises(InvalidRequestError, match="takes 9 tokens"):
        reader.open_call(limits).read_all([given()])


def test_the_memory_of_open_calls_is_bounded(reader: ImageReader) -> None:
    call = reader.open_call(LIMITS)
    images = call.read_all([given(0), given(1)])
    placed = call.place([*[7] * 18, 1], images)
    other = reader.open_call(LIMITS)
    other.read_all([given(2)])
    with pytest.raises(UploadsFullError, match="retry"):
        other.read_all([given(3)])
    del call, images, other
    gc.collect()
    assert placed.held is not None
    third = reader.open_call(LIMITS)
    third.read_all([given(4)])
    with pytest.raises(UploadsFullError):
        third.read_all([given(5)])


def test_the_memory_of_one_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_PROMPT_BYTES", NUM_BYTES)
    call = make_reader().open_call(LIMITS)
    call.read_all([given()])
    with pytest.raises(InvalidRequestError, match="images of the prompt have more than"):
        call.read_all([given()])


def test_a_tokenizer_with_other_ids_than_the_encoders_is_refused() -> None:
    processor = PixtralProcessor({}, {}, {})
    ids = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
    assert ImageReader(processor, ImageOptions(), ids.get).span_ids == {10, 12, 13}
    with pytest.raises(ValueError, match="model's encoder takes"):
        ImageReader(processor, ImageOptions(), {**ids, "[IMG_END]": 14}.get)


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="has no token '<image_soft_token>'"):
        ImageReader(PROCESSOR, ImageOptions(), {}.get)
