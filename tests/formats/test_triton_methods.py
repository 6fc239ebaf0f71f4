"""Linears by the Triton kernels, in the interpreter, against torch's, loaded in odd slices."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from quire.formats.dense import Dense, DenseMethod, InvariantDenseMethod, TritonDenseMethod
from quire.formats.format_registry import load_weight_format
from quire.formats.int4 import Int4, Int4TorchMethod, TritonInt4Method
from quire.formats.int8 import Int8, Int8TorchMethod, TritonInt8Method
from quire.formats.weight_format import ExpertLinears, TritonLinears
from quire.kernels.activations import Gating
from quire.kernels.compensation import compensate_int8, error_feedback
from quire.kernels.operators import TORCH_OPERATORS
from quire.kernels.routing import Routing
from quire.kernels.triton.linear import group_plan
from quire.kernels.triton.linear import skinny_matmul as skinny_kernel
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind

CPU = torch.device("cpu")
FAST = TritonLinears(TORCH_OPERATORS, batch_invariant=False)
INVARIANT = TritonLinears(TORCH_OPERATORS, batch_invariant=True)
DENSE = {"dense": Dense().method(None, FAST), "invariant": Dense().method(None, INVARIANT)}
PAIRS = {
    "int8": (Int8().method(None, FAST), Int8TorchMethod()),
    "int8, invariant": (Int8().method(None, INVARIANT), Int8TorchMethod()),
    "int4": (Int4().method(None, FAST), Int4TorchMethod(32)),
}


def _numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _linear(method, part_sizes, dtype, *, gated=False, rows_at_once=7):
    """Filled with the same numbers whatever the method."""
    linear = Linear(
        100, part_sizes, LinearKind.COLUMN, bias=True, dtype=dtype, device=CPU, gated=gated
    )
    linear.use(method, dtype, CPU)
    for index, slot in enumerate(linear.slots().values()):
        numbers = _numbers(*slot.shape, seed=index) * 0.2
        for start in reversed(range(0, len(numbers), rows_at_once)):
            slot.load(start, numbers[start : start + rows_at_once])
    linear.finish()
    return linear


def _close(result, expected):
    """Equal but for the order of fp32 sums, and what a rounding to bf16 makes of that."""
    is_wide = result.dtype == torch.float32
    limits = (2e-5, 1e-5) if is_wide else (2e-2, 2**-7)
    torch.testing.assert_close(result, expected, atol=limits[0], rtol=limits[1])


def test_int8_is_compensated_as_by_torch():
    """Rows that are loaded with error feedback, on the device of the weights."""
    weight, feedback = _numbers(45, 128), error_feedback(_numbers(30, 128, seed=1))
    found = []
    for method in PAIRS["int8"]:
        linear = Linear(128, (45,), LinearKind.COLUMN, bias=False, dtype=torch.float32, device=CPU)
        linear.use(method, torch.float32, CPU)
        assert method.can_compensate(linear)
        method.use_feedback(linear, feedback)
        linear.slots()["weight", 0].load(0, weight)
        linear.finish()
        assert linear.state is None
        found.append((linear.get_parameter("levels"), linear.get_parameter("scales")))
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][0], compensate_int8(weight, feedback)[0])


@pytest.mark.parametrize("num_rows", [2, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", DENSE.values(), ids=DENSE.keys())
def test_dense_multiplies_as_torch_does(method, dtype, num_rows):
    linear = _linear(method, (30, 30), dtype, gated=True)
    reference = _linear(DenseMethod(), (30, 30), dtype, gated=True)
    x = _numbers(2, num_rows // 2, 100).to(dtype)
    assert linear(x).shape == (2, num_rows // 2, 60) and linear(x).dtype == dtype
    _close(linear(x), reference(x))
    _close(linear.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize(
    ("dtype", "num_rows", "expected"),
    [
        (torch.bfloat16, 16, ["skinny", "skinny gated"]),
        (torch.bfloat16, 17, []),
        (torch.float32, 1, []),
    ],
)
def test_few_rows_of_short_numbers_have_a_kernel_of_their_own(
    dtype, num_rows, expected, monkeypatch
):
    linear, called = _linear(Dense().method(None, FAST), (30, 30), dtype, gated=True), []
    skinny_matmul = skinny_kernel.skinny_matmul

    def observed(*operands, gated=False, **options):
        called.append("skinny gated" if gated else "skinny")
        return skinny_matmul(*operands, gated=gated, **options)

    monkeypatch.setattr(skinny_kernel, "skinny_matmul", observed)
    x = _numbers(num_rows, 100).to(dtype)
    linear(x), linear.silu_mul(x)
    assert called == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_invariant_rows_have_the_same_bits_in_any_batch(scheme, dtype):
    method = load_weight_format(scheme).method(None, INVARIANT)
    linear = _linear(method, (30, 30), dtype, gated=True)
    x = _numbers(21, 100).to(dtype)
    for call in (linear, linear.silu_mul):
        whole = call(x)
        assert torch.equal(call(x[3:4]), whole[3:4])
        assert torch.equal(call(x[4:21]), whole[4:21])


@pytest.mark.parametrize("num_rows", [3, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_quantized_equal_torchs_to_the_bit(pair, dtype, num_rows):
    linear, reference = (_linear(method, (24, 24), dtype, gated=True) for method in pair)
    x = _numbers(num_rows, 100).to(dtype)
    assert torch.equal(linear(x), reference(x))
    _close(linear.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize(
    "method", [*DENSE.values(), Int8().method(None, FAST), Int4().method(None, FAST)]
)
def test_num_bytes_equals_the_parameters_size(method):
    linear = Linear(300, (20,), LinearKind.ROW, bias=False, dtype=torch.bfloat16, device=CPU)
    linear.use(method, torch.bfloat16, CPU)
    num_bytes = sum(each.numel() * each.element_size() for each in linear.parameters())
    assert method.num_bytes(20, 300, torch.bfloat16) == num_bytes


def _head(method, dtype):
    """Of 300 inputs, of which some are fifty times the rest; loaded in two slices."""
    linear = Linear(300, (70,), LinearKind.COLUMN, bias=False, dtype=dtype, device=CPU)
    linear.use(method, dtype, CPU)
    numbers = _numbers(70, 300) * 0.2
    numbers[:, 3::70] *= 50
    assert method.wants_sample
    method.take_sample(linear, numbers[::2])
    slot = linear.slots()["weight", 0]
    slot.load(40, numbers[40:])
    slot.load(0, numbers[:40])
    linear.finish()
    return linear


@pytest.mark.parametrize("num_rows", [3, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_four_bits_keeps_its_wide_inputs_as_torch_does(dtype, num_rows):
    methods = Int4().head_method(None, FAST), Int4().head_method()
    linear, reference = (_head(method, dtype) for method in methods)
    x = _numbers(num_rows, 300).to(dtype)
    for out_dtype in (None, torch.float32):
        found = linear.method.apply(linear, x, out_dtype)
        assert torch.equal(found, reference.method.apply(reference, x, out_dtype))
    num_bytes = sum(each.nbytes for each in linear.parameters())
    assert methods[0].num_bytes(70, 300, dtype) == num_bytes


def test_four_bits_and_their_factors_take_four_and_a_half():
    assert Int4().method(None, FAST).num_bytes(1000, 4096, torch.bfloat16) == 1000 * (
        4096 * 9 // 16 + 4
    )


def _ends(method, dtype, *, tied):
    """An embedding and a head that were filled from the same numbers."""
    embedding = VocabEmbedding(70, 64, dtype=dtype, device=CPU)
    head = LMHead(embedding, tied=tied)
    head.use(method, dtype, CPU)
    numbers = _numbers(70, 64).to(dtype)
    for slot in head.slots().values():
        slot.load(0, numbers)
    embedding.weight.copy_(numbers)
    head.finish()
    return embedding, head, numbers


@pytest.mark.parametrize(
    "method", [*DENSE.values(), Int8().method(None, FAST), Int4().method(None, FAST)]
)
def test_a_tied_head_is_there_once_if_it_is_exact(method):
    embedding, head, numbers = _ends(method, torch.bfloat16, tied=True)
    assert torch.equal(embedding(torch.arange(70)), numbers)
    is_shared = any(each is embedding.weight for each in head.parameters())
    assert is_shared is method.is_exact is isinstance(method, DenseMethod)


@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize("method", DENSE.values(), ids=DENSE.keys())
def test_logits_are_fp32(method, num_rows):
    _, head, numbers = _ends(method, torch.bfloat16, tied=False)
    hidden = _numbers(num_rows, 64).bfloat16()
    logits = head(hidden)
    assert logits.dtype == torch.float32
    is_rounded = isinstance(method, TritonDenseMethod) and num_rows > 16  # by torch, on the CPU
    expected = functional.linear(hidden.float(), numbers.float())
    limits = (0.1, 2**-7) if is_rounded else (1e-4, 1e-5)
    torch.testing.assert_close(logits, expected, atol=limits[0], rtol=limits[1])


@pytest.mark.parametrize(
    ("family", "dtype", "expected"),
    [
        (FAST, torch.bfloat16, [16, 64]),
        (FAST, torch.float32, [16]),
        (INVARIANT, torch.float16, [16]),
    ],
)
def test_experts_with_many_tokens_have_wide_tiles(family, dtype, expected, monkeypatch):
    used, plan_groups = set(), group_plan.plan_groups

    def observed(ids, num_experts, block_rows):
        used.add(block_rows)
        return plan_groups(ids, num_experts, block_rows)

    monkeypatch.setattr(group_plan, "plan_groups", observed)
    method = Dense().method(None, family)
    gate_up = [_linear(method, (30, 30), dtype, gated=True) for _ in range(2)]
    down = [Linear(30, (100,), LinearKind.ROW, bias=False, dtype=dtype, device=CPU)] * 2
    down[0].use(method, dtype, CPU)
    down[0].slots()["weight", 0].load(0, _numbers(100, 30) * 0.2)
    layer = ExpertLinears(tuple(gate_up), tuple(down), Gating())
    x, ids = _numbers(70, 100).to(dtype), (_numbers(70, 1) > 0).long()
    routing = Routing(ids, torch.ones(70, 1))
    found = method.experts(layer, x, routing)
    few = method.experts(layer, x[:3], Routing(ids[:3], routing.weights[:3]))
    assert sorted(used) == expected
    _close(few, found[:3])


@pytest.mark.parametrize(
    ("quantization", "family", "expected"),
    [
        (None, FAST, TritonDenseMethod),
        (None, INVARIANT, InvariantDenseMethod),
        ("int8", FAST, TritonInt8Method),
        ("int4", INVARIANT, TritonInt4Method),
    ],
)
def test_a_gpu_has_methods_of_its_own(quantization, family, expected):
    assert type(load_weight_format(quantization).method(None, family)) is expected
