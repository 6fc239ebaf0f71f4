"""Numbers as small integers: nearest, within the stated steps, and better than the plain choice."""

import pytest
import torch

from quire.kernels.quantize import quantize_int4, quantize_int8


def _rows(num_rows=9, num_inputs=100, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num_rows, num_inputs, generator=generator) * 0.1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_the_nearest_multiple_of_the_rows_scale(dtype):
    x = _rows(dtype=dtype)
    q, scale = quantize_int8(x)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(scale, x.float().abs().amax(-1) / 127)
    assert torch.equal(q.abs().amax(-1), torch.full((9,), 127, dtype=torch.int8))
    error = (q * scale[:, None] - x.float()).abs()
    assert (error <= scale[:, None] * 0.5001).all()


def test_int8_ties_go_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize_int8(x)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


def test_int8_of_zeros_tiny_and_broken_rows():
    x = torch.zeros(5, 3)
    x[1] = torch.tensor([1e-38, 0, -1e-38])
    x[2, 1], x[3, 1], x[4] = torch.inf, torch.nan, 3e38
    q, scale = quantize_int8(x)
    assert not q[:4].any() and q[4].tolist() == [127] * 3
    assert scale.isnan().tolist() == [False, False, True, True, False]
    assert scale[0] == 0 and (q[:2] * scale[:2, None]).abs().max() == 0


def test_rows_are_quantized_each_by_itself():
    rows = _rows()
    q, scale = quantize_int8(rows)
    alone_q, alone_scale = quantize_int8(rows[4:5])
    assert torch.equal(q[4:5], alone_q) and torch.equal(scale[4:5], alone_scale)
    whole, alone = quantize_int4(rows, 32), quantize_int4(rows[4:5], 32)
    assert torch.equal(whole.dequantized()[4:5], alone.dequantized())


def _plain(rows, group_size):
    """Sixteen levels from a group's least to its largest number."""
    w = rows.view(len(rows), -1, group_size)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    step = (high - low) / 15
    return ((w - low) / step).round() * step + low


@pytest.mark.parametrize("group_size", [32, 64])
def test_int4_is_closer_than_the_plain_choice(group_size):
    rows = _rows(50, 256)
    packed = quantize_int4(rows, group_size)
    assert packed.levels.shape == (50, 256 // group_size, group_size)
    assert packed.levels.max() == 15 and packed.levels.min() == 0
    w = rows.view(50, -1, group_size)
    error = (packed.dequantized() - w).square().mean()
    assert error < 0.95 * (_plain(rows, group_size) - w).square().mean()
    # Sixteen levels over some four standard deviations.
    assert error.sqrt() < 0.12 * rows.std()


def test_int4_pads_the_last_group_with_zeros():
    rows = _rows(3, 70)
    packed, longer = quantize_int4(rows, 32), quantize_int4(_rows(3, 70)[:, :64], 32)
    assert packed.levels.shape == (3, 3, 32)
    assert (packed.dequantized().flatten(1)[:, :70] - rows).abs().max() < 0.04
    assert longer.levels.shape == (3, 2, 32)


@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_int4_keeps_rows_of_one_value(value):
    rows = torch.full((2, 64), value)
    torch.testing.assert_close(
        quantize_int4(rows, 32).dequantized().flatten(1), rows, atol=1e-6, rtol=1e-3
    )


def test_int4_of_a_broken_row_is_nan_and_of_others_not():
    rows = _rows(4, 64)
    rows[1, 3], rows[2, 40] = torch.nan, -torch.inf
    packed = quantize_int4(rows, 32)
    is_nan = packed.dequantized().isnan()
    assert is_nan.all(-1).all(-1).tolist() == [False, True, True, False]
    assert is_nan.any(-1).any(-1).tolist() == [False, True, True, False]
