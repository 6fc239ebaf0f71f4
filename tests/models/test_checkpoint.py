"""Safetensors files read tensor by tensor: contents, faults, and the memory that it takes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.models import checkpoint as checkpoint_module
from quire.models.checkpoint import Checkpoint


def _tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (33, 20), "vector": (77,), "cube": (4, 3, 5), "row": (1, 500)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


@pytest.fixture
def folder(tmp_path):
    save_file(_tensors(), tmp_path / "model.safetensors")
    return tmp_path


def _save_sharded(folder, shards):
    """shards: file name -> its tensors. Writes the index too."""
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _read(checkpoint, name, dtype=torch.float32):
    target = torch.full(checkpoint.shape(name), torch.nan, dtype=dtype)
    checkpoint.copy(name, target)
    return target


def test_reads_every_tensor(folder):
    checkpoint = Checkpoint(folder)
    assert checkpoint.names == _tensors().keys()
    for name, tensor in _tensors().items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(_read(checkpoint, name), tensor)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_dtypes(stored, wanted, tmp_path):
    save_file(_tensors(stored), tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in _tensors(stored).items():
        assert torch.equal(_read(checkpoint, name, wanted), tensor.to(wanted))


@pytest.mark.parametrize(("chunk_bytes", "release_bytes"), [(1, 1), (100, 250), (1 << 20, 1)])
def test_small_chunks_and_many_releases_read_the_same(
    chunk_bytes, release_bytes, folder, monkeypatch
):
    monkeypatch.setattr(checkpoint_module, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(checkpoint_module, "RELEASE_BYTES", release_bytes)
    checkpoint = Checkpoint(folder)
    for name, tensor in _tensors().items():
        assert torch.equal(_read(checkpoint, name), tensor)


def test_fills_a_slice_of_a_fused_parameter(folder):
    fused = torch.zeros(40, 20)
    Checkpoint(folder).copy("matrix", fused[5:38])
    assert torch.equal(fused[5:38], _tensors()["matrix"])
    assert not fused[:5].any() and not fused[38:].any()


def test_reads_shards(tmp_path):
    first, second = _tensors(), {"other": torch.ones(3)}
    _save_sharded(tmp_path, {"model-1.safetensors": first, "model-2.safetensors": second})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == {*first, "other"}
    assert torch.equal(_read(checkpoint, "matrix"), first["matrix"])
    assert torch.equal(_read(checkpoint, "other"), torch.ones(3))


def test_compares_tensors_by_value(tmp_path):
    ones = torch.ones(6, 5)
    tensors = {"a": ones, "b": ones.clone(), "half": ones.half(), "long": torch.ones(7, 5)}
    tensors["other"] = ones.clone()
    tensors["other"][5, 4] = 2
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.equal("a", "b") and checkpoint.equal("a", "half")
    assert not checkpoint.equal("a", "other") and not checkpoint.equal("a", "long")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_named(kept, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file") as caught:
        Checkpoint(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{not json here}}", b"PK"]
)
def test_a_garbled_header_is_named(garbage, folder):
    (folder / "model.safetensors").write_bytes(garbage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        Checkpoint(folder)


def test_a_broken_shard_and_a_missing_shard_are_named(tmp_path):
    shards = {"model-1.safetensors": _tensors(), "model-2.safetensors": {"other": torch.ones(3)}}
    _save_sharded(tmp_path, shards)
    (tmp_path / "model-2.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is not a whole"):
        Checkpoint(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors does not exist"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    other = {"other": torch.ones(3), "vector": torch.ones(77)}
    _save_sharded(tmp_path, {"model-1.safetensors": _tensors(), "model-2.safetensors": other})
    with pytest.raises(CheckpointError, match="two files hold the tensor vector"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "which is not in its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is not in its folder"),
        ({"weight_map": {"a": ".."}}, "is not"),
    ],
)
def test_a_bad_index_is_refused(index, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_out(name, tmp_path):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert name in str(caught.value)
    assert "save_pretrained(FOLDER, safe_serialization=True)" in str(caught.value)


def test_pickles_beside_safetensors_are_left_alone(folder):
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert Checkpoint(folder).names == _tensors().keys()


def test_an_empty_and_an_absent_folder_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="has no weights: neither"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Checkpoint(tmp_path / "nowhere")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused_by_name(dtype, tmp_path):
    save_file({"packed": torch.zeros(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"packed is stored as .*, but only F64, F32"):
        checkpoint.copy("packed", torch.zeros(4, 4))
