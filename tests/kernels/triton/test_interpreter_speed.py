"""What makes the interpreter fast leaves its values, and the language between launches, alone."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter

import quire.kernels.triton  # noqa: F401  # patches the interpreter

N = 8
CHANGED = (
    (tl.core, "_unwrap_if_constexpr"),
    (tl.core.dtype, "__eq__"),
    (tl.core.tuple, "__eq__"),
    (tl.core.block_type, "__init__"),
    (tl.core.tensor, "__init__"),
    (tl.core.tensor, "__add__"),
    (tl, "load"),
    (tl, "range"),
    (tl.math, "exp"),
)


@triton.jit
def _copy_kernel(source_ptr, out_ptr, N: tl.constexpr, look: tl.constexpr):
    places = tl.arange(0, N)
    values = tl.load(source_ptr + places)
    if look is not None:
        look(values)
    tl.store(out_ptr + places, values)


@triton.jit
def _sums_kernel(source_ptr, out_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)
    square = tl.load(source_ptr + rows[:, None] * N + rows[None, :])
    total = tl.zeros((N, 2), tl.float32) + tl.sum(square, axis=1)[:, None]
    total = tl.where(tl.arange(0, 2)[None, :] == 1, -total, total)
    tl.store(out_ptr + rows[:, None] * 2 + tl.arange(0, 2)[None, :], total)


def language():
    return [getattr(target, name) for target, name in CHANGED]


def test_the_language_is_changed_during_launches_only():
    own, seen = language(), []
    source = torch.arange(N)
    _copy_kernel[(1,)](source, torch.empty_like(source), N, lambda _values: seen.append(language()))
    assert language() == own
    assert all(changed is not value for changed, value in zip(seen[0], own, strict=True))


def test_the_language_is_its_own_again_after_a_failed_launch():
    own = language()
    with pytest.raises(triton.runtime.errors.InterpreterError, match="on purpose"):
        _copy_kernel[(1,)](torch.arange(N), torch.arange(N), N, fail)
    assert language() == own


def fail(_values):
    raise ValueError("on purpose")


def test_a_launch_within_a_launch_leaves_the_outer_one_its_language():
    source, inner, outer = torch.arange(N), torch.zeros(N), torch.zeros(N)
    values = torch.rand(N)

    def launch(_values):
        _copy_kernel[(1,)](values, inner, N, None)

    _copy_kernel[(1,)](source, outer, N, launch)
    assert torch.equal(inner, values) and torch.equal(outer, source.float())


@pytest.mark.parametrize("shape", [[N], [4, N], [1, 1, 2]])
@pytest.mark.parametrize("element", [tl.float32, tl.int1, tl.pointer_type(tl.bfloat16)])
def test_types_and_shapes_are_those_of_the_language(shape, element):
    """Twice in a launch: the first makes a shape, the second finds it."""
    expected = tl.tensor(None, tl.block_type(element, shape))
    found = []

    def look(_values):
        for sizes in (shape, [tl.constexpr(size) for size in shape]):
            found.append(tl.tensor(None, tl.block_type(element, sizes)))

    _copy_kernel[(1,)](torch.arange(N), torch.empty(N), N, look)
    for tensor in found:
        assert tensor.type == expected.type
        assert str(tensor.type) == str(expected.type)
        assert tensor.type.numel == expected.type.numel
        assert tensor.dtype == expected.dtype
        assert tensor.numel.value == expected.numel.value
        assert [size.value for size in tensor.shape] == [size.value for size in expected.shape]


def test_a_scalar_has_no_shape():
    found = []
    _copy_kernel[(1,)](
        torch.arange(N),
        torch.empty(N),
        N,
        lambda _values: found.append(tl.tensor(None, tl.int32)),
    )
    assert (list(found[0].shape), found[0].numel.value, found[0].type) == ([], 1, tl.int32)


def test_a_bad_shape_is_refused_during_a_launch_too():
    def look(_values):
        for _ in range(2):
            with pytest.raises(ValueError, match="power of 2"):
                tl.block_type(tl.float32, [3])
            with pytest.raises(TypeError, match="0d"):
                tl.block_type(tl.float32, [])

    _copy_kernel[(1,)](torch.arange(N), torch.empty(N), N, look)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (tl.int1, "bool"),
        (tl.uint8, "uint8"),
        (tl.int64, "int64"),
        (tl.float16, "float16"),
        (tl.bfloat16, "uint16"),
        (tl.float8e4nv, "uint8"),
        (tl.pointer_type(tl.int8), "uint64"),
    ],
)
def test_every_type_has_its_type_of_numpy(dtype, expected):
    for _ in range(2):
        assert interpreter._get_np_dtype(dtype) == expected
        assert interpreter._get_np_dtype(tl.block_type(dtype, [N])) == expected


def test_operations_of_several_shapes_compute_what_torch_does():
    source = torch.rand(N, N)
    out = torch.empty(N, 2)
    _sums_kernel[(1,)](source, out, N)
    torch.testing.assert_close(out, torch.stack([source.sum(1), -source.sum(1)], dim=1))
