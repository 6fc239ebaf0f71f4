"""Quantized linears by torch against their formulas, row by row and in batches."""

import pytest
import torch
from torch.nn import functional

from quire.formats import int8, rounded
from quire.formats.int4 import Int4TorchMethod
from quire.formats.int8 import GivenInt8TorchMethod, Int8TorchMethod
from quire.formats.weight_format import LinearModule, SampledMethod
from quire.kernels.quantize import (
    INT4_GROUPS_PER_SCALE,
    INT8_GROUP,
    NUM_WIDE,
    quantize_groups,
    quantize_int4,
    quantize_int8,
    quantize_int8_weight,
    rotate_blocks,
    rotation_size,
    widest_inputs,
)
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind

CPU = torch.device("cpu")
METHODS = [Int8TorchMethod(), Int4TorchMethod(32), Int4TorchMethod(64)]
IDS = ["int8", "int4, groups of 32", "int4, groups of 64"]
GIVEN = GivenInt8TorchMethod()
HEAD = Int4TorchMethod(32, has_wide=True)


def _numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _linear(method, *, dtype=torch.float32, bias=True, rows_at_once=4):
    linear = Linear(70, (9, 5), LinearKind.COLUMN, bias=bias, dtype=dtype, device=CPU)
    linear.use(method, dtype, CPU)
    for index, slot in enumerate(linear.slots().values()):
        numbers = _numbers(*slot.shape, seed=index)
        for start in reversed(range(0, len(numbers), rows_at_once)):
            slot.load(start, numbers[start : start + rows_at_once])
    return linear


def _weight():
    return torch.cat([_numbers(9, 70, seed=0), _numbers(5, 70, seed=1)])


def _bias():
    return torch.cat([_numbers(9, seed=2), _numbers(5, seed=3)])


def _dequantized(method):
    """The weight that the method multiplies with, in fp64; int8's is rotated."""
    if isinstance(method, Int8TorchMethod):
        q, scales = quantize_int8_weight(_weight())
        return q.double() * scales[:, None].double()
    return _dequantized_int4(_weight(), method.group_size)


def _dequantized_int4(weight, group_size):
    rows = quantize_int4(weight, group_size)
    s = rows.scales.double() * rows.scale_factors[:, None].double()
    o = rows.offsets.double() * rows.offset_factors[:, None].double()
    dequantized = rows.levels.double() * s[..., None] - o[..., None]
    return dequantized.flatten(1)[:, : weight.shape[1]]


def _rounded(x, size):
    """x as the numbers that it is rounded to, in fp64."""
    q, scales = quantize_groups(x, size)
    return (q.double() * scales[..., None].double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_is_the_product_of_the_rounded_numbers(method):
    x = _numbers(3, 2, 70)
    rows, size = x.flatten(0, 1), INT8_GROUP
    if isinstance(method, Int8TorchMethod):
        rows = rotate_blocks(rows, rotation_size(70))
    else:
        size = INT4_GROUPS_PER_SCALE * method.group_size
    expected = functional.linear(_rounded(rows, size), _dequantized(method), _bias().double())
    result = _linear(method)(x)
    assert result.shape == (3, 2, 14) and result.dtype == torch.float32
    torch.testing.assert_close(result.flatten(0, 1).double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_is_near_what_was_not_rounded(method):
    x = _numbers(50, 70)
    exact = functional.linear(x, _weight(), _bias())
    error = (_linear(method)(x) - exact).square().mean().sqrt()
    assert 0 < error < (0.015 if isinstance(method, Int8TorchMethod) else 0.15) * exact.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_a_row_does_not_depend_on_the_others(method, dtype, monkeypatch):
    linear, x = _linear(method, dtype=dtype), _numbers(33, 70).to(dtype)
    whole = linear(x)
    assert whole.dtype == dtype
    assert torch.equal(whole, torch.cat([linear(row[None]) for row in x]))
    monkeypatch.setattr(rounded, "_MAX_ROWS", 7)
    assert torch.equal(whole, linear(x))
    assert linear(x[:0]).shape == (0, 14)


def _filled(method, weight, *, sample=None):
    """A linear without a bias. sample: rows for a method that wants some."""
    num_outputs, num_inputs = weight.shape
    linear = LinearModule(num_inputs, (num_outputs,), has_bias=False)
    method.create(linear, False, torch.float32, CPU)
    if isinstance(method, SampledMethod) and method.wants_sample:
        method.take_sample(linear, weight if sample is None else sample)
    half = num_outputs // 2
    method.load_part(linear, "weight", 0, half, weight[half:])
    method.load_part(linear, "weight", 0, 0, weight[:half])
    return linear


def _given(weight):
    """A linear whose levels and scales a checkpoint has."""
    linear = LinearModule(weight.shape[1], (len(weight),), has_bias=False)
    GIVEN.create(linear, False, torch.float32, CPU)
    levels, scales = quantize_int8(weight)
    linear.get_parameter("levels").copy_(levels)
    linear.get_parameter("scales").copy_(scales)
    return linear


def _relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def test_given_int8_is_not_rotated_and_has_one_scale_a_token():
    weight, x = _numbers(20, 300), _numbers(5, 300, seed=1)
    q, scales = quantize_int8(weight)
    expected = _rounded(x, 300) @ (q.double() * scales[:, None].double()).T
    found = GIVEN.apply(_given(weight), x)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


def test_given_int8_is_exact_where_torchs_fast_product_is_not(monkeypatch):
    linear, x = _given(_numbers(16, 64)), _numbers(20, 64, seed=1)
    fast = GIVEN.apply(linear, x)
    monkeypatch.setattr(int8, "_has_exact_int8", lambda: False)
    assert torch.equal(GIVEN.apply(linear, x), fast)


@pytest.mark.parametrize(
    ("method", "bound"),
    [(Int8TorchMethod(), 0.03), (Int4TorchMethod(32), 0.09)],
    ids=["int8", "int4"],
)
def test_an_input_a_hundred_times_the_others_does_not_spoil_them(method, bound):
    """The result is of the other inputs alone: the outlier's weights are zero. The error is that of
    rounded activations, with the rounded weights for exact ones."""
    weight, x = _numbers(64, 1024), _numbers(30, 1024, seed=1)
    x[:, 200] *= 100
    weight[:, 200] = 0
    if isinstance(method, Int8TorchMethod):
        q, scales = quantize_int8_weight(weight)
        rounded_weight = rotate_blocks(q.double() * scales[:, None], 64).double()
    else:
        rounded_weight = _dequantized_int4(weight, 32)
    exact = x.double() @ rounded_weight.T
    assert _relative_error(method.apply(_filled(method, weight), x), exact) < bound
    one_scale_a_token = _rounded(x, 1024) @ rounded_weight.T
    assert _relative_error(one_scale_a_token, exact) > 2 * bound


@pytest.mark.parametrize("num_inputs", [1, 6, 64, 192, 321])
def test_a_rotation_is_its_own_inverse_but_for_its_size(num_inputs):
    size = rotation_size(num_inputs)
    assert num_inputs % size == 0 and size <= 64
    x = torch.randint(-9, 9, (3, num_inputs), generator=torch.Generator().manual_seed(2)).float()
    assert torch.equal(rotate_blocks(rotate_blocks(x, size), size), size * x)


def test_a_rotation_spreads_an_input_over_its_block_alone():
    x = torch.zeros(1, 192)
    x[0, 70] = 3.0
    rotated = rotate_blocks(x, 64)
    assert (rotated[0, 64:128].abs() == 3.0).all()
    assert not rotated[0, :64].any() and not rotated[0, 128:].any()


def test_a_group_that_is_no_number_makes_its_row_nan_and_no_other():
    for method in METHODS:
        x = _numbers(3, 300)
        x[1, 290] = torch.inf
        found = method.apply(_filled(method, _numbers(8, 300, seed=1)), x)
        assert found.isnan().all(1).tolist() == [False, True, False]
        assert found[0].isfinite().all() and found[2].isfinite().all()


def test_a_head_keeps_its_widest_inputs_in_eight_bits():
    weight, x = _numbers(64, 512), _numbers(30, 512, seed=1)
    weight[:, 5::43] *= 20
    exact = x.double() @ weight.double().T
    linear = _filled(HEAD, weight, sample=weight[::4])
    wide = linear.get_parameter("wide_inputs").tolist()
    assert len(wide) == NUM_WIDE and wide == sorted(wide) and {*range(5, 512, 43)} <= {*wide}
    assert wide == widest_inputs(weight[::4]).tolist()
    assert _relative_error(HEAD.apply(linear, x), exact) < 0.03
    without = Int4TorchMethod(32)
    assert _relative_error(without.apply(_filled(without, weight), x), exact) > 0.09


def test_a_head_is_the_product_of_the_rounded_numbers_of_both_kinds():
    weight, x = _numbers(20, 300), _numbers(5, 300, seed=1)
    linear = _filled(HEAD, weight)
    wide = linear.get_parameter("wide_inputs").long()
    levels, scales = (linear.get_parameter(f"wide_{name}") for name in ("levels", "scales"))
    rest = weight.index_fill(1, wide, 0.0)
    expected = _rounded(x[:, wide], NUM_WIDE) @ (levels.double() * scales[:, None].double()).T
    # A zero among weights of one sign is not rounded to zero: x has one in its place.
    expected += _rounded(x.index_fill(1, wide, 0.0), 128) @ _dequantized_int4(rest, 32).T
    torch.testing.assert_close(HEAD.apply(linear, x).double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_inputs", [70, 300])
def test_a_head_says_its_size(num_inputs):
    linear = _filled(HEAD, _numbers(20, num_inputs))
    assert ("wide_levels" in dict(linear.named_parameters())) is (num_inputs == 300)
    num_bytes = sum(each.nbytes for each in linear.parameters())
    assert HEAD.num_bytes(20, num_inputs, torch.bfloat16) == num_bytes


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_num_bytes_equals_the_parameters_size(method):
    linear = _linear(method, bias=False)
    num_bytes = sum(each.numel() * each.element_size() for each in linear.parameters())
    assert method.num_bytes(14, 70, torch.bfloat16) == num_bytes


def test_a_tied_embedding_keeps_its_table():
    embedding = VocabEmbedding(40, 64, dtype=torch.bfloat16, device=CPU)
    head = LMHead(embedding, tied=True)
    head.use(METHODS[0], torch.bfloat16, CPU)
    numbers = _numbers(40, 64).bfloat16()
    embedding.weight.copy_(numbers)
    head.slots()["weight", 0].load(0, numbers)
    assert torch.equal(embedding(torch.arange(40)), numbers)
    q, scales = quantize_int8(numbers)
    hidden = _numbers(5, 64).bfloat16()
    expected = hidden.double() @ (q.double() * scales[:, None].double()).T
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden).double(), expected, atol=0.2, rtol=0.01)
