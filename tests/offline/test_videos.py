"""Videos in prompts get transformers' tokens, and are refused where a model takes none."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.images.pictures import random_picture
from tests.images.test_video import animation
from tests.images.tiny_folders import write_qwen
from tests.images.tiny_model import NUM_TOKENS, save_tiny
from tests.models.vision import qwen3_vl_files

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from quire.images.processors.find import find_processor

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
FRAMES = [random_picture(40, 24, seed) for seed in range(5)]
PICTURE = random_picture(24, 24, 9)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def inputs_of(folder: Path, ids: torch.Tensor, names: dict[str, int]) -> dict[str, Any]:
    """The arguments of transformers for FRAMES at 4 frames a second and PICTURE. The tests of the
    processors compare these numbers with transformers'."""
    processor = find_processor(folder)
    assert processor is not None and processor.video is not None
    places = processor.video.sample(len(FRAMES), 4.0)
    video = processor.video.process([FRAMES[place] for place in places], places, 4.0)
    (image,) = processor.process(PICTURE).items
    numbers = [
        torch.frombuffer(bytearray(item.content.values), dtype=torch.float32).view(
            item.content.shape
        )
        for item in (*video.items, image)
    ]
    grid = video.items[0].content.grid
    is_image, is_video = (ids == names[f"<|{kind}_pad|>"] for kind in ("image", "video"))
    return {
        "pixel_values_videos": torch.cat(numbers[:-1]),
        "video_grid_thw": torch.tensor([(len(video.items), *grid[1:])]),
        "pixel_values": numbers[-1],
        "image_grid_thw": torch.tensor([image.content.grid]),
        "mm_token_type_ids": is_image.int() + 2 * is_video.int(),
    }


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """A video before an image, as text, as tokens and in a conversation, in chunks and again."""
    model: Any = qwen3_vl_files.save(family, tmp_path)
    write_qwen(tmp_path, json.loads((tmp_path / "config.json").read_text()), patch_size=4)
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 8}
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256, **sizes)
    names = llm.get_tokenizer().token_ids
    model.config.image_token_id, model.config.video_token_id = (
        names[f"<|{kind}_pad|>"] for kind in ("image", "video")
    )
    media = {"image": PICTURE, "video": (np.stack([*map(np.asarray, FRAMES)]), {"fps": 4.0})}
    prompt: dict[str, Any] = {"prompt": f"{VIDEO} and {IMAGE}?", "multi_modal_data": media}
    found = llm.generate([prompt], PARAMS, use_tqdm=False)
    ids = torch.tensor([list(found[0].prompt_token_ids or ())])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            **inputs_of(tmp_path, ids, names),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    expected = output[0, ids.shape[1] :].tolist()
    assert tokens_of(found) == [expected]
    assert "seconds>" in llm.get_tokenizer().decode(ids[0].tolist())
    # As tokens, from the prefix cache.
    marked = llm.get_tokenizer().encode(prompt["prompt"])
    again = {"prompt_token_ids": marked, "multi_modal_data": media}
    assert tokens_of(llm.generate([again], PARAMS, use_tqdm=False)) == [expected]
    # In a conversation, whose prompt has the same images in the same order.
    parts: list[dict[str, Any]] = [
        {"type": "video", "video": FRAMES, "fps": 4.0},
        {"type": "text", "text": " and "},
        {"type": "image", "image": PICTURE},
    ]
    (chat,) = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    prompt_ids = list(chat.prompt_token_ids or ())
    for name in ("<|image_pad|>", "<|video_pad|>"):
        assert prompt_ids.count(names[name]) == ids[0].tolist().count(names[name])
    # An animation of the same rate makes a prompt of the same length.
    url = (
        "data:image/webp;base64,"
        + base64.b64encode(animation("WEBP", FRAMES, duration=250)).decode()
    )
    parts[0] = {"type": "video_url", "video_url": {"url": url}}
    (same,) = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    assert same.prompt_token_ids == chat.prompt_token_ids
    assert tokens_of([same]) == tokens_of([chat])
    # Numbers of videos are bounded.
    with pytest.raises(InvalidRequestError, match="has 5 videos, but may have at most 4"):
        many = {"prompt": VIDEO * 5, "multi_modal_data": {"video": [FRAMES] * 5}}
        llm.generate([many], PARAMS, use_tqdm=False)


def test_models_without_videos_refuse_them(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny(tmp_path).folder), dtype="float32", max_model_len=256)
    prompt: Any = {"prompt": "What?", "multi_modal_data": {"video": FRAMES}}
    with pytest.raises(InvalidRequestError, match="takes images only; send its frames as images"):
        llm.generate([prompt], PARAMS, use_tqdm=False)
    parts = [{"type": "video", "video": FRAMES}]
    with pytest.raises(InvalidRequestError, match="a video, but this model takes none"):
        llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
