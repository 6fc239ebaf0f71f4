"""What stands between the linears, against torch and bitwise against itself.

Products and sums are rounded one by one, as torch does, so scales and copies are equal to the bit.
The means of norms are summed in another order than torch's: relative error 1e-6 in the scale, which
in bf16 moves few results by one unit in the last place. So do the last bits of exponentials.
"""

import pytest
import torch
from tests.kernels.cpu import elementwise
from tests.pairwise import pairwise

from quire.kernels import activations
from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.layer_norm import layer_norm
from quire.kernels.options import NATIVE_KERNELS
from quire.kernels.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16]
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 768, 1027])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_rms_norm(kernels: NativeKernels, dtype: torch.dtype, size: int, num_rows: int) -> None:
    x = random(num_rows, size + 3, dtype=dtype)[:, :size] * 5  # rows lie apart
    weight = random(size, dtype=dtype, seed=1) + 1
    wide = x.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    ours = elementwise.rms_norm(kernels, x, weight, 1e-5)
    torch.testing.assert_close(ours.double(), exact, rtol=ULP[dtype], atol=1e-6)
    differs = ours != rms_norm(x, weight, 1e-5)
    if dtype is torch.bfloat16:
        assert differs.float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_row_is_the_same_in_any_company(
    library: NativeLibrary, kernels: NativeKernels, dtype: torch.dtype
) -> None:
    x, weight = random(70, 500, dtype=dtype), random(500, dtype=dtype, seed=1)
    crowd = elementwise.rms_norm(kernels, x, weight, 1e-6)
    for threads in (1, 5):
        other = NativeKernels(library, kernels.isa, threads)
        assert torch.equal(elementwise.rms_norm(other, x, weight, 1e-6), crowd)
    for row in (0, 33, 69):
        alone = elementwise.rms_norm(kernels, x[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], crowd[row])


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 17), (3, 100), (40, 1027)])
def test_rms_norm_with_an_offset(
    kernels: NativeKernels, dtype: torch.dtype, offset: float, num_rows: int, size: int
) -> None:
    x = random(num_rows, size + 3, dtype=dtype)[:, :size] * 5
    weight = random(size, dtype=dtype, seed=1)
    ours = elementwise.rms_norm(kernels, x, weight, 1e-5, offset)
    expected = rms_norm(x, weight, 1e-5, offset)
    torch.testing.assert_close(ours, expected, rtol=ULP[dtype], atol=1e-6)
    if dtype is torch.bfloat16:
        assert (ours != expected).float().mean() < 0.01
    for row in range(0, num_rows, 13):
        alone = elementwise.rms_norm(kernels, x[row : row + 1], weight, 1e-5, offset)
        assert torch.equal(alone[0], ours[row])


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 100), (40, 1027)])
def test_scale_is_torchs_to_the_bit(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    x = random(num_rows, size + 3, dtype=dtype)[:, :size]
    assert torch.equal(elementwise.scale(kernels, x, 0.22), x * 0.22)
    residual = random(num_rows, size + 5, dtype=dtype, seed=1)[:, :size]
    expected = residual + x * 0.22
    assert elementwise.scale(kernels, x, 0.22, residual) is residual
    assert torch.equal(residual, expected)


def heads_of(num_rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[num_rows, 3, size], heads and rows that lie apart."""
    return random(num_rows, 3, size + 4, dtype=dtype, seed=seed)[..., 2 : size + 2]


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 100), (40, 129)])
def test_heads_are_rows_of_their_own(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    x, other = heads_of(num_rows, size, dtype), heads_of(num_rows, size, dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    flat = x.reshape(-1, size)

    def same(ours: torch.Tensor, of_rows: torch.Tensor) -> None:
        assert torch.equal(ours, of_rows.view(x.shape))

    for given in (None, weight):
        for offset in (None, 1.0):
            of_rows = elementwise.rms_norm(kernels, flat, given, 1e-5, offset)
            same(elementwise.rms_norm(kernels, x, given, 1e-5, offset), of_rows)
    of_rows = elementwise.layer_norm(kernels, flat, weight, None, 1e-5)
    same(elementwise.layer_norm(kernels, x, weight, None, 1e-5), of_rows)
    assert torch.equal(elementwise.scale(kernels, x, 0.3, other.clone()), other + x * 0.3)
    sigmoid = ActivationFunction.SIGMOID
    of_rows = elementwise.gate(kernels, flat, other.reshape(-1, size), sigmoid)
    same(elementwise.gate(kernels, x, other, sigmoid), of_rows)
    same(elementwise.activate(kernels, x, sigmoid), elementwise.activate(kernels, flat, sigmoid))


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 1.0])
def test_rms_norm_without_a_weight(
    kernels: NativeKernels, dtype: torch.dtype, offset: float | None
) -> None:
    x = random(7, 83, dtype=dtype) * 3
    ours, expected = elementwise.rms_norm(kernels, x, None, 1e-5), rms_norm(x, None, 1e-5, offset)
    torch.testing.assert_close(ours, expected, rtol=ULP[dtype], atol=1e-6)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [3, 15, 64, 100, 768, 1027])
def test_layer_norm(kernels: NativeKernels, dtype: torch.dtype, has_bias: bool, size: int) -> None:
    x = random(9, size + 3, dtype=dtype)[:, :size] * 5 + 2
    weight, bias = random(size, dtype=dtype, seed=1) + 1, random(size, dtype=dtype, seed=2)
    given = bias if has_bias else None
    ours = elementwise.layer_norm(kernels, x, weight, given, 1e-5)
    expected = layer_norm(x, weight, given, 1e-5)
    torch.testing.assert_close(ours, expected, rtol=ULP[dtype], atol=4e-6)
    if dtype is torch.bfloat16:
        assert (ours != expected).float().mean() < 0.01
    for row in (0, 8):
        alone = elementwise.layer_norm(kernels, x[row : row + 1], weight, given, 1e-5)
        assert torch.equal(alone[0], ours[row])


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 2.0) -> None:
    """Within the last bits of an exponential, and in bf16 seldom another number at all, but near
    zero: torch's gelu adds numbers there that all but cancel. tolerance: in units in the last
    place."""
    dtype = expected.dtype
    torch.testing.assert_close(ours, expected, rtol=tolerance * ULP[dtype], atol=1e-6 * tolerance)
    if dtype is torch.bfloat16:
        is_other = (ours != expected) & (expected.abs() > 1e-2)
        assert int(is_other.sum()) <= 0.01 * expected.numel() + 1


FUNCTIONS = list(ActivationFunction)
GATINGS = [
    *map(Gating, ActivationFunction),
    Gating(limit=7.0, alpha=1.702, up_offset=1.0),
    Gating(ActivationFunction.GELU, limit=1.3),
    Gating(up_offset=-0.25),
]
FAR = [-torch.inf, -300.0, -20.0, -6.0, -0.0, 0.0, 1e-30, 0.9277, 6.0, 20.0, 300.0, torch.nan]


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.value)
def test_activate(kernels: NativeKernels, dtype: torch.dtype, function: ActivationFunction) -> None:
    for num_rows, size in ((1, 1), (3, 100), (40, 1027)):
        x = random(num_rows, size + 3, dtype=dtype)[:, :size] * 4
        ours = elementwise.activate(kernels, x, function)
        assert_near(ours, activations.activate(x, function))
        for row in range(0, num_rows, 13):
            alone = elementwise.activate(kernels, x[row : row + 1], function)
            assert torch.equal(alone[0], ours[row])
    far = torch.tensor([FAR[1:]], dtype=dtype)
    ours, expected = (
        elementwise.activate(kernels, far, function),
        activations.activate(far, function),
    )
    torch.testing.assert_close(ours, expected, rtol=2 * ULP[dtype], atol=1e-6, equal_nan=True)


def test_gelu_is_exact_to_single_precision(kernels: NativeKernels) -> None:
    x = torch.linspace(-6, 6, 20_001)[None]
    exact = torch.nn.functional.gelu(x.double())
    error = (elementwise.activate(kernels, x, ActivationFunction.GELU) - exact).abs()
    assert float((error / (x.abs() + 1e-3)).max()) < 2.0**-23


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gating", GATINGS, ids=str)
def test_gated(kernels: NativeKernels, dtype: torch.dtype, gating: Gating) -> None:
    for num_rows, size in ((1, 1), (3, 100), (40, 1027)):
        gate_up = random(num_rows, 2 * size + 3, dtype=dtype)[:, : 2 * size] * 4
        ours = elementwise.gated(kernels, gate_up, gating)
        expected = activations.gated(gate_up, gating)
        assert_near(ours, expected, 16.0)  # torch's GELU of fp32 is 1e-6 from the exact one
        for row in range(0, num_rows, 13):
            alone = elementwise.gated(kernels, gate_up[row : row + 1], gating)
            assert torch.equal(alone[0], ours[row])


def test_gelu_gates_far_numbers(kernels: NativeKernels) -> None:
    far = torch.tensor([[-300.0, 300.0, 0.0, 2.0, 2.0, 2.0]])
    for function in (ActivationFunction.GELU, ActivationFunction.GELU_TANH):
        assert elementwise.gated(kernels, far, Gating(function)).tolist() == [[0.0, 600.0, 0.0]]


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.value)
def test_gate(
    kernels: NativeKernels, dtype: torch.dtype, function: ActivationFunction, by_rows: bool
) -> None:
    for num_rows, size in ((1, 1), (3, 100), (40, 1027)):
        x = random(num_rows, size + 3, dtype=dtype)[:, :size]
        by = random(num_rows, size + 5, dtype=dtype, seed=1)[:, 2 : 3 if by_rows else size + 2]
        ours = elementwise.gate(kernels, x, by, function)
        assert_near(ours, activations.gate(x, by, function))
        alone = elementwise.gate(kernels, x[-1:], by[-1:], function)
        assert torch.equal(alone[0], ours[-1])


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [1.5, 30.0, 50.0])
def test_soft_cap(kernels: NativeKernels, dtype: torch.dtype, cap: float) -> None:
    x = random(13, 1027 + 3, dtype=dtype)[:, :1027] * cap
    ours = elementwise.soft_cap(kernels, x, cap)
    assert_near(ours, activations.soft_cap(x, cap))
    assert torch.equal(elementwise.soft_cap(kernels, x[5:6], cap)[0], ours[5])
    small = random(3, 50, dtype=dtype) * 1e-4
    assert_near(elementwise.soft_cap(kernels, small, cap), activations.soft_cap(small, cap))


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_long_rows_are_computed_in_pieces(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int
) -> None:
    size = 5 * 8192 + 37
    x = random(num_rows, size + 3, dtype=dtype)[:, :size] * 4
    residual = random(num_rows, size, dtype=dtype, seed=1)
    assert torch.equal(elementwise.scale(kernels, x, 0.3, residual.clone()), residual + x * 0.3)
    assert_near(elementwise.soft_cap(kernels, x, 3.0), activations.soft_cap(x, 3.0))
    function = ActivationFunction.SILU
    assert_near(elementwise.activate(kernels, x, function), activations.activate(x, function))
    short = elementwise.soft_cap(kernels, x[:, :8000], 3.0)
    assert torch.equal(elementwise.soft_cap(kernels, x, 3.0)[:, :8000], short)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_of_threads_changes_a_bit(
    library: NativeLibrary, kernels: NativeKernels, dtype: torch.dtype
) -> None:
    x, weight = random(70, 500, dtype=dtype), random(500, dtype=dtype, seed=1)
    computed = [
        lambda kernels: elementwise.layer_norm(kernels, x, weight, weight, 1e-5),
        lambda kernels: elementwise.gated(kernels, x, Gating(limit=1.0, alpha=1.7)),
        lambda kernels: elementwise.gate(kernels, x, x[:, :1], ActivationFunction.SIGMOID),
        lambda kernels: elementwise.activate(kernels, x, ActivationFunction.GELU),
        lambda kernels: elementwise.soft_cap(kernels, x, 2.0),
    ]
    for compute in computed:
        expected = compute(kernels)
        for threads in (1, 5):
            assert torch.equal(compute(NativeKernels(library, kernels.isa, threads)), expected)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_embed(kernels: NativeKernels, dtype: torch.dtype, size: int) -> None:
    table = random(50, size, dtype=dtype)
    for num_tokens in (1, 2, 300):
        token_ids = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(2))
        assert torch.equal(elementwise.embed(kernels, table, token_ids), table[token_ids])


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8)])
def test_no_tokens(kernels: NativeKernels, shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape), torch.ones(8)
    half = (*shape[:-1], 4)
    assert elementwise.rms_norm(kernels, x, weight, 1e-5).shape == shape
    assert elementwise.layer_norm(kernels, x, weight, None, 1e-5).shape == shape
    assert elementwise.scale(kernels, x, 2.0, x).shape == shape
    assert elementwise.gated(kernels, x, Gating()).shape == half
    assert elementwise.gate(kernels, x, x, ActivationFunction.SILU).shape == shape
    assert elementwise.activate(kernels, x, ActivationFunction.SILU).shape == shape
    assert elementwise.soft_cap(kernels, x, 2.0).shape == shape


def test_wrong_arguments_are_named(kernels: NativeKernels) -> None:
    x = random(4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight"):
        elementwise.rms_norm(kernels, x, random(9, dtype=torch.float32), 1e-5)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        elementwise.rms_norm(kernels, x.half(), x[0].half(), 1e-5)
    with pytest.raises(ValueError, match="side by side"):
        elementwise.rms_norm(kernels, x.t(), x[:, 0], 1e-5)
    with pytest.raises(ValueError, match=r"added_to is \(4, 7\), but x is \(4, 8\)"):
        elementwise.scale(kernels, x, 2.0, x[:, :7])
    with pytest.raises(ValueError, match=r"gate_up is \(4, 7\), but must be"):
        elementwise.gated(kernels, x[:, :7], Gating())
    with pytest.raises(ValueError, match="token_ids"):
        elementwise.embed(kernels, x, torch.zeros(3, dtype=torch.int32))
