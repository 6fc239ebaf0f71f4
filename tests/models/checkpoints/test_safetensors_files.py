"""Safetensors files read tensor by tensor: contents, faults, and the memory that it takes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.models.checkpoints import source
from quire.models.checkpoints.safetensors_files import SafetensorsFiles


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


def _read(checkpoint, name):
    pieces = []
    for span in checkpoint.pieces(name):
        with checkpoint.rows(name, span) as rows:
            assert len(rows) == len(span)
            pieces.append(rows.clone())
    return torch.cat(pieces)


def test_reads_every_tensor(folder):
    checkpoint = SafetensorsFiles(folder)
    assert checkpoint.names == _tensors().keys()
    for name, tensor in _tensors().items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(_read(checkpoint, name), tensor)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reads_every_float_as_it_is_stored(stored, tmp_path):
    save_file(_tensors(stored), tmp_path / "model.safetensors")
    checkpoint = SafetensorsFiles(tmp_path)
    for name, tensor in _tensors(stored).items():
        assert _read(checkpoint, name).dtype == stored
        assert torch.equal(_read(checkpoint, name), tensor)


def test_tensors_at_odd_bytes_are_read(tmp_path):
    """The format allows any header size, so numbers may begin anywhere."""
    tensor = _tensors()["matrix"]
    header = json.dumps({"matrix": {"dtype": "F32", "shape": [33, 20], "data_offsets": [0, 2640]}})
    header += " " * (1 - len(header) % 2)
    assert len(header) % 2 == 1
    data = len(header).to_bytes(8, "little") + header.encode() + tensor.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    rows = _read(SafetensorsFiles(tmp_path), "matrix")
    assert torch.equal(rows, tensor)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 250, 10_000, 1 << 20])
def test_pieces_tile_the_rows(chunk_bytes, folder, monkeypatch):
    monkeypatch.setattr(source, "_CHUNK_BYTES", chunk_bytes)
    checkpoint = SafetensorsFiles(folder)
    for name, tensor in _tensors().items():
        pieces = checkpoint.pieces(name)
        assert [row for span in pieces for row in span] == list(range(len(tensor)))
        row_bytes = tensor[0].numel() * 4
        assert max(map(len, pieces)) <= max(1, chunk_bytes // row_bytes)
        assert torch.equal(_read(checkpoint, name), tensor)


def test_large_pieces_hold_whole_panels(folder, monkeypatch):
    save_file({"tall": torch.zeros(1000, 4)}, folder / "model.safetensors")
    monkeypatch.setattr(source, "_CHUNK_BYTES", 200 * 16)
    assert [len(span) for span in SafetensorsFiles(folder).pieces("tall")] == [192] * 5 + [40]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_given_back_with_the_rows(tmp_path):
    """A file of 32 MiB is resident while it is lent, and no longer."""
    save_file({"big": torch.ones(1 << 13, 1 << 10)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsFiles(tmp_path)
    before = _resident_file_kib(tmp_path)
    with checkpoint.rows("big", range(1 << 13)) as rows:
        assert rows.sum() == 1 << 23
        assert _resident_file_kib(tmp_path) - before > 30 << 10
    assert _resident_file_kib(tmp_path) <= before


def _resident_file_kib(folder):
    """Of the mappings of files in `folder`."""
    resident, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split(" ")[0].endswith(":"):
            resident += int(line.split()[1]) if is_ours and line.startswith("Rss:") else 0
        else:
            is_ours = str(folder) in line
    return resident


def test_reads_shards(tmp_path):
    first, second = _tensors(), {"other": torch.ones(3)}
    _save_sharded(tmp_path, {"model-1.safetensors": first, "model-2.safetensors": second})
    checkpoint = SafetensorsFiles(tmp_path)
    assert checkpoint.names == {*first, "other"}
    assert torch.equal(_read(checkpoint, "matrix"), first["matrix"])
    assert torch.equal(_read(checkpoint, "other"), torch.ones(3))


def test_compares_tensors_by_value(tmp_path):
    ones = torch.ones(6, 5)
    tensors = {"a": ones, "b": ones.clone(), "half": ones.half(), "long": torch.ones(7, 5)}
    tensors["other"] = ones.clone()
    tensors["other"][5, 4] = 2
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsFiles(tmp_path)
    assert checkpoint.equal("a", "b") and checkpoint.equal("a", "half")
    assert not checkpoint.equal("a", "other") and not checkpoint.equal("a", "long")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_named(kept, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file") as caught:
        SafetensorsFiles(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{not json here}}", b"PK"]
)
def test_a_garbled_header_is_named(garbage, folder):
    (folder / "model.safetensors").write_bytes(garbage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        SafetensorsFiles(folder)


def test_a_broken_shard_and_a_missing_shard_are_named(tmp_path):
    shards = {"model-1.safetensors": _tensors(), "model-2.safetensors": {"other": torch.ones(3)}}
    _save_sharded(tmp_path, shards)
    (tmp_path / "model-2.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is not a whole"):
        SafetensorsFiles(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors does not exist"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("holder", ["model-1.safetensors", "model-2.safetensors"])
def test_the_index_says_which_of_two_files_holds_a_tensor(tmp_path, holder):
    other = {"other": torch.ones(3), "vector": torch.zeros(77)}
    shards = {"model-1.safetensors": _tensors(), "model-2.safetensors": other}
    _save_sharded(tmp_path, shards)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"vector": holder}}))
    checkpoint = SafetensorsFiles(tmp_path)
    assert checkpoint.names == _tensors().keys() | {"other"}
    assert torch.equal(_read(checkpoint, "vector"), shards[holder]["vector"])


def test_a_tensor_in_two_shards_of_which_the_index_names_neither_is_refused(tmp_path):
    other = {"other": torch.ones(3), "vector": torch.ones(77)}
    _save_sharded(tmp_path, {"model-1.safetensors": _tensors(), "model-2.safetensors": other})
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["vector"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError, match=r"model-1\.safetensors and model-2\.safetensors hold a tensor vector"
    ):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "which is not in its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is not in its folder"),
        ({"weight_map": {"a": "y" * 256}}, r"the file 'y+.*, which is not in its folder"),
        ({"weight_map": {"a": ".."}}, "is not"),
    ],
)
def test_a_bad_index_is_refused(index, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_out(name, tmp_path):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFiles(tmp_path)
    assert name in str(caught.value)
    assert "save_pretrained(FOLDER, safe_serialization=True)" in str(caught.value)


def test_pickles_beside_safetensors_are_left_alone(folder):
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert SafetensorsFiles(folder).names == _tensors().keys()


def test_an_empty_and_an_absent_folder_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="has no weights: neither"):
        SafetensorsFiles(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        SafetensorsFiles(tmp_path / "nowhere")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused_by_name(dtype, tmp_path):
    save_file({"packed": torch.zeros(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsFiles(tmp_path)
    with pytest.raises(CheckpointError, match=r"packed is stored as .*, but only F64, F32"):
        checkpoint.pieces("packed")


def test_weights_under_another_name_are_named(tmp_path):
    save_file(_tensors(), tmp_path / "weights.safetensors")
    with pytest.raises(
        CheckpointError, match=r"but weights\.safetensors; if one file is the whole"
    ):
        SafetensorsFiles(tmp_path)
