"""The processors give the numbers and texts of transformers' own, for pictures of odd sizes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.images.pictures import random_picture
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor as TheirGemma4
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor as TheirIdefics3
from transformers.models.internvl.processing_internvl import InternVLProcessor as TheirInternVL
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.errors import InvalidRequestError
from quire.images.processors.gemma3 import Gemma3Processor
from quire.images.processors.gemma4 import Gemma4Processor
from quire.images.processors.idefics3 import Idefics3Processor
from quire.images.processors.internvl import InternVLProcessor
from quire.images.processors.pixtral import PixtralProcessor
from quire.images.processors.processor import ImageProcessor, Item, ProcessedImage
from quire.images.processors.qwen_vl import QwenProcessor

SIZES = [(37, 53), (640, 481), (101, 997), (64, 64), (128, 64), (511, 513), (5, 5), (900, 5)]
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def numbers_of(item: Item) -> Any:
    return np.frombuffer(item.content.values, np.float32).reshape(item.content.shape)


def check_layout(processor: ImageProcessor, size: tuple[int, int], found: ProcessedImage) -> None:
    layout = processor.layout(*size)
    assert layout.num_tokens == sum(item.num_tokens for item in found.items)
    assert layout.tokens_of_item == max(item.num_tokens for item in found.items)
    assert layout.num_bytes == sum(len(item.content.values) for item in found.items)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_idefics3(size: tuple[int, int], splits: bool) -> None:
    fields = {
        "size": {"longest_edge": 256},
        "max_image_size": {"longest_edge": 64},
        "do_image_splitting": splits,
    }
    config = {"vision_config": {"patch_size": 16}, "scale_factor": 2}
    processor, picture = Idefics3Processor(config, fields, {}), random_picture(*size)
    found = processor.process(picture)
    theirs: Any = Idefics3ImageProcessorPil(**fields)(
        [[picture]], return_tensors="np", return_row_col_info=True
    )
    names: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=4,
    )
    assert found.text == TheirIdefics3.replace_image_token(names, theirs, 0)
    np.testing.assert_allclose(
        np.stack([numbers_of(item) for item in found.items]), theirs["pixel_values"][0], atol=1e-5
    )
    check_layout(processor, size, found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bounds", [(1, 12), (3, 6), (1, 1)])
def test_internvl(size: tuple[int, int], bounds: tuple[int, int]) -> None:
    least, most = bounds
    fields = {
        "size": {"height": 64, "width": 64},
        "min_patches": least,
        "max_patches": most,
        "crop_to_patches": False,  # the processor around it cuts nevertheless
        **HALVES,
    }
    config = {"vision_config": {"image_size": [64, 64], "patch_size": [16, 16]}}
    around = {"image_seq_length": 4}
    processor, picture = InternVLProcessor(config, fields, around), random_picture(*size)
    found = processor.process(picture)
    theirs: Any = GotOcr2ImageProcessorPil(**fields)(
        [picture], return_tensors="np", **TheirInternVL.images_kwargs
    )
    names: Any = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=4,
    )
    assert found.text == TheirInternVL.replace_image_token(names, theirs, 0)
    np.testing.assert_allclose(
        np.stack([numbers_of(item) for item in found.items]), theirs["pixel_values"], atol=1e-5
    )
    check_layout(processor, size, found)


@pytest.mark.parametrize("size", SIZES)
def test_pixtral(size: tuple[int, int]) -> None:
    fields = {"size": {"longest_edge": 256}}
    around = {"patch_size": 14, "spatial_merge_size": 2}
    processor, picture = PixtralProcessor({}, fields, around), random_picture(*size)
    found = processor.process(picture)
    theirs: Any = PixtralImageProcessorPil(**fields)([picture], patch_size=28, return_tensors="np")
    (item,) = found.items
    np.testing.assert_allclose(numbers_of(item), theirs["pixel_values"][0], atol=1e-5)
    height, width = (each // 28 for each in theirs["image_sizes"][0])
    rows = ["[IMG]" * width] * height
    assert found.text == "[IMG_BREAK]".join(rows) + "[IMG_END]"
    assert item.num_tokens == height * (width + 1)
    assert item.content.grid == (1, 2 * height, 2 * width)
    check_layout(processor, size, found)


@pytest.mark.parametrize("size", SIZES)
def test_qwen(size: tuple[int, int]) -> None:
    fields = {"size": {"shortest_edge": 4096, "longest_edge": 1 << 16}, "patch_size": 16, **HALVES}
    processor, picture = QwenProcessor({}, fields, {}), random_picture(*size)
    found = processor.process(picture)
    theirs: Any = Qwen2VLImageProcessorPil(**fields)([picture], return_tensors="np")
    (item,) = found.items
    np.testing.assert_allclose(numbers_of(item), theirs["pixel_values"], atol=1e-5)
    assert item.content.grid == tuple(theirs["image_grid_thw"][0])
    assert item.grid == (1, item.content.grid[1] // 2, item.content.grid[2] // 2)
    assert found.text == "<|image_pad|>" * (theirs["image_grid_thw"][0].prod() // 4)
    check_layout(processor, size, found)


@pytest.mark.parametrize("size", SIZES)
def test_gemma3(size: tuple[int, int]) -> None:
    fields, picture = {"size": {"height": 96, "width": 96}}, random_picture(*size)
    processor = Gemma3Processor({"mm_tokens_per_image": 9}, fields, {})
    found = processor.process(picture)
    theirs: Any = Gemma3ImageProcessorPil(**fields)([picture], return_tensors="np")
    np.testing.assert_allclose(numbers_of(found.items[0]), theirs["pixel_values"][0], atol=1e-5)
    marks = "<image_soft_token>" * 9
    assert found.text == f"\n\n<start_of_image>{marks}<end_of_image>\n\n"
    check_layout(processor, size, found)


@pytest.mark.parametrize("size", [*SIZES, (2, 2000), (1680, 5)])
def test_gemma4(size: tuple[int, int]) -> None:
    fields, picture = {"max_soft_tokens": 70, "patch_size": 4}, random_picture(*size)
    processor = Gemma4Processor({}, fields, {})
    found = processor.process(picture)
    theirs: Any = Gemma4ImageProcessorPil(**fields)([picture], return_tensors="np")
    (num_tokens,) = theirs["num_soft_tokens_per_image"]
    numbers = numbers_of(found.items[0])
    _, height, width = numbers.shape
    cut = numbers.reshape(3, height // 4, 4, width // 4, 4).transpose(1, 3, 2, 4, 0)
    expected = theirs["pixel_values"][0, : 9 * num_tokens]
    np.testing.assert_allclose(cut.reshape(9 * num_tokens, -1), expected, atol=1e-5)
    assert theirs["image_position_ids"][0, : 9 * num_tokens].max(0).tolist() == [
        width // 4 - 1,
        height // 4 - 1,
    ]
    names: Any = SimpleNamespace(
        boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>"
    )
    assert found.text == TheirGemma4.replace_image_token(names, theirs, 0)
    check_layout(processor, size, found)


def test_pictures_too_narrow_are_refused_in_a_sentence() -> None:
    for processor in (PixtralProcessor({}, {}, {}), QwenProcessor({}, {}, {})):
        with pytest.raises(InvalidRequestError, match="times as long as it is wide"):
            processor.process(random_picture(3000, 1))
    config = {"vision_config": {"patch_size": 14}}
    assert Idefics3Processor(config, {}, {}).process(random_picture(3000, 1)).items


def test_the_digest_names_values_and_settings() -> None:
    picture, same, other = random_picture(40, 40), random_picture(40, 40), random_picture(40, 40, 1)
    fields = {"size": {"height": 96, "width": 96}}
    processor = Gemma3Processor({}, fields, {})

    def digest_of(processor: ImageProcessor, picture: Any) -> str:
        return processor.process(picture).items[0].content.digest

    assert digest_of(processor, picture) == digest_of(processor, same)
    assert len(digest_of(processor, picture)) == 32
    assert digest_of(processor, picture) != digest_of(processor, other)
    # Without do_normalize and with a factor of 1 / 255, the values of another setting may be equal.
    scaled = Gemma3Processor({}, fields | {"image_mean": 0.0, "image_std": 1.0}, {})
    plain = Gemma3Processor({}, fields | {"do_normalize": False, "resample": 3}, {})
    grey = random_picture(1, 1)  # equal in all filters
    assert digest_of(scaled, grey) != digest_of(plain, grey)
