"""The interpreter's bf16: casts, arithmetic, comparisons and products as torch has them."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quire.kernels.triton.interpreter import (
    compute_as_gpus_do,
    dot_in_k_order,
    round_bfloat16,
    widen_bfloat16,
)

N = 16


@triton.jit
def _cast_kernel(source_ptr, target_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(target_ptr + places, tl.load(source_ptr + places).to(target_ptr.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(left_ptr, right_ptr, sum_ptr, product_ptr, larger_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    left, right = tl.load(left_ptr + places), tl.load(right_ptr + places)
    tl.store(sum_ptr + places, left + right)
    tl.store(product_ptr + places, left * right)
    tl.store(larger_ptr + places, tl.where(left > right, left, right))


@triton.jit
def _dot_kernel(left_ptr, right_ptr, out_ptr, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + places, tl.dot(tl.load(left_ptr + places), tl.load(right_ptr + places)))


@triton.jit
def _fused_kernel(a_ptr, b_ptr, c_ptr, out_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    a, b, c = tl.load(a_ptr + places), tl.load(b_ptr + places), tl.load(c_ptr + places)
    tl.store(out_ptr + places, tl.fma(a, b, c))


@triton.jit
def _overflow_kernel(out_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    large = tl.exp(places.to(tl.float32) + 100.0)
    tl.store(out_ptr + places, large - large)


@triton.jit
def _sum_of_squares(values):
    return tl.sum(values * values, axis=0)


@triton.jit
def _nested_kernel(source_ptr, out_ptr, N: tl.constexpr):
    values = tl.load(source_ptr + tl.arange(0, N))
    tl.store(out_ptr, _sum_of_squares(values) + tl.max(values, axis=0))


@triton.jit
def _loop_kernel(bound_ptr, out_ptr):
    for number in range(0, tl.load(bound_ptr)):
        tl.store(out_ptr + number, number)


@triton.jit
def _masked_kernel(count_ptr, out_ptr):
    place = tl.arange(0, 1)
    for step in tl.static_range(4):
        is_wanted = step < tl.load(count_ptr)
        tl.store(out_ptr + step + place, step, is_wanted)


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rounds_to_nearest_ties_to_even():
    generator = np.random.default_rng(0)
    values = generator.integers(2**32, size=100_000, dtype=np.uint32).view(np.float32)
    ties = (np.arange(64, dtype=np.uint32) << np.uint32(15)).view(np.float32)
    edges = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45], np.float32)
    values = np.concatenate((values, ties, edges))
    expected = torch.from_numpy(values).bfloat16()
    found = torch.from_numpy(round_bfloat16(values)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def test_every_bf16_number_widens_to_itself():
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.copy()).view(torch.bfloat16).float()
    assert np.array_equal(widen_bfloat16(bits).view(np.uint32), expected.numpy().view(np.uint32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_casts_from_and_to_other_types(dtype):
    values = (_random(N) * 50).to(dtype)
    short = torch.empty(N, dtype=torch.bfloat16)
    _cast_kernel[(1,)](values, short, N)
    assert torch.equal(short, values.bfloat16())
    back = torch.empty(N, dtype=dtype)
    _cast_kernel[(1,)](short, back, N)
    assert torch.equal(back, short.to(dtype))


def test_arithmetic_rounds_once_for_each_operation():
    left, right = (_random(N, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    found = [torch.empty_like(left) for _ in range(3)]
    _arithmetic_kernel[(1,)](left, right, *found, N)
    for value, expected in zip(found, (left + right, left * right, left.max(right)), strict=True):
        assert torch.equal(value, expected)


def test_a_fused_multiply_add_is_rounded_once():
    a, b = _random(N, seed=1), _random(N, seed=2)
    c = -(a * b)
    out = torch.empty(N)
    _fused_kernel[(1,)](a, b, c, out, N)
    expected = (a.double() * b.double() + c.double()).float()
    assert torch.equal(out, expected) and out.any()


def test_products_are_of_numbers():
    left, right = (_random(N, N, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    out = torch.empty(N, N)
    _dot_kernel[(1,)](left, right, out, N)
    torch.testing.assert_close(out, left.float() @ right.float())


def test_a_product_sums_in_one_order_whatever_its_shape():
    left, right, start = (
        _random(*shape, seed=seed).numpy()
        for seed, shape in enumerate([(5, 70), (70, 33), (5, 33)])
    )
    found = dot_in_k_order(left, right, start)
    for row, column in ((0, 0), (4, 32), (2, 17)):
        total = start[row, column]
        for k in range(70):
            total = np.float32(total + np.float32(left[row, k] * right[k, column]))
        assert found[row, column] == total
    part = dot_in_k_order(left[2:3], right[:, 8:9], start[2:3, 8:9])
    assert part == found[2, 8]


def test_a_kernels_product_sums_in_that_order():
    left, right = _random(N, N, seed=1), _random(N, N, seed=2)
    out = torch.empty(N, N)
    _dot_kernel[(1,)](left, right, out, N)
    zeros = np.zeros((N, N), np.float32)
    assert np.array_equal(out.numpy(), dot_in_k_order(left.numpy(), right.numpy(), zeros))


def test_a_mask_may_be_a_scalar():
    out = torch.full((4,), -1, dtype=torch.int32)
    _masked_kernel[(1,)](torch.tensor([2], dtype=torch.int32), out)
    assert out.tolist() == [0, 1, -1, -1]


def test_infinities_are_silent_as_on_a_gpu():
    out = torch.zeros(N)
    _overflow_kernel[(1,)](out, N)
    assert out.isnan().all()


def test_a_loaded_number_bounds_a_loop():
    out = torch.full((5,), -1)
    _loop_kernel[(1,)](torch.tensor([3]), out)
    assert out.tolist() == [0, 1, 2, -1, -1]


def test_functions_within_a_kernel_and_the_next_launch_find_the_language():
    values, out = _random(N), torch.empty(1)
    for _ in range(2):
        _nested_kernel[(1,)](values, out, N)
        torch.testing.assert_close(out[0], values.square().sum() + values.max())
        out.zero_()


def test_a_kernel_that_fails_says_so_and_the_next_one_runs():
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _loop_kernel[(1,)](torch.tensor([1]), None)
    out = torch.full((1,), -1)
    _loop_kernel[(1,)](torch.tensor([1]), out)
    assert out.tolist() == [0]


def test_nothing_is_replaced_where_kernels_are_compiled(monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    before = interpreter.InterpreterBuilder.cast_impl
    compute_as_gpus_do()
    assert interpreter.InterpreterBuilder.cast_impl is before
