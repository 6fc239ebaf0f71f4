"""Block formats of every kind, and random rows in them."""

import torch

from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

BLOCK_FORMATS = {
    "flat, a zero": BlockFormat("Q4_0", 4, 32, zero=8),
    "flat, offsets": BlockFormat("Q4_1", 4, 32, has_offsets=True),
    "flat, zeros, 128": BlockFormat("AWQ", 4, 128, has_zeros=True),
    "flat, zeros, bf16": BlockFormat("W4A16", 4, 64, has_zeros=True, scale_dtype=torch.bfloat16),
    "a table": BlockFormat("MXFP4", 4, 32, table=E2M1_TWICE, scale_dtype=torch.bfloat16),
    "blocks, offsets": BlockFormat("Q4_K", 4, 32, has_offsets=True, block_size=256),
    "blocks, a table": BlockFormat("IQ4_XS", 4, 32, table=E2M1_TWICE, block_size=256),
    "bytes": BlockFormat("Q8_0", 8, 32, zero=128),
    "bytes, blocks": BlockFormat("Q6_K", 6, 16, zero=32, block_size=256),
    "bytes, blocks, offsets": BlockFormat("Q5_K", 5, 32, has_offsets=True, block_size=256),
}
NVFP4 = BlockFormat("NVFP4", 4, 16, table=E2M1_TWICE, scale_dtype=torch.float8_e4m3fn)
INT8 = BlockFormat("W8A8", 8, 0, zero=128, scale_dtype=torch.float32)
FP8 = BlockFormat("fp8", 8, 128, is_float8=True, scale_dtype=torch.float32)


def random_codes(block_format: BlockFormat, rows: int, inputs: int, seed: int = 0) -> UnpackedRows:
    """Rows whose numbers are about as large as a model's."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * 0.01 + 0.001

    groups = inputs // (block_format.group_size or inputs)
    codes = integers(0, 2**block_format.width, rows, inputs).byte()
    zeros = integers(0, 16, rows, groups).byte() if block_format.has_zeros else None
    if block_format.has_output_factors:
        scales = (floats(rows, groups) * 2 ** integers(-6, 14, rows, groups)).to(
            block_format.scale_dtype
        )
        return UnpackedRows(block_format, codes, scales, factors=floats(rows, 1, 1))
    if not block_format.block_size:
        scales = floats(rows, groups).to(block_format.scale_dtype)
        offsets = (
            (floats(rows, groups) * 8).to(block_format.scale_dtype)
            if block_format.has_offsets
            else None
        )
        return UnpackedRows(block_format, codes, scales, zeros, offsets)
    low = 0 if block_format.has_offsets else -32
    scales = integers(low, 64 if block_format.has_offsets else 32, rows, groups).to(torch.int8)
    offsets = integers(0, 64, rows, groups).byte() if block_format.has_offsets else None
    factors = (floats(rows, inputs // block_format.block_size, 2) * 0.05).half()
    return UnpackedRows(block_format, codes, scales, zeros, offsets, factors)
