"""Dense linears against fp64, bitwise against themselves, and what surrounds them: packing,
strides, epilogues, refusals."""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from tests.pairwise import pairwise
from torch.nn import functional

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import Epilogue, WeightLayout
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.options import NATIVE_KERNELS

FORMATS = {torch.float32: WeightLayout.DENSE_F32, torch.bfloat16: WeightLayout.DENSE_BF16}
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=str)
# M, N, K. Tiles have up to 14 rows, panels 32 outputs, steps 1 or 2 inputs, chunks 1,024 steps, and
# rows beyond 384 KiB make another group, which with AVX2 has at least six rows, however long.
SHAPES = [
    *((1, 1, 1), (2, 31, 7), (3, 32, 64), (7, 33, 129), (14, 80, 65), (15, 16, 768)),
    *((28, 96, 33), (29, 47, 1027), (64, 65, 96), (70, 40, 257), (5, 33, 2051), (110, 33, 2306)),
    (13, 3, 17_001),
]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        yield


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def packed(
    weight: torch.Tensor, bias: torch.Tensor | None = None, interleave: int = 0
) -> PackedLinear:
    num_outputs, num_inputs = weight.shape
    linear = PackedLinear(
        FORMATS[weight.dtype],
        num_outputs,
        num_inputs,
        interleave=interleave,
        has_bias=bias is not None,
        dtype=weight.dtype,
    )
    linear.pack(weight, 0)
    if bias is not None:
        linear.set_bias(bias)
    linear.finish()
    return linear


def assert_close_to_exact(
    sums: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """fp32 sums of K products and a bias, each added with a relative error of 2^-24 (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1; a product itself may be rounded once)."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    bound = (x.shape[1] + 2) * 2.0**-24 * (x.abs() @ weight.abs().T + bias.abs())
    assert ((sums.double() - (x @ weight.T + bias)).abs() <= bound).all()


@pairwise(kernels=NATIVE_KERNELS)
@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_product_is_within_the_bound_of_fp32_sums(
    kernels: NativeKernels, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    x, weight, bias = (normal(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))

    sums = apply(kernels, packed(weight, bias), x, out_dtype=torch.float32)

    assert_close_to_exact(sums, x, weight, bias)


def test_bf16_results_are_the_sums_rounded_once(kernels: NativeKernels) -> None:
    x, weight = normal(17, 130, dtype=torch.bfloat16), normal(45, 130, dtype=torch.bfloat16)
    linear = packed(weight)

    results = apply(kernels, linear, x)

    assert torch.equal(results, apply(kernels, linear, x, out_dtype=torch.float32).bfloat16())


@DTYPES
@pytest.mark.parametrize("k", [769, 2050])
def test_a_row_has_the_same_bits_in_every_batch(
    kernels: NativeKernels, dtype: torch.dtype, k: int
) -> None:
    linear = packed(normal(70, k, dtype=dtype), normal(70, dtype=dtype))
    x = normal(150, k, dtype=dtype)
    alone = torch.cat([apply(kernels, linear, row) for row in torch.split(x, 1)])

    for m in (*range(1, 65), 150):
        assert torch.equal(apply(kernels, linear, x[:m]), alone[:m])
        assert torch.equal(apply(kernels, linear, x[-m:]), alone[-m:])


@DTYPES
def test_number_of_threads_changes_no_bit(library: NativeLibrary, dtype: torch.dtype) -> None:
    linear, x = packed(normal(333, 300, dtype=dtype)), normal(9, 300, dtype=dtype)
    small = packed(normal(20, 300, dtype=dtype))
    alone = NativeKernels(library, num_threads=1)

    for num_threads in (2, 3, 5):
        several = NativeKernels(library, num_threads=num_threads)
        for each in (linear, small):
            assert torch.equal(apply(several, each, x), apply(alone, each, x))


def test_a_row_of_nans_stays_alone(kernels: NativeKernels) -> None:
    linear, x = packed(normal(40, 65, dtype=torch.bfloat16)), normal(20, 65, dtype=torch.bfloat16)
    clean = apply(kernels, linear, x)
    x[7] = torch.nan

    results = apply(kernels, linear, x)

    assert results[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(results[others], clean[others])


@DTYPES
@pytest.mark.parametrize("k", [96, 1024])  # 1,024: rows that would share sets of the cache
def test_rows_of_x_and_out_may_lie_apart(
    kernels: NativeKernels, dtype: torch.dtype, k: int
) -> None:
    linear = packed(normal(50, k, dtype=dtype))
    wide, out = normal(20, 2 * k, dtype=dtype), torch.full((20, 64), 7.0, dtype=dtype)

    apply(kernels, linear, wide[:, k:], out=out[:, 3:53])

    assert torch.equal(out[:, 3:53], apply(kernels, linear, wide[:, k:].contiguous()))
    assert (out[:, :3] == 7).all() and (out[:, 53:] == 7).all()


def test_columns_of_x_that_lie_apart_are_brought_together(kernels: NativeKernels) -> None:
    linear, x = packed(normal(50, 96, dtype=torch.float32)), normal(96, 20, dtype=torch.float32)

    assert torch.equal(apply(kernels, linear, x.T), apply(kernels, linear, x.T.contiguous()))


def test_no_rows_give_no_rows(kernels: NativeKernels) -> None:
    linear = packed(normal(50, 96, dtype=torch.float32))

    assert apply(kernels, linear, torch.empty(0, 96)).shape == (0, 50)


@DTYPES
def test_residual_is_added_to_the_rounded_result(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    linear = packed(normal(50, 96, dtype=dtype), normal(50, dtype=dtype))
    x, residual = normal(20, 96, dtype=dtype), normal(20, 50, dtype=dtype)
    expected = residual + apply(kernels, linear, x)

    apply(kernels, linear, x, out=residual, epilogue=Epilogue.ADD_RESIDUAL)

    assert torch.equal(residual, expected)


@DTYPES
@pytest.mark.parametrize("half", [1, 16, 37, 64])
def test_gate_and_up_are_multiplied(kernels: NativeKernels, dtype: torch.dtype, half: int) -> None:
    weight, bias = normal(2 * half, 33, dtype=dtype), normal(2 * half, dtype=dtype)
    x = normal(18, 33, dtype=dtype)
    linear, plain = packed(weight, bias, interleave=half), packed(weight, bias)

    together = apply(kernels, linear, x)
    results = apply(kernels, linear, x, epilogue=Epilogue.SILU_MUL)

    assert torch.equal(together, apply(kernels, plain, x))
    gate, up = torch.split(together, half, 1)
    # e^x has 2 ulp more than torch's, which may tip a rounding of silu and so one of the product.
    bits = 23 if dtype is torch.float32 else 8
    torch.testing.assert_close(results, functional.silu(gate) * up, rtol=8 * 2.0**-bits, atol=1e-7)


@DTYPES
def test_silu_of_far_ends(kernels: NativeKernels, dtype: torch.dtype) -> None:
    values = torch.tensor([-1e30, -200.0, -87.5, -1e-3, 0.0, 1e-3, 90.0, 1e30], dtype=dtype)
    linear = packed(torch.eye(2, dtype=dtype), interleave=1)  # gate is x[:, 0], up is x[:, 1]
    x = torch.stack([values, torch.ones_like(values)], 1)

    results = apply(kernels, linear, x, epilogue=Epilogue.SILU_MUL)[:, 0]

    torch.testing.assert_close(results, functional.silu(values), rtol=2.0**-7, atol=1e-37)


@DTYPES
@pytest.mark.parametrize(("n", "k", "interleave"), [(70, 33, 0), (33, 64, 0), (74, 33, 37)])
def test_rows_come_back_as_they_were_packed(
    library: NativeLibrary, dtype: torch.dtype, n: int, k: int, interleave: int
) -> None:
    weight = normal(n, k, dtype=dtype)
    linear = PackedLinear(FORMATS[dtype], n, k, interleave=interleave, dtype=dtype)
    for first in range(0, n, 9):
        linear.pack(weight[first : first + 9], first)
    outputs = torch.randint(n, (50,))

    assert torch.equal(linear.unpack(outputs), weight[outputs])
    assert torch.equal(linear.unpack(torch.arange(n)), weight)


def test_rows_of_another_dtype_are_converted(library: NativeLibrary) -> None:
    weight = normal(40, 33, dtype=torch.float32)
    weight[3, 5], weight[3, 6] = torch.inf, torch.nan
    narrow = PackedLinear(WeightLayout.DENSE_BF16, 40, 33)
    wide = PackedLinear(WeightLayout.DENSE_F32, 40, 33, dtype=torch.float32)

    narrow.pack(weight, 0)
    wide.pack(weight.bfloat16(), 0)

    everything, expected = torch.arange(40), weight.bfloat16()
    torch.testing.assert_close(narrow.unpack(everything), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        wide.unpack(everything), expected.float(), rtol=0, atol=0, equal_nan=True
    )


@DTYPES
@pytest.mark.parametrize(("n", "k", "interleave"), [(40, 33, 0), (42, 34, 21)])
def test_padding_is_cleared_whatever_was_there(
    kernels: NativeKernels, dtype: torch.dtype, n: int, k: int, interleave: int
) -> None:
    weight, x = normal(n, k, dtype=dtype), normal(3, k, dtype=dtype)
    struct = abi.Weights(FORMATS[dtype], n, k, interleave=interleave)
    memory = torch.full((kernels.library.packed_bytes(struct),), 255, dtype=torch.uint8)  # NaNs
    struct.weights = memory.data_ptr()
    kernels.library.clear_padding(struct)
    number = abi.DTYPES[dtype]
    isa = kernels.library.isas()[kernels.isa]
    kernels.library.pack_rows(isa, struct, weight.data_ptr(), number, k, 0, n)
    out = torch.empty(3, n, dtype=dtype)

    kernels.library.linear(
        *(kernels.context, ctypes.byref(struct), number, x.data_ptr(), k, 3),
        *(out.data_ptr(), number, n, Epilogue.STORE, None),
    )

    assert torch.equal(out, apply(kernels, packed(weight), x))
    assert not memory.view(dtype).isnan().any()


def test_a_wrong_x_is_named(kernels: NativeKernels) -> None:
    linear = packed(normal(8, 16, dtype=torch.bfloat16))
    bf16 = normal(2, 16, dtype=torch.bfloat16)

    for x in (bf16[:, :15], bf16[0], bf16.float(), bf16.half()):
        with pytest.raises(ValueError, match=r"x is .* but must be \[any, 16\] torch\.bfloat16"):
            apply(kernels, linear, x)


def test_a_wrong_out_is_named(kernels: NativeKernels) -> None:
    linear, x = packed(normal(8, 16, dtype=torch.float32)), normal(2, 16, dtype=torch.float32)

    with pytest.raises(ValueError, match="out is None"):
        apply(kernels, linear, x, epilogue=Epilogue.ADD_RESIDUAL)
    with pytest.raises(ValueError, match="does not interleave"):
        apply(kernels, linear, x, epilogue=Epilogue.SILU_MUL)
    for out in (torch.empty(2, 7), torch.empty(8, 2).T):
        with pytest.raises(ValueError, match=r"out is .*, but must be \(2, 8\)"):
            apply(kernels, linear, x, out=out)
    with pytest.raises(ValueError, match=r"out is torch\.bfloat16"):
        apply(kernels, linear, x, out=torch.empty(2, 8, dtype=torch.bfloat16))


def test_wrong_rows_are_named(library: NativeLibrary) -> None:
    linear = PackedLinear(WeightLayout.DENSE_BF16, 8, 16)

    with pytest.raises(ValueError, match=r"rows are \(2, 15\)"):
        linear.pack(torch.zeros(2, 15), 0)
    with pytest.raises(ValueError, match=r"outputs \[7, 9\)"):
        linear.pack(torch.zeros(2, 16), 7)
    with pytest.raises(ValueError, match=r"outputs are -1 to 3"):
        linear.unpack(torch.tensor([3, -1]))
    with pytest.raises(ValueError, match=r"outputs are 8 to 8"):
        linear.unpack(torch.tensor([8]))
    with pytest.raises(ValueError, match="bias is"):
        linear.set_bias(torch.zeros(8))
    with pytest.raises(ValueError, match="interleave is 3"):
        PackedLinear(WeightLayout.DENSE_BF16, 8, 16, interleave=3)


def test_sums_that_could_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="num_inputs is 65537, but sums of more than 65536"):
        PackedLinear(WeightLayout.INT8, 16, 65_537)
