"""Activations as int8 with a scale for each group, rotated or not: the numbers of the reference."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, numbers, surrounded

from quire.kernels import quantize as reference
from quire.kernels.triton.linear.quantize_groups import quantize_groups


def _assert_as_reference(x, size, multiple, rotation=1):
    found = quantize_groups(x, size, multiple, rotation=rotation)
    q, scales = reference.quantize_groups(reference.rotate_blocks(x, rotation), size)
    width, num_groups = q[0].numel(), scales.shape[1]
    assert torch.equal(found.q[:, :width], q.flatten(1).to(torch.int8))
    assert not found.q[:, width:].any() and not found.scales[:, num_groups:].any()
    torch.testing.assert_close(found.scales[:, :num_groups], scales, rtol=0, atol=0, equal_nan=True)
    by_group = quantize_groups(x, size, multiple, rotation=rotation, by_group=True)
    assert torch.equal(by_group.q, found.q)
    torch.testing.assert_close(by_group.scales.T, found.scales, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_inputs", "size", "rotation"),
    [(1, 32, 1), (100, 128, 4), (576, 128, 64), (1090, 128, 2), (300, 64, 1), (2048, 128, 64)],
)
def test_equals_the_reference_to_the_bit(num_inputs, size, rotation, dtype):
    x = surrounded((numbers(3, num_inputs) * 3).to(dtype))
    found = _assert_as_reference(x, size, 512, rotation)
    assert found.q.shape[1] % 512 == 0 and found.q.shape[1] - num_inputs < 512


def test_nan_and_infinity_affect_only_the_groups_of_their_block():
    x = numbers(5, 300)
    x[0] = 0
    x[1] *= 1e-33
    x[2, 299] = torch.nan
    x[3, 1] = torch.inf
    x[4, 130] = -torch.inf
    found = _assert_as_reference(x, 128, 128, 4)
    assert found.scales.isnan().nonzero().tolist() == [[2, 2], [3, 0], [4, 1]]
    assert not found.q[:2].any()


def test_a_rotation_that_overflows_makes_its_group_nan():
    x = torch.full((1, 256), 1.0)
    x[0, :2] = 3e38
    found = _assert_as_reference(x, 128, 128, 64)
    assert found.scales.isnan().tolist() == [[True, False]]


def test_no_rows():
    found = quantize_groups(torch.zeros(0, 30), 32, 64, by_group=True)
    assert found.q.shape == (0, 64) and found.scales.shape == (2, 0)
