"""RMSNorm, embedding, scales, GELU gate and rotation by the native library.

Each is one call. Programs (`program.py`) run the same kernels without Python between them; this
door is for what runs layer by layer, and for tests. See `csrc/elementwise.cpp` for the formulas;
roundings are those of `kernels.rms_norm` and `kernels.rotary`.

Legend: T tokens, H size of a row, V rows of the table, Hq query heads, Hkv KV heads, D head size.
"""

from ctypes import byref, c_float

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels


def rms_norm(
    kernels: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float | None = None,
) -> torch.Tensor:
    """x [T, H], weight [H] -> [T, H]; rows of x may lie apart. Raises ValueError."""
    _check_rows("x", x, x.dtype)
    _check_rows("weight", weight, x.dtype)
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"weight is {tuple(weight.shape)}, but x, {tuple(x.shape)}, needs {tuple(x.shape[1:])}"
        )
    out = torch.empty(x.shape, dtype=x.dtype)
    num_rows, size = x.shape
    kernels.library.rms_norm(
        kernels.context,
        abi.DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        eps,
        None if offset is None else byref(c_float(offset)),
        out.data_ptr(),
        size,
        num_rows,
        size,
    )
    return out


def scale(
    kernels: NativeKernels,
    x: torch.Tensor,
    factor: float,
    added_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, H] -> factor * x, [T, H]; or added_to [T, H], to which that was added. Raises
    ValueError."""
    _check_rows("x", x, x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype) if added_to is None else added_to
    _check_rows("added_to", out, x.dtype)
    if x.ndim != 2 or out.shape != x.shape:
        raise ValueError(f"added_to is {tuple(out.shape)}, but x is {tuple(x.shape)}")
    num_rows, size = x.shape
    kernels.library.scale(
        kernels.context,
        abi.DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        factor,
        added_to is not None,
        out.data_ptr(),
        out.stride(0),
        num_rows,
        size,
    )
    return out


def gelu_mul(kernels: NativeKernels, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2H], gate first -> gelu(gate) * up, [T, H], by tanh. Raises ValueError."""
    _check_rows("gate_up", gate_up, gate_up.dtype)
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but must be [T, an even number]")
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype)
    kernels.library.gelu_mul(
        kernels.context,
        abi.DTYPES[gate_up.dtype],
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        size,
        num_rows,
        size,
    )
    return out


def embed(kernels: NativeKernels, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """table [V, H], token_ids [T] int64 below V -> [T, H]. Raises ValueError."""
    _check_rows("table", table, table.dtype)
    if not table.is_contiguous() or token_ids.dtype != torch.int64 or token_ids.ndim != 1:
        raise ValueError(
            f"token_ids are {tuple(token_ids.shape)} {token_ids.dtype}, but must be [T] int64, and"
            " the table's rows must follow each other"
        )
    token_ids = token_ids.contiguous()
    out = torch.empty((len(token_ids), table.shape[1]), dtype=table.dtype)
    kernels.library.embed(
        kernels.context,
        abi.DTYPES[table.dtype],
        table.data_ptr(),
        token_ids.data_ptr(),
        out.data_ptr(),
        len(token_ids),
        table.shape[1],
    )
    return out


def rotate_and_write_kv(
    kernels: NativeKernels,
    layer: abi.AttentionLayer,
    rotary: abi.Rotary,
    step: abi.Step,
    qkv: torch.Tensor,
) -> None:
    """Normalise q and k per head where `rotary` says so, rotate them in place, store k and v.

    rotary: its rotary_dim is even and at most D; a head's elements from there on do not rotate.

    qkv: [T, (Hq + 2 Hkv) D] in the layer's dtype, a token's heads of q, then k, then v; rows may
    lie apart. Positions and slots are the step's. Raises ValueError.
    """
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    dtypes = {number: dtype for dtype, number in abi.DTYPES.items()}
    _check_rows("qkv", qkv, dtypes[abi.DType(layer.dtype)])
    if qkv.shape != (step.num_tokens, width):
        raise ValueError(f"qkv is {tuple(qkv.shape)}, but must be {(step.num_tokens, width)}")
    if rotary.rotary_dim % 2 or not 0 < rotary.rotary_dim <= layer.head_dim:
        raise ValueError(
            f"rotary_dim is {rotary.rotary_dim}, but must be an even number up to {layer.head_dim}"
        )
    kernels.library.rotate_and_write_kv(
        kernels.context, byref(layer), byref(rotary), byref(step), qkv.data_ptr(), qkv.stride(0)
    )


def _check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in abi.DTYPES or tensor.dtype != dtype or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} is {tensor.dtype} with strides {tensor.stride()}, but must be {dtype}, one of"
            f" {', '.join(map(str, abi.DTYPES))}, with the elements of a row side by side"
        )
