"""Rounding to int4: every instruction set stores the bytes that `quantize_int4` says."""

import ctypes

import pytest
import torch
from tests.native_library import require_isa
from torch.nn import functional

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.quantize import Int4Rows, quantize_int4

UNIT = 16  # outputs that lie together


def _weights(n: int, k: int) -> torch.Tensor:
    """With groups of zeros, of one number, of one sign, and rows with numbers that are not finite
    or as large as they can be."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * 0.05
    w[0] = 0.0
    w[1 % n, : k // 2] = 0.25
    w[2 % n] = w[2 % n].abs()
    w[3 % n] = -w[3 % n].abs() - 1.0
    if n > 8:
        w[5, k // 3] = float("nan")
        w[6, k - 1] = float("-inf")
        w[7] *= 1e37
    return w


def _pack(
    kernels: NativeKernels, rows: torch.Tensor, group_size: int, interleave: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, scales) as they are stored, `step` rows in each call."""
    library, (n, k) = kernels.library, rows.shape
    struct = abi.Weights(WeightLayout.INT4, n, k, group_size=group_size, interleave=interleave)
    weights = torch.full((library.packed_bytes(struct),), 255, dtype=torch.uint8)
    scales = torch.full((library.num_scales(struct),), -1.0)
    struct.weights, struct.scales = weights.data_ptr(), scales.data_ptr()
    library.clear_padding(struct)
    isa = library.isas()[kernels.isa]
    for first in range(0, n, step):
        part = rows[first : first + step]
        library.pack_rows(
            *(isa, ctypes.byref(struct), part.data_ptr(), abi.DTYPES[rows.dtype]),
            *(part.stride(0), first, len(part)),
        )
    return weights, scales


def _stored(rows: Int4Rows, group_size: int) -> torch.Tensor:
    """The bytes of outputs that fill whole units, as linear_int4.h draws them."""
    n, num_groups = rows.scales.shape
    odd = num_groups % 2  # a group of zeros fills the last pair
    scales, offsets = (functional.pad(x, (0, odd)) for x in (rows.scales, rows.offsets))
    pairs = (n // UNIT, UNIT, (num_groups + odd) // 2, 2)
    levels = functional.pad(rows.levels, (0, 0, 0, odd)).view(*pairs, group_size // 8, 2, 4)
    scales = scales.view(pairs).permute(0, 2, 3, 1)
    offsets = offsets.view(pairs).permute(0, 2, 1, 3)
    nibbles = (levels[..., 0, :] | levels[..., 1, :] << 4).permute(0, 2, 3, 4, 1, 5)
    parts = [
        part.reshape(n // UNIT, (num_groups + odd) // 2, -1) for part in (scales, offsets, nibbles)
    ]
    return torch.cat(parts, -1).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "k", "group_size", "step"),
    [(32, 64, 32, 32), (64, 200, 32, 64), (64, 200, 64, 16), (32, 31, 32, 5), (96, 65, 64, 7)],
)
def test_bytes_are_those_of_the_reference(kernels, dtype, n, k, group_size, step):
    rows = _weights(n, k).to(dtype)
    weights, scales = _pack(kernels, rows, group_size, 0, step)
    expected = quantize_int4(rows, group_size)
    assert torch.equal(weights, _stored(expected, group_size))
    factors = torch.cat([expected.scale_factors, expected.offset_factors])
    found = scales.view(torch.bfloat16)
    torch.testing.assert_close(found, factors, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n", "k", "interleave"), [(1, 1, 0), (41, 100, 0), (86, 96, 43)])
def test_shapes_with_padding_are_stored_alike_whatever_the_pieces(kernels, n, k, interleave):
    rows = _weights(n, k)
    whole = _pack(kernels, rows, 32, interleave, n)
    require_isa(kernels.library, "portable")
    portable = NativeKernels(kernels.library, "portable", 1)
    for step in (1, 16, 40):
        for found, expected in zip(_pack(portable, rows, 32, interleave, step), whole, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
