"""Numbers of all of ggml's types are those that the package gguf makes of the same bytes."""

import numpy as np
import pytest
import torch

from quire.errors import CheckpointError
from quire.hub.gguf.storage_types import STORAGE_TYPES
from quire.models.checkpoints.gguf.decoding import (
    BLOCK_QUANTIZED_TYPES,
    DECODERS,
    BlockRows,
    block_format_of,
    numbers,
)

BY_NAME = {storage.name: (number, storage) for number, storage in STORAGE_TYPES.items()}
INTERMEDIATE = {"Q8_1", "Q8_K"}
WITHOUT_ORACLE = {"Q1_0", "F64", "I8", "I16", "I32", "I64"}


def random_blocks(name: str, num_rows: int = 40, blocks: int = 5) -> torch.Tensor:
    """Any bytes, so that scales are infinite, NaN, subnormal and negative, too."""
    _, storage = BY_NAME[name]
    rng = np.random.default_rng(len(name) * 1000 + storage.block_bytes)
    raw = rng.integers(0, 256, (num_rows, blocks * storage.block_bytes), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    return torch.from_numpy(raw)


def bits(values: torch.Tensor) -> torch.Tensor:
    """NaNs aside, which may have any."""
    return values.nan_to_num(nan=7.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


@pytest.mark.parametrize("name", sorted({*BLOCK_QUANTIZED_TYPES, *DECODERS} - WITHOUT_ORACLE))
def test_equal_to_the_bit(name):
    quants = pytest.importorskip("gguf").quants
    number, storage = BY_NAME[name]
    raw = random_blocks(name)
    found = numbers(storage, raw).numpy()
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw.numpy(), quants.GGMLQuantizationType(number))
    expected = expected.astype(np.float32)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])
    assert not is_nan.all()


def test_every_type_is_read_but_those_of_intermediate_results():
    assert {*BLOCK_QUANTIZED_TYPES, *DECODERS} == BY_NAME.keys() - INTERMEDIATE
    for name in INTERMEDIATE:
        with pytest.raises(CheckpointError, match=f"of type {name} can't be read"):
            numbers(BY_NAME[name][1], random_blocks(name))


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int16, np.int32, np.int64])
def test_plain_numbers(dtype):
    name = f"{np.dtype(dtype).kind}{8 * np.dtype(dtype).itemsize}".upper()
    given = np.arange(-3, 5, dtype=dtype).reshape(2, 4)
    found = numbers(BY_NAME[name][1], torch.from_numpy(given.view(np.uint8)))
    assert torch.equal(found, torch.from_numpy(given.astype(np.float32)))


def test_signs_of_q1_0():
    block = np.float16(0.5).tobytes()
    raw = torch.frombuffer(bytearray(block + b"\x05" + bytes(15)), dtype=torch.uint8)[None]
    found = numbers(BY_NAME["Q1_0"][1], raw)[0]
    assert found[:4].tolist() == [0.5, -0.5, 0.5, -0.5] and (found[4:] == -0.5).all()


@pytest.mark.parametrize("name", sorted(BLOCK_QUANTIZED_TYPES))
def test_rows_of_blocks_are_rows_of_codes(name):
    _, storage = BY_NAME[name]
    raw = random_blocks(name, num_rows=7, blocks=3)
    rows = BlockRows(storage, raw)
    block_format = block_format_of(storage)
    assert rows.block_format == block_format and rows.shape == (7, 3 * storage.block_size)
    assert rows.stored == (raw,)
    codes = rows.unpacked()
    assert codes.codes.shape == rows.shape and codes.codes.dtype == torch.uint8
    groups = rows.shape[1] // block_format.group_size
    assert codes.scales.shape == (7, groups)
    assert int(codes.codes.max()) < 1 << block_format.width
    if block_format.block_size:
        assert codes.scales.dtype == torch.int8 and codes.factors.shape == (7, 3, 2)
        assert codes.factors.dtype == torch.float16
    else:
        assert codes.scales.dtype == block_format.scale_dtype and codes.factors is None
    assert (codes.offsets is not None) == block_format.has_offsets
    if codes.offsets is not None:
        assert codes.offsets.shape == (7, groups)
        assert codes.offsets.dtype == (
            torch.uint8 if block_format.block_size else block_format.scale_dtype
        )


@pytest.mark.parametrize("name", sorted(BLOCK_QUANTIZED_TYPES))
def test_selected_rows_decode_like_the_whole_tensor(name):
    _, storage = BY_NAME[name]
    rows = BlockRows(storage, random_blocks(name, num_rows=9, blocks=2))
    whole = bits(rows.numbers())
    assert torch.equal(bits(rows.rows(3, 6).numbers()), whole[3:6])
    order = torch.tensor([8, 0, 3, 3])
    assert torch.equal(bits(rows.picked(order).numbers()), whole[order])
    size = storage.block_size
    assert torch.equal(bits(rows.columns(size, 2 * size).numbers()), whole[:, size:])
    assert torch.equal(bits(rows.unpacked().numbers()), whole)


def test_many_rows_are_decoded_in_pieces():
    for name in ("Q4_K", "IQ2_S"):
        _, storage = BY_NAME[name]
        raw = random_blocks(name, num_rows=3, blocks=4).repeat(200, 1)
        found = bits(numbers(storage, raw))
        assert torch.equal(found, found[:3].repeat(200, 1))


def test_types_that_must_be_dequantized_have_no_block_format():
    assert block_format_of(BY_NAME["F16"][1]) is None
    assert block_format_of(BY_NAME["IQ2_S"][1]) is None
