"""Encoders in GGUF files: the embeddings and tokens of the models that they were converted from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.image_prompts import IMAGE_FAMILIES, answers_of, requests_of
from tests.models.vision import (
    gemma3_files,
    gemma4_files,
    internvl_files,
    lfm2_vl_files,
    pixtral_files,
    qwen3_vl_files,
)
from tests.models.vision.gguf_pairs import round_matrices, write_mmproj, write_text
from tests.models.vision.idefics3_files import make_tile, save_smolvlm
from tests.models.vision.towers import encoded, load_found, save_model
from transformers import PreTrainedModel

from quire import LLM
from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.images.processors.find import find_processor
from quire.models.registry import load_config
from quire.models.vision.towers import find_tower

IMAGE = (1, 1, 1)


def save(name: str, folder: Path) -> PreTrainedModel:
    """A model of transformers that is saved in the folder."""
    if name == "smolvlm":
        return save_smolvlm(folder)
    if name.startswith("internvl"):
        family = "large" if name == "internvl large" else "internvl"
        return save_model(internvl_files.reference(family), folder)
    if name in ("mistral3", "llava"):
        return pixtral_files.save(name, folder)
    if name.startswith("gemma4"):
        family = "small" if name == "gemma4 small" else "gemma4"
        return save_model(gemma4_files.reference(family), folder)
    if name in ("gemma3", "lfm2_vl"):
        return {"gemma3": gemma3_files, "lfm2_vl": lfm2_vl_files}[name].save(folder)
    return qwen3_vl_files.save(name, folder)


def values_of(name: str) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """An encoder's input, and its grid."""
    if name.startswith("qwen"):
        return qwen3_vl_files.make_patches((1, 4, 6)), (1, 4, 6)
    if name == "lfm2_vl":
        return lfm2_vl_files.make_patches((1, 4, 6)), (1, 4, 6)
    if name == "gemma3":
        return gemma3_files.make_image(), IMAGE
    if name.startswith("gemma4"):
        return gemma4_files.make_image(), IMAGE
    if name in ("mistral3", "llava"):
        return pixtral_files.make_image(4, 6), IMAGE
    return internvl_files.make_tile() if name.startswith("internvl") else make_tile(1), IMAGE


def encode(
    model: PreTrainedModel, folder: Path, name: str, text: Path, mmproj: Path | None = None
) -> torch.Tensor:
    """The embeddings of an image, from a folder or a pair of files."""
    source = find_tower(text, load_config(folder), None if mmproj is None else str(mmproj))
    assert source is not None
    return encoded(load_found(source, model), *values_of(name))


CASES = ["smolvlm", "internvl", "internvl large", "mistral3", "llava", "qwen3_vl", "qwen3_5"]
CASES += ["gemma3", "gemma4", "gemma4 small", "lfm2_vl"]


@pytest.mark.parametrize("name", CASES)
def test_embeddings_equal_those_of_the_folder(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    text, expected = (
        write_text(model, tmp_path / "text.gguf"),
        encode(model, tmp_path, name, tmp_path),
    )
    # Gemma 4's scores are not scaled, so that rounding changes its attention more.
    factor = 3 if name.startswith("gemma4") else 1
    for kind, most in (("F32", 0.0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 3e-2)):
        path = write_mmproj(model, tmp_path / f"{kind}.gguf", kind)
        found = encode(model, tmp_path, name, text, path)
        assert (found - expected).norm() <= factor * most * expected.norm(), kind


def test_exchanged_linears_of_old_files(tmp_path: Path) -> None:
    model = save_smolvlm(tmp_path)
    text = write_text(model, tmp_path / "text.gguf")
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    new = write_mmproj(model, tmp_path / "new.gguf")
    old = write_mmproj(model, tmp_path / "old.gguf", names=names)
    found = [encode(model, tmp_path, "smolvlm", text, path) for path in (new, old)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "name", ["smolvlm", "mistral3", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "lfm2_vl"]
)
def test_tokens_equal_those_of_the_folder(name: str, tmp_path: Path) -> None:
    """The pair lies in a folder of its own, so the encoder is found beside the language model."""
    family = IMAGE_FAMILIES[name]
    model = family.save(tmp_path)
    if name == "gemma3":  # files say a pattern of layers, of which this model has the beginning
        model.config.text_config.layer_types = ["sliding_attention"] * 3
    if name == "gemma4":  # without embeddings for each layer, tokens of an image see later ones
        model = gemma4_files.reference(hidden_size_per_layer_input=0)
    round_matrices(model)
    save_model(model, tmp_path)
    pair = tmp_path / "pair"
    pair.mkdir()
    text = write_text(model, pair / "tiny-BF16.gguf")
    write_mmproj(model, pair / "mmproj-F32.gguf")
    options: dict[str, Any] = {"max_model_len": 96, "dtype": "float32", "skip_tokenizer_init": True}
    answers = [
        answers_of(LLM(str(place), **options).engine, requests_of(family))
        for place in (tmp_path, text)
    ]
    tokens = [
        {key: [token for token, _ in entries] for key, entries in each.items()} for each in answers
    ]
    assert tokens[0] == tokens[1]


def test_refusals(tmp_path: Path) -> None:
    model = save_smolvlm(tmp_path)
    text = write_text(model, tmp_path / "text.gguf")
    config = load_config(text)
    for changes, message in (
        ({"clip.projector_type": "resampler"}, "projector_type is resampler"),
        ({"clip.projector_type": "qwen3vl_merger"}, "belongs to no model of the architecture"),
        ({"clip.vision.projection_dim": 65}, "have 65 elements"),
        ({"clip.has_audio_encoder": True}, "encoder of sound"),
        ({"general.type": "model"}, "holds no encoder of images"),
    ):
        path = write_mmproj(model, tmp_path / "mmproj-bad.gguf", **changes)
        with pytest.raises(UnsupportedModelError, match=message):
            find_tower(text, config, str(path))
        # Beside the model, it is left out, and the model is served for text.
        assert find_tower(text, config) is None and find_processor(text) is None
    for changes, message in (
        ({"clip.vision.new": 1}, "clip.vision.new is not understood"),
        ({"clip.vision.patch_size": None}, "patch_size is None"),
        ({"clip.vision.image_mean": [0.5]}, "must be a list of three numbers"),
        ({"clip.vision.patch_size": "8"}, "must be a whole number"),
    ):
        write_mmproj(model, tmp_path / "mmproj-bad.gguf", **changes)
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            find_tower(text, config)
    for names, message in (
        ({"mm": "a"}, "lack connector"),
        ({"mm": "no"}, "does not know the tensors no.model.fc.weight"),
    ):
        write_mmproj(model, tmp_path / "mmproj-bad.gguf", names=names)
        with pytest.raises(CheckpointError, match=message):
            found = find_tower(text, config)
            assert found is not None
            load_found(found, model)
    # If there are two encoders, the model is served for text.
    write_mmproj(model, tmp_path / "mmproj-other.gguf")
    assert find_tower(text, config) is None
    with pytest.raises(CheckpointError, match="is no model in GGUF format"):
        find_tower(Path(__file__).parent, config, "x.gguf")
    with pytest.raises(ConfigurationError, match=r"mmproj is .* leave it out"):
        LLM(str(text), mmproj=str(path), language_model_only=True, skip_tokenizer_init=True)
