"""A converted model is read as the folder that it was converted from: its config, its tensors."""

from dataclasses import fields

import pytest
import torch
from tests.gguf_writer import write_gguf
from tests.models.checkpoints.gguf.conversion import Conversion, convert, metadata, random_model
from tests.models.checkpoints.gguf.conversions import CONVERSIONS, OTHER_LLAMA_3
from tests.models.checkpoints.gguf.converters import rope_freqs

from quire.core.pooling import PoolingKind
from quire.errors import UnsupportedModelError
from quire.layers.rotary import LongRope
from quire.models.checkpoints.gguf.families.architectures import ARCHITECTURES
from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.source import CheckpointSource
from quire.models.pooling_config import PoolingFolder, read_pooling
from quire.models.registry import find_entry, load_config


def whole(source: CheckpointSource, name: str) -> torch.Tensor:
    parts = []
    for span in source.pieces(name):
        with source.rows(name, span) as rows:
            parts.append(rows.float())
    return torch.cat(parts)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_as_it_was_before(name, tmp_path):
    conversion = CONVERSIONS[name]
    raw, model = random_model(conversion)
    folder = tmp_path / "original"
    model.save_pretrained(folder)
    path = convert(conversion, raw, model, tmp_path / "model.gguf")
    expected, config = load_config(folder), load_config(path)
    assert type(config) is type(expected)
    for field in fields(config):
        wanted = conversion.unlike.get(field.name, getattr(expected, field.name))
        assert getattr(config, field.name) == wanted, field.name
    entry = find_entry(expected)
    original, found = entry.open(folder, expected), entry.open(path, config)
    assert found.names == original.names
    for tensor in original.names:
        assert found.shape(tensor) == original.shape(tensor), tensor
        torch.testing.assert_close(
            whole(found, tensor), whole(original, tensor), rtol=1e-6, atol=1e-6, msg=tensor
        )


def test_every_architecture_is_tried():
    assert {conversion.architecture for conversion in CONVERSIONS.values()} == ARCHITECTURES.keys()


def test_other_factors_of_frequencies_are_taken_as_they_are(tmp_path):
    conversion = Conversion("llama", "llama", {"rope_parameters": OTHER_LLAMA_3, "head_dim": 64})
    raw, model = random_model(conversion)
    tensors = rope_freqs(raw)
    conversion = Conversion("llama", "llama", conversion.changes, extra=lambda _: tensors)
    config = load_config(convert(conversion, raw, model, tmp_path / "model.gguf"))
    assert isinstance(config.rope, LongRope)
    expected = tensors["rope_freqs.weight"]
    torch.testing.assert_close(torch.tensor(config.rope.long_factor), expected)
    assert config.rope.long_factor == config.rope.short_factor
    assert config.rope.attention_factor == 1.0


def test_a_field_that_is_not_understood_is_refused(tmp_path):
    conversion = CONVERSIONS["qwen3"]
    raw, _ = random_model(conversion)
    known = metadata(conversion, raw)
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    for value in (0, 0.0, False, ""):
        write_gguf(tmp_path / "x.gguf", known | {"qwen3.attention.new": value}, tensors)
        assert GGUFFiles.read_config(tmp_path)["vocab_size"] == 5
    for value in (1, 0.5, True, "new", [1]):
        write_gguf(tmp_path / "x.gguf", known | {"qwen3.attention.new": value}, tensors)
        with pytest.raises(UnsupportedModelError, match=r"field qwen3.attention.new is"):
            GGUFFiles.read_config(tmp_path)


def test_an_architecture_that_is_not_read_is_named_with_those_that_are(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "rwkv7"}, {})
    with pytest.raises(
        UnsupportedModelError, match=r"architecture rwkv7, but quire reads only .*qwen3"
    ):
        load_config(path)


@pytest.mark.parametrize(
    "pooling_type, kind",
    [(None, None), (0, None), (1, PoolingKind.MEAN), (2, PoolingKind.CLS), (3, PoolingKind.LAST)],
)
def test_pooling(pooling_type, kind, tmp_path):
    raw, _ = random_model(CONVERSIONS["qwen3"])
    fields = metadata(CONVERSIONS["qwen3"], raw)
    fields |= {} if pooling_type is None else {"qwen3.pooling_type": pooling_type}
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    path = write_gguf(tmp_path / "x.gguf", fields, tensors)
    said = None if kind is None else PoolingFolder(kind, normalize=True)
    assert read_pooling(path) == read_pooling(tmp_path) == said
    assert load_config(path).vocab_size == 5


def test_a_head_that_scores_is_refused(tmp_path):
    raw, _ = random_model(CONVERSIONS["qwen3"])
    fields = metadata(CONVERSIONS["qwen3"], raw) | {"qwen3.pooling_type": 4}
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    path = write_gguf(tmp_path / "x.gguf", fields, tensors)
    with pytest.raises(UnsupportedModelError, match=r"qwen3.pooling_type is 4, which quire does"):
        load_config(path)
