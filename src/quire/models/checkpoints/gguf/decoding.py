"""Converts the bytes of a GGUF tensor to codes or to fp32 values.

The values equal those of llama.cpp's package gguf bit for bit, except for the sign and payload of
NaNs. Called by `gguf_files`.

Shapes: R rows, I inputs, B blocks in a row.
"""

from dataclasses import replace

import numpy as np
import torch

from quire.errors import CheckpointError
from quire.formats.block_quantized.weights import (
    BlockFormat,
    BlockQuantizedRows,
    InputOrder,
    UnpackedRows,
)
from quire.hub.gguf.storage_types import StorageType
from quire.models.checkpoints.gguf.blocks import Array, BlockQuantizedType
from quire.models.checkpoints.gguf.k_types import K_TYPES
from quire.models.checkpoints.gguf.lattice_types import BLOCK_QUANTIZED_LATTICE_TYPES, LATTICE_TYPES
from quire.models.checkpoints.gguf.legacy_types import LEGACY_TYPES
from quire.models.checkpoints.gguf.other_types import OTHER_TYPES

BLOCK_QUANTIZED_TYPES: dict[str, BlockQuantizedType] = (
    LEGACY_TYPES | K_TYPES | BLOCK_QUANTIZED_LATTICE_TYPES
)
DECODERS = LATTICE_TYPES | OTHER_TYPES
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_DECODED_NUMBERS = 1 << 17
"""Number of values decoded at a time, so that intermediate results fit a processor's cache."""


def plain_dtype(storage: StorageType) -> torch.dtype | None:
    """The dtype of an unquantized type; None if rows of the type must be decoded."""
    return _DTYPES.get(storage.name)


def block_format_of(storage: StorageType, inputs: torch.Tensor | None = None) -> BlockFormat | None:
    """The block format of the type's rows; None if rows of the type can't be kept as codes.
    `inputs` is `BlockRows.inputs`."""
    quantized = BLOCK_QUANTIZED_TYPES.get(storage.name)
    if quantized is None or inputs is None:
        return None if quantized is None else quantized.block_format
    return replace(quantized.block_format, input_order=InputOrder.of(inputs))


def numbers(storage: StorageType, raw: torch.Tensor) -> torch.Tensor:
    """Decode `raw` [R, bytes] uint8 to [R, I] fp32. Raises CheckpointError for types that llama.cpp
    uses only for intermediate results."""
    if storage.name in BLOCK_QUANTIZED_TYPES:
        return BlockRows(storage, raw).numbers()
    if storage.name not in DECODERS:
        raise CheckpointError(
            f"numbers of type {storage.name} can't be read; take the model in another quantization"
        )
    decode = DECODERS[storage.name]
    blocks = raw.numpy().reshape(-1, storage.block_bytes)
    found = np.empty((len(blocks), storage.block_size), np.float32)
    step = _DECODED_NUMBERS // storage.block_size
    with np.errstate(all="ignore"):  # the file may hold infinities
        for start in range(0, len(blocks), step):
            found[start : start + step] = decode(blocks[start : start + step])
    return torch.from_numpy(found).view(len(raw), -1)


class BlockRows(BlockQuantizedRows):
    """Quantized rows, as the bytes of the file."""

    def __init__(
        self, storage: StorageType, raw: torch.Tensor, inputs: torch.Tensor | None = None
    ) -> None:
        """`storage` is a type for which `block_format_of` returns a block format."""
        self.storage = storage
        #: [R, bytes] uint8, with the blocks of a row side by side.
        self.raw = raw
        #: The index of the input of each column; None if columns are in order.
        self.inputs = inputs

    @property
    def block_format(self) -> BlockFormat:
        block_format = block_format_of(self.storage, self.inputs)
        assert block_format is not None
        return block_format

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_bytes = self.raw.shape
        return num_rows, num_bytes // self.storage.block_bytes * self.storage.block_size

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return (self.raw,)

    @property
    def blocks(self) -> tuple[str, torch.Tensor]:
        return self.storage.name, self.raw

    def unpacked(self) -> UnpackedRows:
        blocks = self.raw.numpy().reshape(-1, self.storage.block_bytes)
        with np.errstate(all="ignore"):  # the file may hold infinities
            parts = BLOCK_QUANTIZED_TYPES[self.storage.name].unpack(blocks)
        factors = None
        if parts.factors is not None:
            factors = torch.from_numpy(parts.factors).view(len(self.raw), -1, 2)
        scales = self._rows_of(parts.scales)
        return UnpackedRows(
            self.block_format,
            self._rows_of(parts.codes),
            scales.view(torch.bfloat16) if scales.dtype == torch.int16 else scales,
            None,
            None if parts.offsets is None else self._rows_of(parts.offsets),
            factors,
        )

    def numbers(self) -> torch.Tensor:
        num_rows, num_inputs = self.shape
        found = torch.empty(num_rows, num_inputs)
        step = max(1, _DECODED_NUMBERS // num_inputs)
        for start in range(0, num_rows, step):
            some = self.rows(start, start + step)
            found[start : start + step] = some.unpacked().numbers()
        return found

    def _rows_of(self, values: Array) -> torch.Tensor:
        """The values of blocks [R * B, C], arranged by rows: [R, B * C]."""
        return torch.from_numpy(np.ascontiguousarray(values)).view(len(self.raw), -1)

    def rows(self, start: int, stop: int) -> "BlockRows":
        return BlockRows(self.storage, self.raw[start:stop], self.inputs)

    def picked(self, rows: torch.Tensor) -> "BlockRows":
        return BlockRows(self.storage, self.raw[rows], self.inputs)
