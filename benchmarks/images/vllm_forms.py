"""Tells which forms of vLLM's calls with media are served, and which examples they make.

    python -m benchmarks.images.vllm_forms

Makes each form of a call on a tiny random SmolVLM: it is served, or refused in a sentence. Then
lists offline examples of vLLM with media by the forms that they use. An example runs with its
import and its model changed only if all of its forms are served.
"""

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.images.tiny_model import save_tiny
from tests.models.vision.idefics3_files import SIDE

from quire import LLM, SamplingParams
from quire.errors import QuireError

SERVED = "served"
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
PICTURE = Image.fromarray(np.arange(90 * 50 * 3, dtype=np.uint8).reshape(50, 90, 3))
TEXT = "<|im_start|>User:{}What is it?<end_of_utterance>\nAssistant:"
ONE, TWO = TEXT.format("<image>"), TEXT.format("<image><image>")

Make = Callable[..., LLM]
"""Makes the tiny model's LLM with further options."""


def _generate(prompt: Mapping[str, Any], **options: Any) -> Callable[[Make], object]:
    return lambda make: make(**options).generate(prompt, PARAMS, use_tqdm=False)


def _data(prompt: str = ONE, **data: Any) -> dict[str, Any]:
    return {"prompt": prompt, "multi_modal_data": data}


def _chat(part: Mapping[str, Any]) -> Callable[[Make], object]:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    return lambda make: make().chat(messages, PARAMS, use_tqdm=False)


def _option(**options: Any) -> Callable[[Make], object]:
    return _generate(_data(image=PICTURE), **options)


FORMS: dict[str, Callable[[Make], object]] = {
    "image": _generate(_data(image=PICTURE)),
    "images": _generate(_data(TWO, image=[PICTURE, PICTURE]), limit_mm_per_prompt={"image": 2}),
    "image array": _generate(_data(image=np.asarray(PICTURE))),
    "uuids": _generate({**_data(image=PICTURE), "multi_modal_uuids": {"image": "a"}}),
    "uuids without images": _generate(
        {**_data(image=None), "multi_modal_uuids": {"image": "a"}},
    ),
    "image embeddings": _generate(_data(image={"image_embeds": np.zeros((1, 4, 64))})),
    "video": _generate(_data(video=np.zeros((2, 8, 8, 3), np.uint8))),
    "audio": _generate(_data(audio=(np.zeros(16000), 16000))),
    "vision chunk": _generate(_data(vision_chunk={"type": "image", "image": PICTURE})),
    "encoder prompt": _generate({"encoder_prompt": _data(image=PICTURE), "decoder_prompt": "a"}),
    "kwargs of a prompt": _generate(
        {**_data(image=PICTURE), "mm_processor_kwargs": {"size": {"longest_edge": SIDE}}}
    ),
    "kwargs of other media": _generate({**_data(image=PICTURE), "mm_processor_kwargs": {"fps": 1}}),
    "chat with a picture": _chat({"type": "image_pil", "image_pil": PICTURE}),
    "chat with https:": _chat({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
    "embed": lambda make: make().embed(_data(image=PICTURE)),
    "limit": _option(limit_mm_per_prompt={"image": 1}),
    "limit of videos": _option(limit_mm_per_prompt={"image": 1, "video": 1}),
    "limit with sizes": _option(limit_mm_per_prompt={"image": {"count": 1, "width": 64}}),
    "processor's settings": _option(mm_processor_kwargs={"size": {"longest_edge": SIDE}}),
    "processor's cache": _option(mm_processor_cache_gb=4),
    "no processor's cache": _option(mm_processor_cache_gb=0),
    "graphs of the encoder": _option(compilation_config={"cudagraph_mm_encoder": True}),
    "the encoder's ranks": _option(mm_encoder_tp_mode="data"),
    "Mistral's format": _option(tokenizer_mode="mistral"),
    "assets": lambda _: importlib.import_module("quire.assets.image"),
    "vllm.multimodal": lambda _: importlib.import_module("quire.multimodal.utils"),
}
"""Forms of calls by name."""

_DEMO = ("assets", "vllm.multimodal", "image", "uuids", "limit", "processor's cache")
EXAMPLES: dict[str, Sequence[str]] = {
    "generate/multimodal/vision_language_offline.py": (*_DEMO, "processor's settings"),
    "generate/multimodal/vision_language_multi_image_offline.py": (
        *("vllm.multimodal", "images", "chat with https:", "limit", "processor's settings"),
    ),
    "generate/multimodal/mistral-small_offline.py": (
        *("assets", "vllm.multimodal", "chat with https:", "Mistral's format"),
    ),
    "generate/multimodal/audio_language_offline.py": ("assets", "audio"),
    "generate/multimodal/encoder_decoder_multimodal_offline.py": ("assets", "audio"),
    "generate/multimodal/qwen2_5_omni/only_thinker.py": ("assets", "audio", "video"),
    "generate/multimodal/qwen3_omni/only_thinker.py": ("assets", "audio", "video"),
    "pooling/embed/vision_embedding_offline.py": ("vllm.multimodal", "embed"),
    "pooling/score/vision_reranker_offline.py": ("embed",),
    "pooling/token_embed/jina_embeddings_v4_offline.py": ("vllm.multimodal", "embed"),
    "pooling/plugin/prithvi_geospatial_mae_offline.py": ("embed",),
}
"""Examples of vLLM below its folder `examples`, with forms that they need."""


def outcome(make: Make, form: str) -> str:
    """SERVED, or the sentence that refuses the form. Raises all errors that are no refusals."""
    try:
        FORMS[form](make)
    except (QuireError, ModuleNotFoundError) as error:
        return str(error)
    return SERVED


def outcomes(folder: Path) -> dict[str, str]:
    """The outcome of each form, on a model in the folder."""

    usual = {"dtype": "float32", "max_model_len": 256, "disable_log_stats": True}
    save_tiny(folder)
    plain = LLM(str(folder), **usual)

    def make(**options: Any) -> LLM:
        return LLM(str(folder), **usual, **options) if options else plain

    return {form: outcome(make, form) for form in FORMS}


def main() -> int:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(Path(folder))
    for form, said in found.items():
        print(f"{form:24} {said}")
    print()
    for example, forms in EXAMPLES.items():
        missing = [form for form in forms if found[form] != SERVED]
        print(f"{example:62} {'runs' if not missing else 'needs ' + ', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
