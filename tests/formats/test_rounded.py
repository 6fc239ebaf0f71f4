"""Quantized linears by torch against their formulas, row by row and in batches."""

import pytest
import torch
from torch.nn import functional

from quire.formats import int8, rounded
from quire.formats.int4 import Int4TorchMethod
from quire.formats.int8 import Int8TorchMethod
from quire.kernels.quantize import quantize_int4, quantize_int8
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind

CPU = torch.device("cpu")
METHODS = [Int8TorchMethod(), Int4TorchMethod(32), Int4TorchMethod(64)]
IDS = ["int8", "int4, groups of 32", "int4, groups of 64"]


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
    """The weight that the method multiplies with, in fp64."""
    if isinstance(method, Int8TorchMethod):
        q, scales = quantize_int8(_weight())
        return q.double() * scales[:, None].double()
    rows = quantize_int4(_weight(), method.group_size)
    s = rows.scales.double() * rows.scale_factors[:, None].double()
    o = rows.offsets.double() * rows.offset_factors[:, None].double()
    weight = rows.levels.double() * s[..., None] - o[..., None]
    return weight.flatten(1)[:, :70]


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_is_the_product_of_the_rounded_numbers(method):
    x = _numbers(3, 2, 70)
    q, scales = quantize_int8(x.flatten(0, 1))
    rounded_x = q.double() * scales[:, None].double()
    expected = functional.linear(rounded_x, _dequantized(method), _bias().double())
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


def test_integers_are_exact_where_torchs_fast_product_is_not(monkeypatch):
    linear, x = _linear(METHODS[0]), _numbers(20, 70)
    fast = linear(x)
    monkeypatch.setattr(int8, "_has_exact_int8", lambda: False)
    assert torch.equal(linear(x), fast)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_the_size_is_that_of_the_parameters(method):
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
