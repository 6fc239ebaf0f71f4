"""A tiny random SmolVLM with a tokenizer and a processor, and transformers' answers of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tests.images.tiny_folders import write_smolvlm
from tests.models.vision.idefics3_files import SIDE, VISION, save_smolvlm
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from quire.text.tokenizer import Tokenizer

IMAGE_FIELDS = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
NUM_TOKENS = 8


@dataclass(frozen=True)
class TinyModel:
    """The folder, and what transformers makes of it."""

    folder: Path
    model: PreTrainedModel
    processor: Any

    def prompt_of(self, text: str, *pictures: Image.Image) -> Any:
        """transformers' inputs for a rendered prompt."""
        images = [list(pictures)] if pictures else None
        return self.processor(
            text=[text], images=images, add_special_tokens=False, return_tensors="pt"
        )

    def answer_to(self, text: str, *pictures: Image.Image) -> list[int]:
        """The greedy tokens of transformers."""
        inputs = self.prompt_of(text, *pictures)
        inputs.pop("pixel_attention_mask", None)
        model: Any = self.model
        found = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        tokens: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def save_tiny(folder: Path) -> TinyModel:
    """Write the model to a folder."""
    torch.set_num_threads(1)
    model = save_smolvlm(folder)
    config = json.loads((folder / "config.json").read_text())
    write_smolvlm(folder, **config)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_FIELDS))
    backend = Tokenizer.from_folder(folder)._backend
    mark = backend.token_to_id("<image>")
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": mark}))
    model.config.image_token_id = mark
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    num_tokens = (SIDE // VISION["patch_size"] // 2) ** 2
    images = Idefics3ImageProcessorPil(**IMAGE_FIELDS)
    return TinyModel(folder, model, Idefics3Processor(images, tokenizer, num_tokens))
