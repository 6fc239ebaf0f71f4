"""Packed linears against torch's and against the quantized ones of torch, loaded in odd slices."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from quire.formats.int4 import Int4TorchMethod
from quire.formats.int8 import GivenInt8TorchMethod, Int8TorchMethod, PackedInt8Method
from quire.formats.packed import PackedMethod, is_packed, packed
from quire.formats.weight_format import CompensatedMethod, LinearMethod, SampledMethod
from quire.kernels.compensation import error_feedback
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]

Methods = Callable[[NativeKernels], tuple[LinearMethod, LinearMethod]]
FORMATS: dict[str, Methods] = {
    "int8": lambda kernels: (
        PackedInt8Method(kernels),
        Int8TorchMethod(),
    ),
    "int4, groups of 32": lambda kernels: (
        PackedMethod(kernels, WeightLayout.INT4, 32),
        Int4TorchMethod(32),
    ),
    "int4, groups of 64": lambda kernels: (
        PackedMethod(kernels, WeightLayout.INT4, 64),
        Int4TorchMethod(64),
    ),
    "int4, wide inputs": lambda kernels: (
        PackedMethod(kernels, WeightLayout.INT4, 32, has_wide=True),
        Int4TorchMethod(32, has_wide=True),
    ),
}


def _numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _linear(method, part_sizes, dtype, *, input_size=100, bias=True, gated=False, rows_at_once=7):
    """Filled with the same numbers whatever the method; None: torch's own."""
    linear = Linear(
        input_size,
        part_sizes,
        LinearKind.COLUMN,
        bias=bias,
        dtype=dtype,
        device=CPU,
        gated=gated,
    )
    if method is not None:
        linear.use(method, dtype, CPU)
    for index, slot in enumerate(linear.slots().values()):
        numbers = _numbers(*slot.shape, seed=index) * 0.2
        if isinstance(method, SampledMethod) and method.wants_sample and numbers.ndim == 2:
            numbers[:, 3::40] *= 9
            method.take_sample(linear, numbers[::2])
        for start in reversed(range(0, len(numbers), rows_at_once)):
            slot.load(start, numbers[start : start + rows_at_once])
    linear.finish()
    return linear


def _close(result, expected):
    """Equal but for the order of fp32 sums, and what a rounding to bf16 makes of that."""
    is_wide = result.dtype == torch.float32
    limits = (1e-5, 1e-5) if is_wide else (2e-2, 2**-7)
    torch.testing.assert_close(result, expected, atol=limits[0], rtol=limits[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part_sizes", [(1,), (45,), (64, 32, 33)])
def test_multiplies_as_torch_does(part_sizes, bias, dtype, kernels):
    linear = _linear(PackedMethod(kernels), part_sizes, dtype, bias=bias)
    reference = _linear(None, part_sizes, dtype, bias=bias)
    assert is_packed(linear) and not is_packed(reference)
    assert list(linear.parameters()) == []
    for shape in ((100,), (5, 100), (2, 3, 100), (0, 100)):
        x = _numbers(*shape).to(dtype)
        assert linear(x).shape == (*shape[:-1], sum(part_sizes))
        assert linear(x).dtype == dtype
        _close(linear(x), reference(x))


def test_takes_rows_that_are_not_adjacent(kernels):
    linear = _linear(PackedMethod(kernels), (40,), torch.float32)
    wide = _numbers(6, 300)
    assert torch.equal(linear(wide[::2, 100:200]), linear(wide[::2, 100:200].contiguous()))
    assert torch.equal(linear(wide[:3, ::3]), linear(wide[:3, ::3].contiguous()))


@pytest.mark.parametrize("size", [16, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_are_interleaved_inside_alone(size, dtype, kernels):
    linear = _linear(PackedMethod(kernels), (size, size), dtype, gated=True)
    reference = _linear(None, (size, size), dtype, gated=True)
    x = _numbers(4, 100).to(dtype)
    assert packed(linear).interleave == size
    _close(linear(x), reference(x))
    _close(linear.silu_mul(x), reference.silu_mul(x))


def test_an_adapter_sees_gate_and_up_in_order(kernels):
    linear = _linear(PackedMethod(kernels), (50, 50), torch.float32, gated=True)
    x = _numbers(4, 100)
    added = torch.arange(100.0) / 50
    gate, up = (linear(x) + added).chunk(2, -1)
    linear.adapter = lambda x, output: output + added
    _close(linear.silu_mul(x), functional.silu(gate) * up)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("methods", FORMATS.values(), ids=FORMATS.keys())
def test_quantized_as_torch_does_it(methods, dtype, gated, kernels):
    native, torch_method = methods(kernels)
    linear = _linear(native, (50, 50), dtype, gated=gated)
    reference = _linear(torch_method, (50, 50), dtype, gated=gated)
    x = _numbers(9, 100).to(dtype)
    torch.testing.assert_close(linear(x), reference(x), atol=1e-5, rtol=1e-5)
    if gated:
        _close(linear.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("input_size", [7, 100, 300, 576])
@pytest.mark.parametrize("methods", FORMATS.values(), ids=FORMATS.keys())
def test_quantized_products_equal_torchs_to_the_bit(methods, input_size, kernels):
    if kernels.isa == "portable":
        pytest.skip("without fused multiply-adds a product and a sum are rounded apart")
    native, torch_method = methods(kernels)
    x = _numbers(20, input_size)
    x[:, 3::40] *= 50
    sizes = {"part_sizes": (77,), "dtype": torch.float32, "input_size": input_size}
    assert torch.equal(_linear(native, **sizes)(x), _linear(torch_method, **sizes)(x))


def test_rows_that_are_loaded_again_are_compensated_until_the_end(kernels):
    """The native method stores what torch's does."""
    weight, x = _numbers(45, 128, seed=1), _numbers(20, 128)
    feedback = error_feedback(_numbers(30, 128, seed=2) @ _numbers(128, 128, seed=3))
    found = []
    for method in FORMATS["int8"](kernels):
        linear = Linear(128, (45,), LinearKind.COLUMN, bias=False, dtype=torch.float32, device=CPU)
        linear.use(method, torch.float32, CPU)
        (slot,) = linear.slots().values()
        assert method.can_compensate(linear)
        for use_feedback in (False, True, False):
            if use_feedback:
                method.use_feedback(linear, feedback)
            for start in range(0, 45, 7):
                slot.load(start, weight[start : start + 7])
            linear.finish()
            found.append(linear(x))
    plain, compensated, after = found[:3]
    assert torch.equal(after, plain) and not torch.equal(compensated, plain)
    if kernels.isa != "portable":  # else sums are not those of torch to the bit
        assert all(map(torch.equal, found[:3], found[3:]))


def test_int8_alone_is_compensated(kernels):
    linear = Linear(128, (45,), LinearKind.COLUMN, bias=False, dtype=torch.float32, device=CPU)
    odd = Linear(96, (45,), LinearKind.COLUMN, bias=False, dtype=torch.float32, device=CPU)
    own, torchs = FORMATS["int8"](kernels)
    given = PackedMethod(kernels, WeightLayout.INT8)
    for method in (own, torchs):
        assert method.can_compensate(linear) and not method.can_compensate(odd)
    assert not GivenInt8TorchMethod().can_compensate(linear)
    assert not any(isinstance(each, CompensatedMethod) for each in (given, PackedMethod(kernels)))


def test_wide_inputs_keep_eight_bits(kernels):
    weight, x = _numbers(64, 512), _numbers(9, 512)
    weight[:, 5::43] *= 6  # as many as have eight bits
    x[:, 5::43] *= 20
    exact = x.double() @ weight.double().T
    errors = []
    for has_wide in (False, True):
        method = PackedMethod(kernels, WeightLayout.INT4, 32, has_wide=has_wide)
        linear = Linear(512, (64,), LinearKind.COLUMN, bias=False, dtype=torch.float32, device=CPU)
        linear.use(method, torch.float32, CPU)
        if method.wants_sample:
            method.take_sample(linear, weight[:20])
        linear.slots()["weight", 0].load(0, weight)
        errors.append((linear(x) - exact).norm() / exact.norm())
    assert errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize("stored", [torch.float16, torch.float64, torch.bfloat16])
def test_rows_of_any_float_are_packed(stored, kernels):
    linear = _linear(PackedMethod(kernels), (40,), torch.float32, bias=False)
    numbers = _numbers(40, 100).to(stored)
    linear.slots()["weight", 0].load(0, numbers)
    assert torch.equal(packed(linear).unpack(torch.arange(40)), numbers.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [None, *FORMATS], ids=str)
def test_the_size_is_known_before_it_is_packed(method, dtype, kernels):
    native = PackedMethod(kernels) if method is None else FORMATS[method](kernels)[0]
    linear = Linear(2048, (1024,), LinearKind.COLUMN, bias=False, dtype=dtype, device=CPU)
    linear.use(native, dtype, CPU)
    expected = native.num_bytes(1024, 2048, dtype)
    assert expected == pytest.approx(packed(linear).num_bytes, rel=0.01)
    bits = {None: 8 * dtype.itemsize, "int8": 8, "int4, groups of 64": 4.25}
    assert expected * 8 / 2**21 == pytest.approx(bits.get(method, 4.5), rel=0.05)


def _ends(method, dtype, *, tied):
    """An embedding and a head that were filled from the same numbers."""
    embedding = VocabEmbedding(70, 64, dtype=dtype, device=CPU)
    head = LMHead(embedding, tied=tied)
    head.use(method, dtype, CPU)
    numbers = _numbers(70, 64).to(dtype)
    head.slots()["weight", 0].load(0, numbers)
    if embedding.weight is not None:
        embedding.weight.copy_(numbers)
    head.finish()
    return embedding, head, numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_is_there_once(dtype, kernels):
    embedding, head, numbers = _ends(PackedMethod(kernels), dtype, tied=True)
    assert embedding.weight is None and list(embedding.parameters()) == []
    assert embedding.source is packed(head)
    token_ids = torch.tensor([69, 0, 7, 7])
    assert torch.equal(embedding(token_ids), numbers[token_ids])
    assert embedding(token_ids).dtype == dtype
    assert embedding(token_ids[:0]).shape == (0, 64)


@pytest.mark.parametrize(
    ("weight_format", "tied"),
    [(None, False), (WeightLayout.INT8, False), (WeightLayout.INT8, True)],
)
def test_other_embeddings_keep_their_table(weight_format, tied, kernels):
    method = PackedMethod(kernels, weight_format)
    embedding, head, numbers = _ends(method, torch.bfloat16, tied=tied)
    assert embedding.source is None and packed(head).num_outputs == 70
    assert torch.equal(embedding(torch.arange(70)), numbers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_fp32_and_not_rounded_on_the_way(dtype, kernels):
    _, head, numbers = _ends(PackedMethod(kernels), dtype, tied=False)
    hidden = _numbers(3, 64).to(dtype)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ numbers.float().T, atol=1e-4, rtol=1e-5)
