"""What a header may say, and that every lie in it is found before it is believed."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.hub.safetensors_header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    StoredTensor,
    read_header,
)

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]}


@pytest.fixture
def write(tmp_path):
    """write(header, length of the data, length that the file says) -> path"""

    def write(header, num_bytes=32, length=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "model.safetensors"
        size = len(text) if length is None else length
        path.write_bytes(size.to_bytes(8, "little") + text + bytes(num_bytes))
        return path

    return write


def test_reads_what_the_library_writes(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    tensors |= {"scalar": torch.tensor(1.0), "none": torch.ones(0, 7)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: stored.shape for name, stored in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert [stored.start for stored in found.values()] == sorted(
        stored.start for stored in found.values()
    )


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32),
        *(torch.float64, torch.complex64, torch.uint16, torch.uint32, torch.uint64),
    ],
)
def test_knows_every_dtype_that_the_library_writes(dtype, tmp_path):
    save_file({"a": torch.zeros(8, dtype=dtype)}, tmp_path / "x.safetensors")
    [stored] = read_header(tmp_path / "x.safetensors").values()
    assert DTYPE_BITS[stored.dtype] == 8 * dtype.itemsize


def test_gives_places_in_the_file(write):
    header = {"__metadata__": {"format": "pt"}, "b": B, "a": A}
    first = 8 + len(json.dumps(header))
    assert read_header(write(header)) == {
        "a": StoredTensor("F32", (2, 3), first),
        "b": StoredTensor("F16", (4,), first + 24),
    }


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": A | {"shape": [2, 4]}, "b": B}, "would have 32 bytes, but 24 are there"),
        ({"a": A | {"dtype": "F64"}, "b": B}, "would have 48 bytes, but 24 are there"),
        ({"a": A | {"dtype": "X"}, "b": B}, "the dtype of a is 'X'"),
        ({"a": A | {"dtype": ["F32"]}, "b": B}, "the dtype of a is"),
        (
            {"a": A | {"shape": [2**40, 2**40]}, "b": B},
            "would have 4835703278458516698824704 bytes",
        ),
        ({"a": A | {"shape": [2**64]}, "b": B}, "the shape of a is"),
        ({"a": A | {"shape": [-2, -3]}, "b": B}, "the shape of a is"),
        ({"a": A | {"shape": [2.0, 3]}, "b": B}, "the shape of a is"),
        ({"a": A | {"shape": [True, 6]}, "b": B}, "the shape of a is"),
        ({"a": A | {"shape": [1] * 300}, "b": B}, "the shape of a is"),
        ({"a": A | {"shape": 6}, "b": B}, "the shape of a is 6"),
        ({"a": A, "b": B | {"data_offsets": [20, 28]}}, "begin at 20, but those before end at 24"),
        ({"a": A, "b": B | {"data_offsets": [0, 8]}}, "but those before end at"),
        ({"a": A, "b": B | {"data_offsets": [32, 24]}}, "the data_offsets of b are"),
        ({"a": A, "b": B | {"data_offsets": [24]}}, "the data_offsets of b are"),
        ({"a": A, "b": B | {"data_offsets": [24, 2**70]}}, "the data_offsets of b are"),
        ({"a": A, "b": B | {"data_offsets": "ab"}}, "the data_offsets of b are"),
        ({"b": B, "a": {"dtype": "F32", "shape": [2, 3]}}, "but must say dtype, shape and data_o"),
        ({"b": B, "a": A | {"more": 1}}, "but must say dtype, shape and data_offsets"),
        ({"b": B, "a": None}, "the header says None of a"),
        ({"a\nb": None}, r"the header says None of 'a\\nb'"),
        ({"b": B}, "begin at 24, but those before end at 0"),
        ({"a": A}, "bytes, but its header describes"),
        (b'{"a": 1, "a": 1}', "the name a occurs twice in one object"),
        (b"[]", "must hold a JSON object"),
    ],
)
def test_inconsistent_headers_are_refused_with_the_reason(header, reason, write):
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_header(write(header))
    message = str(caught.value)
    assert "model.safetensors is not a whole safetensors file: " in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (10**4, "its header alone has 10008"),
        (2**64 - 1, f"but at most {MAX_HEADER_BYTES} are read"),
        (0, "is not JSON"),
    ],
)
def test_the_headers_length_is_checked_before_it_is_read(length, reason, write):
    with pytest.raises(CheckpointError, match=reason):
        read_header(write({"a": A, "b": B}, length=length))


def test_a_pointer_of_git_lfs_is_called_so(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 7612736\n")
    with pytest.raises(CheckpointError, match=r"is a pointer of git-LFS, not .* `git lfs pull`"):
        read_header(path)
