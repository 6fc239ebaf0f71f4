"""`LLM` and `AsyncLLM` read the images of prompts and of conversations."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.images.pictures import random_picture
from tests.images.tiny_folders import (
    SMOLVLM_TEMPLATE,
    write_internvl,
    write_lfm2_vl,
    write_pixtral,
    write_qwen,
)
from tests.images.tiny_model import NUM_TOKENS, TinyModel, save_tiny
from tests.models.vision import internvl_files, lfm2_vl_files, pixtral_files, qwen3_vl_files
from tests.models.vision.gguf_pairs import round_matrices, write_mmproj, write_text
from tests.models.vision.idefics3_files import SIDE
from tests.text.gguf.metadata import byte_level_metadata
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire import LLM, AsyncLLM, SamplingParams
from quire.core.request import Request
from quire.errors import ConfigurationError, InvalidRequestError
from quire.images.processors.find import find_processor
from quire.offline import request_group
from quire.text.tokenizer import Tokenizer

PICTURE, OTHER = random_picture(90, 50), random_picture(90, 50, 1)
TEXT = "<|im_start|>User:<image>What is it?<end_of_utterance>\nAssistant:"
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> LLM:
    return LLM(str(tiny.folder), dtype="float32", max_model_len=256)


def prompt_of(*pictures: Any) -> dict[str, Any]:
    return {"prompt": TEXT, "multi_modal_data": {"image": list(pictures)}}


def test_generate_and_chat_give_transformers_tokens(llm: LLM, tiny: TinyModel) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is it?"}]
    found = llm.generate([prompt_of(np.asarray(PICTURE)), prompt_of(OTHER)], PARAMS, use_tqdm=False)
    found += llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in found]
    first, second = tiny.answer_to(TEXT, PICTURE), tiny.answer_to(TEXT, OTHER)
    assert tokens == [first, second, first]
    assert list(found[0].prompt_token_ids or ()) == list(found[2].prompt_token_ids or ())


def test_settings_of_a_call_are_those_of_its_prompts(llm: LLM) -> None:
    """A picture of one tile has fewer tokens. A prompt's own settings replace the call's."""
    small, large = ({"size": {"longest_edge": side}} for side in (SIDE, 4 * SIDE))
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is it?"}]
    found = llm.generate(
        [prompt_of(PICTURE), {**prompt_of(PICTURE), "mm_processor_kwargs": large}, "text"],
        PARAMS,
        use_tqdm=False,
        mm_processor_kwargs=small,
    )
    found += llm.chat(
        [{"role": "user", "content": parts}], PARAMS, use_tqdm=False, mm_processor_kwargs=small
    )
    tile, cut, _, chat = (len(output.prompt_token_ids or ()) for output in found)
    assert tile == chat < cut
    with pytest.raises(InvalidRequestError, match="fps is no setting"):
        llm.generate("text", PARAMS, mm_processor_kwargs={"fps": 1})


def test_a_pair_of_gguf_files_gives_transformers_tokens(tmp_path: Path) -> None:
    """Settings, tokenizer and template come from the files' metadata."""
    tiny = save_tiny(tmp_path)
    round_matrices(tiny.model)
    metadata = byte_level_metadata(Tokenizer.from_folder(tmp_path)._backend, "qwen2")
    metadata["tokenizer.chat_template"] = SMOLVLM_TEMPLATE
    text = write_text(tiny.model, tmp_path / "pair.gguf", **metadata)
    mmproj = write_mmproj(tiny.model, tmp_path / "encoder.gguf")
    llm = LLM(str(text), mmproj=mmproj, dtype="float32", max_model_len=256)
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is it?"}]
    found = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    assert list(found[0].outputs[0].token_ids) == tiny.answer_to(TEXT, PICTURE)
    del metadata["tokenizer.ggml.token_type"]
    write_text(tiny.model, text, **metadata)
    with pytest.raises(ConfigurationError, match="no images can be taken: the tokenizer has no"):
        LLM(str(text), mmproj=mmproj, dtype="float32", max_model_len=256)


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "internvl", "lfm2_vl"])
def test_families_with_images_of_any_size(family: str, tmp_path: Path) -> None:
    """Two images of different sizes in one prompt get transformers' tokens."""
    pictures = [PICTURE, random_picture(60, 60, 1)]
    if family == "qwen3_vl":
        model: Any = qwen3_vl_files.save(family, tmp_path)
        write_qwen(tmp_path, json.loads((tmp_path / "config.json").read_text()), patch_size=4)
        place = "<|vision_start|><|image_pad|><|vision_end|>"
    elif family == "internvl":
        model, place = internvl_files.save(tmp_path), "<IMG_CONTEXT>"
        config = json.loads((tmp_path / "config.json").read_text())
        write_internvl(tmp_path, config, internvl_files.SIDE)
    elif family == "lfm2_vl":
        model, place = lfm2_vl_files.save(tmp_path), "<image>"
        config = json.loads((tmp_path / "config.json").read_text())
        write_lfm2_vl(tmp_path, config, lfm2_vl_files.PATCH)
    else:
        model, place = pixtral_files.save(family, tmp_path), "[IMG]"
        write_pixtral(tmp_path, json.loads((tmp_path / "config.json").read_text()), 48)
    own = LLM(str(tmp_path), dtype="float32", max_model_len=256)
    prompt = {"prompt": f"{place} and {place}?", "multi_modal_data": {"image": pictures}}
    (found,) = own.generate(prompt, PARAMS, use_tqdm=False)
    ids = torch.tensor([list(found.prompt_token_ids or ())])
    if family == "qwen3_vl":
        mark = own.get_tokenizer().token_ids["<|image_pad|>"]
        model.config.image_token_id = mark
        fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
        inputs = Qwen2VLImageProcessorPil(**fields)(pictures, return_tensors="pt")
        inputs["mm_token_type_ids"] = (ids == mark).int()
    elif family == "internvl":
        model.config.image_token_id = own.get_tokenizer().token_ids[place]
        fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
        cut = GotOcr2ImageProcessorPil(crop_to_patches=True, **fields)
        inputs = {"pixel_values": cut(pictures, return_tensors="pt")["pixel_values"]}
    elif family == "lfm2_vl":
        # `tests/images/processors/test_lfm2_vl.py` compares the processor with transformers'.
        model.config.image_token_id = own.get_tokenizer().token_ids[place]
        processor = find_processor(tmp_path)
        assert processor is not None
        inputs = lfm2_vl_files.inputs(
            [item.content for each in pictures for item in processor.process(each).items]
        )
    else:
        theirs = PixtralImageProcessorPil(size={"longest_edge": 48})
        inputs = theirs(pictures, patch_size=8, return_tensors="pt")
    output = model.generate(input_ids=ids, **inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    assert list(found.outputs[0].token_ids) == output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("shows_progress", [False, True])
def test_images_are_read_while_earlier_prompts_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, shows_progress: bool
) -> None:
    """Within a bound on the encoder's inputs. A broken image behind it ends its prompt alone."""
    pictures = [random_picture(90, 50, seed) for seed in range(4)]
    alone = [llm.generate(prompt_of(each), PARAMS, use_tqdm=False)[0] for each in pictures]
    added: list[int] = []
    add = llm.engine.add

    def counting_add(request: Request) -> None:
        add(request)
        added.append(len(llm.engine.contents._open))

    monkeypatch.setattr(llm.engine, "add", counting_add)
    monkeypatch.setattr(request_group, "MAX_HELD_BYTES", 1)
    prompts = [prompt_of(each) for each in [*pictures[:2], b"broken", *pictures[2:]]]
    found = llm.generate([*prompts, {"prompt": "and text"}], PARAMS, use_tqdm=shows_progress)
    assert "is no image of the formats" in (found[2].error or "")
    assert found[2].outputs[0].finish_reason == "error" and not found[2].outputs[0].token_ids
    answers = [output.outputs[0].token_ids for output in (*found[:2], *found[3:5])]
    assert answers == [output.outputs[0].token_ids for output in alone]
    assert len(found[5].outputs[0].token_ids) == NUM_TOKENS
    assert added == [1, 1, 1, 1, 0], "one prompt at a time has images in the engine"


def test_wrong_prompts_are_refused(llm: LLM) -> None:
    for prompt, reason in (
        (prompt_of(PICTURE, OTHER), r"has 1 placeholders of images .* 2 images"),
        (prompt_of(b"broken"), "is no image of the formats"),
        (prompt_of(3), "must be a URL or a picture"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            llm.generate(prompt, PARAMS, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="takes text only"):
        llm.pin_prefix(prompt_of(PICTURE))


def test_text_alone_takes_no_images(tiny: TinyModel) -> None:
    plain = LLM(str(tiny.folder), dtype="float32", max_model_len=256, language_model_only=True)
    with pytest.raises(InvalidRequestError, match="the model takes text"):
        plain.generate(prompt_of(PICTURE), PARAMS, use_tqdm=False)


def test_the_async_engine_reads_images(tiny: TinyModel) -> None:
    async def ask() -> list[int]:
        async with AsyncLLM(str(tiny.folder), dtype="float32", max_model_len=256) as engine:
            outputs = [each async for each in engine.generate(prompt_of(PICTURE), PARAMS)]
            return list(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(ask()) == tiny.answer_to(TEXT, PICTURE)
