"""Linears of fp8 weights against fp64, bitwise against themselves; packing, NaNs and refusals."""

from collections.abc import Iterator

import pytest
import torch
from tests.pairwise import pairwise

from quire.kernels.cpu.abi import Epilogue, WeightLayout
from quire.kernels.cpu.block_quantized.quantized_linear import GivenLinear
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.options import NATIVE_KERNELS

FLOAT8 = WeightLayout.FLOAT8
# Outputs, inputs, and inputs that share a scale; 0: all.
SHAPES = [(70, 512, 128), (70, 1028, 0), (33, 300, 100), (31, 12, 4), (96, 1536, 384)]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        yield


def random_codes(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """All codes but those of NaN, each as likely as any other."""
    codes = torch.randint(0, 254, (num_outputs, num_inputs), dtype=torch.uint8)
    return codes + (codes >= 0x7F)


def make(
    n: int, k: int, group: int, dtype: torch.dtype, interleave: int = 0
) -> tuple[GivenLinear, torch.Tensor]:
    """A linear, and its weight [n, k] in fp32."""
    codes, num_groups = random_codes(n, k), -(-k // (group or k))
    scales = torch.rand(n, num_groups) * 0.01 + 0.001
    linear = GivenLinear(FLOAT8, n, k, group_size=group, interleave=interleave, dtype=dtype)
    for first in (17, 0):
        rows = slice(first, 17 if first == 0 else n)
        linear.pack_float8(codes[rows], scales[rows], first)
    grown = scales.repeat_interleave(group or k, 1)[:, :k]
    return linear, codes.view(torch.float8_e4m3fn).float() * grown


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_fp32_sums_in_every_batch(
    kernels: NativeKernels, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    linear, weight = make(*shape, dtype)
    x = torch.randn(61, shape[1]).to(dtype)

    sums = apply(kernels, linear, x, out_dtype=torch.float32)

    bound = (shape[1] + 2) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    assert ((sums.double() - x.double() @ weight.double().T).abs() <= bound).all()
    alone = torch.cat([apply(kernels, linear, row, out_dtype=torch.float32) for row in x.split(1)])
    for m in (*range(2, 16), 24, 29, 61):
        assert torch.equal(apply(kernels, linear, x[:m], out_dtype=torch.float32), alone[:m])
        assert torch.equal(apply(kernels, linear, x[-m:], out_dtype=torch.float32), alone[-m:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_up_are_multiplied(kernels: NativeKernels, dtype: torch.dtype) -> None:
    linear, weight = make(46, 64, 32, dtype, interleave=23)
    x = (torch.randn(5, 64) * 0.1).to(dtype)
    gate, up = (x.float() @ weight.T).to(dtype).float().chunk(2, dim=1)

    found = apply(kernels, linear, x, epilogue=Epilogue.SILU_MUL)

    expected = torch.nn.functional.silu(gate).to(dtype).float() * up
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_is_unpacked_and_multiplied(kernels: NativeKernels, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 4)
    codes[:, :2] = codes[:, 3:] = 0
    linear = GivenLinear(FLOAT8, 256, 4, dtype=dtype)
    linear.pack_float8(codes, torch.full((256, 1), 0.5), 0)
    expected = codes[:, 2].view(torch.float8_e4m3fn).float() * 0.5
    x = torch.tensor([[7.0, 7.0, 1.0, 7.0]], dtype=dtype)
    for found in (
        linear.unpack(torch.arange(256))[:, 2].float(),
        apply(kernels, linear, x, out_dtype=torch.float32)[0],
        apply(kernels, linear, x.repeat(20, 1), out_dtype=torch.float32)[19],
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().sum() == 2


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="num_inputs is 6 and group_size 0, but FLOAT8 needs mult"):
        GivenLinear(FLOAT8, 4, 6)
    with pytest.raises(ValueError, match="group_size 6, but FLOAT8 needs mult"):
        GivenLinear(FLOAT8, 4, 12, group_size=6)
    linear = GivenLinear(FLOAT8, 4, 12, group_size=8)
    codes, scales = torch.zeros(4, 12, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="FLOAT8 takes only codes"):
        linear.pack(torch.zeros(4, 12), 0)
    with pytest.raises(ValueError, match="scales are"):
        linear.pack_float8(codes, scales[:, :1], 0)
    with pytest.raises(ValueError, match="codes are"):
        linear.pack_float8(codes.view(torch.int8), scales, 0)
    with pytest.raises(ValueError, match="not all within"):
        linear.pack_float8(codes, scales, 1)
    with pytest.raises(ValueError, match="the format is INT8"):
        GivenLinear(WeightLayout.INT8, 4, 12).pack_float8(codes, scales, 0)
    with pytest.raises(ValueError, match="only dense rows can be unpacked"):
        PackedLinear(FLOAT8, 4, 12).unpack(torch.arange(4))
