"""The digest of weights: of the numbers alone, and of each of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from quire.formats.format_registry import load_weight_format
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints import source
from quire.models.checkpoints.loader import Reading, load_model
from quire.models.checkpoints.weights_digest import DIGEST_BYTES, WeightsDigest
from quire.models.registry import load_config

NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of a few rows, so that small tensors have many."""
    monkeypatch.setattr(source, "_CHUNK_BYTES", 10_000)


def digest_of(folder, num_threads=1, dtype=torch.float32, quantization=None):
    digest = WeightsDigest()
    load_model(
        folder,
        load_config(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=48,
        methods=LinearMethods(load_weight_format(quantization).method()),
        reading=Reading(num_threads, digest=digest),
    )
    return digest.digest()


def rewrite(folder, tensors, num_shards=1):
    """The same folder with other tensors, in their order."""
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    places = {name: f"{index % num_shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_digest_does_not_depend_on_the_division_into_files(save_checkpoint):
    folder, _ = save_checkpoint(LlamaConfig)
    expected = digest_of(folder)
    assert len(expected) == DIGEST_BYTES
    tensors = load_file(folder / "model.safetensors")
    for num_shards in (1, 3):
        rewrite(folder, dict(reversed(tensors.items())), num_shards)
        assert digest_of(folder, num_threads=3) == expected


def test_the_digest_does_not_depend_on_dtype_or_quantization(save_checkpoint):
    """The fingerprint has that beside them."""
    folder, _ = save_checkpoint(LlamaConfig)
    found = {
        digest_of(folder),
        digest_of(folder, dtype=torch.bfloat16),
        digest_of(folder, quantization="int8"),
    }
    assert len(found) == 1


def test_other_weights_under_the_same_name_are_others(save_checkpoint):
    folder, _ = save_checkpoint(LlamaConfig)
    found = {digest_of(folder)}
    tensors = load_file(folder / "model.safetensors")
    flipped = tensors[NAME].clone()
    flipped.view(torch.uint8)[-1, -1] ^= 1
    swapped = tensors[NAME].clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    other = NAME.replace("layers.1", "layers.2")
    changes = [
        {NAME: flipped},
        {NAME: swapped},
        {NAME: tensors[other], other: tensors[NAME]},
        {NAME: tensors[NAME].bfloat16()},
    ]
    for change in changes:
        rewrite(folder, tensors | change)
        found.add(digest_of(folder))
    assert len(found) == 1 + len(changes)


def test_weights_digest_ignores_unused_tensors(save_checkpoint):
    """Of a tied model's two ends one is read."""
    folder, _ = save_checkpoint(Qwen3Config, head_dim=16, tie_word_embeddings=True)
    expected = digest_of(folder)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, tensors | {"lm_head.weight": head})
    assert digest_of(folder) == expected


def test_pieces_come_in_any_order():
    rows = torch.arange(12, dtype=torch.float16).view(6, 2)
    pieces = [("a", 0, rows[:2]), ("a", 2, rows[2:]), ("b", 0, rows[::2]), ("c", 0, rows[:, 0])]
    digests = [WeightsDigest(), WeightsDigest()]
    for digest, order in zip(digests, (pieces, pieces[::-1]), strict=True):
        for piece in order:
            digest.add(*piece)
    assert digests[0].digest() == digests[1].digest()
    assert digests[0].digest() != WeightsDigest().digest()
