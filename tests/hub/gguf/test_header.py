"""What a GGUF header may say, and that every lie in it is found before it is believed."""

import struct

import numpy as np
import pytest
import torch
from tests.gguf_writer import (
    ARRAY,
    BOOL,
    STRING,
    U32,
    Raw,
    header,
    tensor_info,
    text,
    value,
    write_gguf,
)

from quire.errors import CheckpointError
from quire.hub.gguf.header import MAX_FIELDS, MAX_TENSORS, read_gguf
from quire.hub.gguf.storage_types import STORAGE_TYPES

HUGE = (1 << 64) - 1


@pytest.fixture
def refused(tmp_path):
    """refused(content) -> what is said of a file with it"""

    def refused(content: bytes) -> str:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_gguf(path)
        message = str(caught.value)
        assert message.startswith(str(path))
        assert "\n" not in message and len(message) < 600
        return message.removeprefix(str(path))

    return refused


def array(kind: int, count: int, entries: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + entries


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_reads_fields_and_tensors(version, alignment, tmp_path):
    metadata = {
        "text": "naïve 仮",
        "count": 7,
        "less": -3,
        "number": 0.5,
        "yes": True,
        "numbers": [1, 2, 3],
        "flags": [True, False],
        "words": ["a", "", "bc"],
        "none": [],
        "general.alignment": alignment,
    }
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16)}
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors, alignment=alignment, version=version)
    found = read_gguf(path)
    assert {
        name: given.tolist() if isinstance(given, np.ndarray) else given
        for name, given in found.metadata.items()
        if name != "words"
    } == {name: given for name, given in metadata.items() if name != "words"}
    words = found.metadata["words"]
    assert list(words) == ["a", "", "bc"] and words[-1] == "bc" and words[1:] == ["", "bc"]
    with pytest.raises(IndexError):
        words[3]
    assert {name: info.shape for name, info in found.tensors.items()} == {"b": (2, 3), "a": (5,)}
    for name, tensor in tensors.items():
        info = found.tensors[name]
        assert info.start % alignment == 0
        stored = found.content[info.start : info.start + info.num_bytes]
        assert stored == tensor.flatten().view(torch.uint8).numpy().tobytes()


def test_reads_what_the_package_gguf_writes(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("a", 65535)
    writer.add_int64("b", -(1 << 40))
    writer.add_float64("c", 1e300)
    writer.add_array("d", ["x", "yz"])
    writer.add_array("e", [1.5, 2.5])
    writer.add_tensor("t", np.arange(12, dtype=np.float32).reshape(1, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    assert [found.metadata[name] for name in "abc"] == [65535, -(1 << 40), 1e300]
    assert list(found.metadata["d"]) == ["x", "yz"] and found.metadata["e"].tolist() == [1.5, 2.5]
    assert found.tensors["t"].shape == (1, 3, 4)


def test_sizes_of_types_are_those_of_the_package_gguf():
    gguf = pytest.importorskip("gguf")
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    sizes[gguf.GGMLQuantizationType.Q8_1] = (32, 36)  # ggml made it smaller; no file has it
    assert {
        number: (storage.block_size, storage.block_bytes)
        for number, storage in STORAGE_TYPES.items()
    } == sizes
    for number, storage in STORAGE_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == storage.name


TENSOR = tensor_info("t", (4,), 0, 0)
ONE_FIELD = text("k") + value(1)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "is empty"),
        (b"GG", "begins with"),
        (b"PK\x03\x04 and more", "begins with"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of git-LFS"),
        (b"GGUF\x03", "ends within the version"),
        (header([], [], version=1), "version 1"),
        (header([], [], version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"claims {HUGE} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 10**9), "claims 1000000000 metadata fields"),
        (header([text("k") + value(1)] * 2, []), "field k occurs twice"),
        (header([text("k") + struct.pack("<I", 99) + bytes(8)], []), "the type 99"),
        (header([text("k") + struct.pack("<IB", BOOL, 2)], []), "boolean of value 2"),
        (header([text("k") + array(BOOL, 2, b"\0\7")], []), "boolean of value 7"),
        (header([text("k") + array(U32, 10**9, bytes(9))], []), "1000000000 entries of 4"),
        (header([text("k") + array(U32, HUGE, bytes(9))], []), f"{HUGE} entries of 4"),
        (header([text("k") + array(STRING, 10**9, bytes(9))], []), "1000000000 entries of 8"),
        (header([text("k") + array(STRING, 1, struct.pack("<Q", HUGE))], []), f"{HUGE} entries"),
        (header([text("k") + array(ARRAY, 1, bytes(99))], []), "an array of arrays"),
        (header([text("k") + array(13, 1, bytes(99))], []), "entries of type 13"),
        (header([text("k") + value(Raw(struct.pack("<IQ", STRING, 1 << 40)))], []), "entries of 1"),
        (header([text("k") + value(Raw(struct.pack("<I", STRING) + text(b"\xff")))], []), "UTF-8"),
        (header([text(b"\xc0\x80") + value(1)], []), "not UTF-8"),
        (header([text("general.alignment") + value(0)], []), "general.alignment is 0"),
        (header([text("general.alignment") + value(48)], []), "not a power of two"),
        (header([text("general.alignment") + value(1 << 30)], []), "not a power of two"),
        (header([text("general.alignment") + value("32")], []), "not a power of two"),
        (header([], [tensor_info("t", (), 0, 0)]) + bytes(99), "has 0 dimensions"),
        (header([], [tensor_info("t", (1,) * 5, 0, 0)]), "has 5 dimensions"),
        (header([], [tensor_info("t", (4, 0), 0, 0)]), "has no values"),
        (header([], [tensor_info("t", (4,), 4, 0)]), "of type Q4_2, which ggml no longer supports"),
        (header([], [tensor_info("t", (4,), 77, 0)]), "of type 77, which quire does not support"),
        (header([], [tensor_info("t", (31,), 2, 0)]), "blocks of 32"),
        (header([], [tensor_info("t", (1 << 62, 1 << 62), 0, 0)]), "would end at byte"),
        (header([], [tensor_info("t", (4,), 0, HUGE - 31)]), "would end at byte"),
        (header([], [tensor_info("t", (4,), 0, 8)]) + bytes(99), "is no multiple of 32"),
        (header([], [TENSOR, TENSOR]) + bytes(99), "tensor t occurs twice"),
        (
            header([], [TENSOR, tensor_info("u", (4,), 0, 0)]) + bytes(99),
            "begins within the tensor before it",
        ),
        (header([ONE_FIELD], [TENSOR]), "would end at byte"),
    ],
)
def test_every_broken_rule_is_named(content, reason, refused):
    assert reason in refused(content)


def test_a_file_cut_anywhere_is_refused(tmp_path, refused):
    path = write_gguf(
        tmp_path / "x.gguf",
        {"a": "b", "words": ["x", "y"], "numbers": [1.0, 2.0]},
        {"t": torch.ones(4, 8), "u": torch.ones(3)},
    )
    content = path.read_bytes()[: -32 + 12]  # without the padding behind the last tensor
    for end in range(len(content)):
        refused(content[:end])
    path.write_bytes(content)
    assert len(read_gguf(path).tensors) == 2


def test_too_many_of_anything_is_refused(refused):
    infos = [tensor_info(str(index), (1,), 0, 32 * index) for index in range(MAX_TENSORS + 1)]
    assert f"at most {MAX_TENSORS} are read" in refused(header([], infos))
    fields = [text(str(index)) + value(1) for index in range(MAX_FIELDS + 1)]
    assert f"at most {MAX_FIELDS} are read" in refused(header(fields, []))
    strings = [text("k") + array(STRING, (1 << 20) + 1, bytes(8 * ((1 << 20) + 1)))]
    assert "at most 1048576 are read" in refused(header(strings, []))


def test_strings_that_would_grow_in_memory_are_bounded(refused):
    long = text("k") + struct.pack("<I", STRING) + text("x" * ((4 << 20) + 1))
    assert "at most 4194304 are read" in refused(header([long], []))
    many = [text(str(i)) + struct.pack("<I", STRING) + text("x" * (4 << 20)) for i in range(9)]
    assert "more than 33554432 letters" in refused(header(many, []))


def test_a_header_is_kept_while_the_file_is_the_same(tmp_path):
    path = tmp_path / "x.gguf"
    for name in ("a", "b"):  # of one size
        write_gguf(tmp_path / name, {"name": name}, {}).replace(path)
        found = read_gguf(path)
        assert found.metadata["name"] == name and read_gguf(path) is found
    path.write_bytes(path.read_bytes()[:40])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="whole GGUF file"):
            read_gguf(path)


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="it is not a file"):
        read_gguf(tmp_path)
