"""Patches Triton's interpreter so that kernels compute the same results as on GPUs.

Up to version 3.9, Triton's interpreter differs from GPUs in these points:

- It stores bf16 numbers as their bits. Casts from fp32 drop the lower bits, where GPUs round to
  nearest, ties to even; products and sums use the bits as integers.
- It rounds the product of a fused multiply-add before the addition.
- numpy's BLAS chooses the order of a product's sums, by shape and processor.
- A comparison's result has its operands' dtype, and since 3.9 such a scalar is refused as a mask.
- It warns of infinities, which kernels use on purpose.
- It cannot use a scalar of a recent numpy as the bound of a loop.

The patches are applied once, when this package is imported with TRITON_INTERPRET set; without it,
nothing is changed.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

from quire.kernels.triton.interpreter_speed import LaunchPatches, numpy_types, patch_builtin

#: Passed to the interpreter in place of a function: the modules in `__globals__` are patched.
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def round_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16 numbers; NaN stays NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers with these bits, as fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def multiply_add(
    a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], c: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """a * b + c, rounded once, except for sums that are not exact in fp64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def dot_in_k_order(
    left: npt.NDArray[Any], right: npt.NDArray[Any], start: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """start [..., M, N] + left [..., M, K] @ right [..., K, N], with K in ascending order.

    Each product and each sum is rounded to start's dtype by a single IEEE operation, so an element
    has the same bits for all M and N, and on every processor. The product of numpy would call a
    BLAS, whose order depends on shape and processor.
    """
    left, right = left.astype(start.dtype, copy=False), right.astype(start.dtype, copy=False)
    result = start.copy()
    product = np.empty_like(result)
    for k in range(left.shape[-1]):
        np.multiply(left[..., :, k, None], right[..., k, None, :], out=product)
        np.add(result, product, out=result)
    return result


def _wide(handle: Any) -> Any:
    """A handle of bf16 numbers widened to fp32; other handles are returned unchanged."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(widen_bfloat16(np.asarray(handle.data)), tl.float32)


def _rounded(handle: Any) -> Any:
    """A handle with its numbers rounded to bf16."""
    values = np.asarray(handle.data).astype(np.float32)
    return interpreter.TensorHandle(round_bfloat16(values), tl.bfloat16)


def compute_as_gpus_do() -> None:
    """Apply the patches, if kernels are interpreted."""
    if not knobs.runtime.interpret:
        return
    # First, keep the interpreter's own functions, which the patches call.
    builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
    cast, compute, dot = builder.cast_impl, builder.binary_op, builder.create_dot
    fuse = builder.create_fma

    def cast_rounded(self: Any, source: Any, target_type: Any) -> Any:
        is_bfloat16 = source.dtype.scalar == tl.bfloat16
        if target_type.scalar == tl.bfloat16:
            return source if is_bfloat16 else _rounded(source)
        return cast(self, _wide(source), target_type)

    def compute_wide(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = compute(self, _wide(left), _wide(right), operation)
        if operation in _COMPARISONS:
            return interpreter.TensorHandle(np.asarray(result.data, np.bool_), tl.int1)
        return _rounded(result) if left.dtype.scalar == tl.bfloat16 else result

    def dot_in_order(self: Any, left: Any, right: Any, start: Any, *more: Any) -> Any:
        left, right = _wide(left), _wide(right)
        if not all(operand.dtype.is_floating() for operand in (left, right, start)):
            return dot(self, left, right, start, *more)  # sums of integers don't depend on order
        result = dot_in_k_order(np.asarray(left.data), np.asarray(right.data), start.data)
        return interpreter.TensorHandle(result, start.dtype.scalar)

    def fuse_exactly(self: Any, a: Any, b: Any, c: Any) -> Any:
        if c.dtype.scalar != tl.float32:
            return fuse(self, a, b, c)
        return interpreter.TensorHandle(multiply_add(a.data, b.data, c.data), tl.float32)

    def launch_silently(self: Any, *arguments: Any, **options: Any) -> None:
        with patches, np.errstate(all="ignore"):
            launch(self, *arguments, **options)

    # Then replace them.
    builder.cast_impl, builder.binary_op = cast_rounded, compute_wide
    builder.create_dot, builder.create_fma = dot_in_order, fuse_exactly
    interpreter.GridExecutor.__call__ = launch_silently
    interpreter.InterpretedFunction.__call__ = _call_inside
    interpreter._get_np_dtype = numpy_types()
    interpreter._patch_attr = patch_builtin
    _index_scalars()
    patches = LaunchPatches(interpreter._patch_lang, _LANGUAGE)
    interpreter._patch_lang = lambda _function: patches
    # The overflow check would run for every sum and product of integers, but only raises under
    # `debug`.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


def _call_inside(self: Any, *arguments: Any, **options: Any) -> Any:
    """Call a device function without patching Triton's language again, since the launch has done
    it. The interpreter's own version patches it at every call, which takes half of all time."""
    return self.rewrite()(*arguments, **options)


def _index_scalars() -> None:
    """Let a scalar be the bound of a loop. The interpreter keeps it as an array of one element,
    which numpy since 2.4 does not convert to an integer."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
