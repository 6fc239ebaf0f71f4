"""Codes of quantized K and V, over all values: rounded and written as torch does it."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quire.attention.kv_format import rotate_vectors
from quire.attention.quantized_kv import FP8, INT8
from quire.kernels.triton.attention.quantized_kv import (
    CODE_DTYPES,
    KVPages,
    check_scales,
    nearest_e4m3,
)
from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write

FORMATS = (INT8, FP8)


@triton.jit
def _nearest(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + at, nearest_e4m3(tl.load(x_ptr + at)))


def test_e4m3_is_rounded_to_nearest_even_over_all_steps():
    """Every upper half of an fp32 number, alone and with a lower half that is at, below or above:
    all ties and their neighbours, subnormal results, zeros of both signs; above 448 it saturates.
    """
    high = torch.arange(0, 2**15) << 16
    bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = bits.to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    x = torch.cat([x, -x])
    width = 4096
    padded = torch.cat([x, x.new_zeros(-len(x) % width)])
    out = torch.empty(len(padded), dtype=torch.uint8)
    _nearest[(len(padded) // width,)](padded, out, N=width)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out[: len(x)], expected)


@pytest.mark.parametrize("codes", FORMATS)
def test_a_quantized_vector_is_within_its_error_bound(codes):
    """int8: half a step of max / 127, and what rounding the scale moves. e4m3: 2^-4 of each number,
    or half of its smallest step."""
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-12, 12, 1000)[:, None]
    found, scales = codes.values.encode(x)
    left = found.double() * scales.double()[:, None]
    top = x.double().abs().amax(1, keepdim=True)
    bound = 0.5 * 1.004 / 127 * top
    if codes is FP8:
        bound = torch.maximum(x.double().abs() / 16, top / 448 * 2**-10 * 1.004) * 1.001
    assert ((left - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", FORMATS)
def test_the_bits_of_the_reference_are_written(codes, dtype):
    """Zeros, infinities, NaN and padding among the vectors. Of int8, q and k are rotated."""
    generator = torch.Generator().manual_seed(1)
    num_blocks, size, num_tokens, heads = 4, 8, 6, (4, 3)
    q = torch.randn(num_tokens, heads[0], 40, generator=generator).to(dtype)
    k, v = torch.randn(2, num_tokens, heads[1], 40, generator=generator).to(dtype)
    k[0] *= 300
    v[0] *= 1e-3
    k[1, 0], k[2, 1, 3], v[3, 0, 39], v[4, 2, 20] = 0, torch.nan, torch.inf, -torch.inf
    pages = torch.full((num_blocks, 2, heads[1], size, 40), 77, dtype=CODE_DTYPES[codes.name])
    scales = torch.full((num_blocks, heads[1], size), 77, dtype=torch.int32)
    expected, expected_scales = pages.clone(), scales.clone()
    slots = torch.tensor([3, 9, 17, 30, 8, -1])
    stored_k = rotate_vectors(k) if codes.rotates_keys else k
    q_before = q.clone()
    rotate_and_write(q, k, v, None, KVPages(pages, scales, codes.rotates_keys), slots)
    pairs = expected_scales.view(torch.bfloat16).unflatten(-1, (-1, 2))
    for token, slot in enumerate(slots.tolist()[:-1]):
        for half, x in enumerate((stored_k, v)):
            of_token, scale = codes.values.encode(x[token])
            expected[slot // size, half, :, slot % size] = of_token.view(pages.dtype)
            pairs[slot // size, :, slot % size, half] = scale
    assert torch.equal(pages, expected)
    expected_q = rotate_vectors(q_before).to(dtype) if codes.rotates_keys else q_before
    assert torch.equal(q, expected_q)
    assert torch.equal(
        scales.view(torch.bfloat16).nan_to_num(-1),
        expected_scales.view(torch.bfloat16).nan_to_num(-1),
    )
    assert scales.view(torch.bfloat16).isnan().sum() == 3


def test_codes_without_scales_and_scales_without_codes_are_refused():
    pages, scales = torch.zeros(2, 2, 3, 8, 16, dtype=torch.int8), torch.zeros(2, 3, 8).int()
    check_scales(pages, scales)
    check_scales(pages.bfloat16(), None)
    with pytest.raises(ValueError, match=r"pages of torch.int8 came with scales: none"):
        check_scales(pages, None)
    with pytest.raises(ValueError, match=r"pages of torch.float32 came with scales: some"):
        check_scales(pages.float(), scales)
    with pytest.raises(ValueError, match=r"must be \(2, 3, 8\) torch.int32"):
        check_scales(pages, scales.float())
