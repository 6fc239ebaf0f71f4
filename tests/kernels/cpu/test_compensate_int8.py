"""Compensated rounding by the native kernels: the same bytes as torch's, on every processor."""

import pytest
import torch

from quire.kernels.compensation import compensate_int8, error_feedback
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.quantize import INT8_GROUP


def _numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _packing(num_outputs, num_inputs, layout=WeightLayout.INT8, group_size=INT8_GROUP, **options):
    return PackedLinear(layout, num_outputs, num_inputs, group_size=group_size, **options)


def _stored(packing):
    """All bytes and scales. Numbers that are NaN have one value here."""
    return packing._weights, packing._scales.nan_to_num(-1.0)


def _assert_equal(packing, expected):
    assert all(map(torch.equal, _stored(packing), _stored(expected)))


@pytest.fixture
def _isa(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    library = kernels.library
    monkeypatch.setattr(library, "best_isa", library.isas()[kernels.isa], raising=False)


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64), (38, 192), (80, 576)])
def test_bytes_are_those_of_torch(shape, dtype, interleave):
    weight = (_numbers(*shape) * 0.05).to(dtype)
    weight[0], weight[1, 7] = 0.0, torch.nan
    feedback = error_feedback(_numbers(50, shape[1], seed=1) @ _numbers(shape[1], shape[1], seed=2))
    half = shape[0] // 2 if interleave else 0
    packing = _packing(*shape, interleave=half)
    for first in range(0, shape[0], 17):
        packing.pack_compensated(weight[first : first + 17], first, feedback)
    expected = _packing(*shape, interleave=half)
    expected.pack_int8(*compensate_int8(weight, feedback), 0)
    _assert_equal(packing, expected)


@pytest.mark.usefixtures("_isa")
def test_without_correlations_each_weight_is_rounded_to_nearest():
    weight = _numbers(40, 128)
    packing, expected = _packing(40, 128), _packing(40, 128)
    packing.pack_compensated(weight, 0, torch.eye(64).expand(2, 64, 64))
    expected.pack(weight, 0)
    _assert_equal(packing, expected)


def test_rows_may_be_apart(kernels: NativeKernels):
    wide, feedback = _numbers(40, 300), error_feedback(_numbers(50, 128, seed=1))
    packing, expected = _packing(20, 128), _packing(20, 128)
    packing.pack_compensated(wide[::2, 100:228], 0, feedback)
    expected.pack_compensated(wide[::2, 100:228].contiguous(), 0, feedback)
    _assert_equal(packing, expected)
    x = _numbers(3, 128, seed=2)
    exact = x @ wide[::2, 100:228].T
    assert (apply(kernels, packing, x) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("layout", "num_inputs", "group_size"),
    [
        (WeightLayout.INT8, 128, 0),
        (WeightLayout.INT8, 96, INT8_GROUP),
        (WeightLayout.INT4, 128, 32),
        (WeightLayout.DENSE_F32, 128, 0),
    ],
)
def test_other_layouts_are_refused(layout, num_inputs, group_size):
    packing = _packing(40, num_inputs, layout, group_size)
    with pytest.raises(ValueError, match=rf"{layout.name} with {num_inputs} inputs, but only INT8"):
        packing.pack_compensated(_numbers(40, num_inputs), 0, torch.eye(64).expand(2, 64, 64))


def test_other_shapes_are_refused():
    packing, feedback = _packing(40, 128), torch.eye(64).repeat(2, 1, 1)
    for wrong in (feedback[:1], feedback.double()):
        with pytest.raises(ValueError, match="feedback is"):
            packing.pack_compensated(_numbers(40, 128), 0, wrong)
    with pytest.raises(ValueError, match="rows are"):
        packing.pack_compensated(_numbers(40, 64), 0, feedback)
    with pytest.raises(ValueError, match="outputs"):
        packing.pack_compensated(_numbers(40, 128), 1, feedback)
