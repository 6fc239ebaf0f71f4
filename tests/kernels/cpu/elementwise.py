"""The native library's operators between linears and attention, each as one call.

Programs (`quire.kernels.cpu.program`) run the same kernels without Python between them.
`csrc/elementwise` has the formulas. Results are rounded as in `kernels.operators` and
`kernels.rotary`.

Legend: T tokens, H heads of a token, D size of a row, V rows of the embedding table. Hq query
heads, Hkv KV heads. Operands may be [T, D] or [T, H, D], with gaps between rows.
"""

from ctypes import addressof
from typing import Any

import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import ActivationKind, OpKind
from quire.kernels.cpu.library import NativeKernels

_DENSE = torch.contiguous_format


def rms_norm(
    kernels: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float | None = None,
) -> torch.Tensor:
    """x [..., D], weight [D] -> [..., D]. Raises ValueError."""
    fields: dict[str, Any] = {"eps": eps}
    if weight is not None:
        fields["weight"] = _vector("weight", weight, x)
    kind = OpKind.RMS_NORM
    if offset is not None:
        kind, fields["factor"] = OpKind.OFFSET_RMS_NORM, offset
    return _run(kernels, kind, x, torch.empty_like(x, memory_format=_DENSE), **fields)


def layer_norm(
    kernels: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """x [..., D], weight and bias [D] -> [..., D]. Raises ValueError."""
    fields: dict[str, Any] = {"eps": eps, "weight": _vector("weight", weight, x)}
    if bias is not None:
        fields["bias"] = _vector("bias", bias, x)
    return _run(kernels, OpKind.LAYER_NORM, x, torch.empty_like(x, memory_format=_DENSE), **fields)


def scale(
    kernels: NativeKernels,
    x: torch.Tensor,
    factor: float,
    added_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., D] -> factor * x, or added_to + factor * x if `added_to` [..., D] is given.

    The sum overwrites `added_to`. Raises ValueError.
    """
    if added_to is None:
        out = torch.empty_like(x, memory_format=_DENSE)
        return _run(kernels, OpKind.SCALE, x, out, factor=factor)
    if added_to.shape != x.shape:
        raise ValueError(f"added_to is {tuple(added_to.shape)}, but x is {tuple(x.shape)}")
    return _run(kernels, OpKind.SCALE, x, added_to, added_to, factor=factor)


def gated(kernels: NativeKernels, gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """gate_up [..., 2D], gate first -> act(gate) * up, [..., D]. Raises ValueError."""
    size = gate_up.shape[-1]
    if size % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but must be [..., an even number]")
    return _run(
        kernels,
        OpKind.GATED,
        gate_up,
        gate_up.new_empty(*gate_up.shape[:-1], size // 2),
        activation=ActivationKind[gating.activation.name],
        factor=gating.alpha,
        limit=gating.limit or 0.0,
        up_offset=gating.up_offset,
    )


def gate(
    kernels: NativeKernels, x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction
) -> torch.Tensor:
    """x [..., D], by [..., D] or [..., 1] -> x * act(by), [..., D]. Raises ValueError."""
    if by.shape[:-1] != x.shape[:-1] or by.shape[-1] not in (1, x.shape[-1]):
        raise ValueError(f"by is {tuple(by.shape)}, but x is {tuple(x.shape)}")
    fields = {"activation": ActivationKind[activation.name], "second_size": by.shape[-1]}
    return _run(kernels, OpKind.GATE, x, torch.empty_like(x, memory_format=_DENSE), by, **fields)


def activate(
    kernels: NativeKernels, x: torch.Tensor, activation: ActivationFunction
) -> torch.Tensor:
    """x [..., D] -> act(x). Raises ValueError."""
    out = torch.empty_like(x, memory_format=_DENSE)
    return _run(kernels, OpKind.ACTIVATE, x, out, activation=ActivationKind[activation.name])


def soft_cap(kernels: NativeKernels, x: torch.Tensor, cap: float) -> torch.Tensor:
    """x [..., D] -> cap * tanh(x / cap). Raises ValueError."""
    out = torch.empty_like(x, memory_format=_DENSE)
    return _run(kernels, OpKind.SOFT_CAP, x, out, factor=cap)


def embed(kernels: NativeKernels, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """table [V, D], token_ids [T] int64 below V -> [T, D]. Raises ValueError."""
    _check_rows("table", table, table.dtype)
    if not table.is_contiguous() or token_ids.dtype != torch.int64 or token_ids.ndim != 1:
        raise ValueError(
            f"token_ids are {tuple(token_ids.shape)} {token_ids.dtype}, but must be [T] int64, and"
            " the table's rows must follow each other"
        )
    token_ids = token_ids.contiguous()
    size = table.shape[1]
    out = torch.empty((len(token_ids), size), dtype=table.dtype)
    op = abi.Op(kind=OpKind.EMBED, out_dtype=abi.DTYPES[table.dtype], size=size, out_stride=size)
    op.weight, op.out = table.data_ptr(), out.data_ptr()
    _run_step(kernels, op, abi.Step(num_tokens=len(token_ids), token_ids=token_ids.data_ptr()))
    return out


def rotate_and_write_kv(
    kernels: NativeKernels,
    layer: abi.AttentionLayer,
    rotary: abi.Rotary | None,
    step: abi.Step,
    heads: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Norm q and k per head if `rotary` has weights, rotate them, and store k and v. Returns q.

    The rotary_dim of `rotary` is even and at most D; later elements of a head are not rotated. If
    `rotary` is None, q and k don't change. `heads` are q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv,
    Dv] in the layer's dtype. If k and v are None, nothing is stored. Positions and slots are those
    in `step`. Raises ValueError.
    """
    q, k, v = heads
    rotary_dim = 0 if rotary is None else rotary.rotary_dim
    if rotary_dim % 2 or not 0 <= rotary_dim <= layer.head_dim:
        raise ValueError(
            f"rotary_dim is {rotary_dim}, but must be an even number up to {layer.head_dim}"
        )
    if q.shape != (step.num_tokens, layer.num_heads, layer.head_dim):
        expected = (step.num_tokens, layer.num_heads, layer.head_dim)
        raise ValueError(f"q is {tuple(q.shape)}, but must be {expected}")
    out = torch.empty_like(q, memory_format=_DENSE)
    op = _op(OpKind.ROTATE_AND_WRITE_KV, q, out)
    op.layer = addressof(layer)
    op.rotary = None if rotary is None else addressof(rotary)
    if k is not None and v is not None:
        _point(op, "second", k)
        _point(op, "third", v)
    _run_step(kernels, op, step)
    return out


def _run(
    kernels: NativeKernels,
    kind: OpKind,
    x: torch.Tensor,
    out: torch.Tensor,
    second: torch.Tensor | None = None,
    **fields: object,
) -> torch.Tensor:
    op = _op(kind, x, out, **fields)
    if second is not None:
        _check_rows("the second operand", second, x.dtype)
        _point(op, "second", second)
    _run_step(kernels, op, abi.Step(num_tokens=len(x)))
    return out


def _op(kind: OpKind, x: torch.Tensor, out: torch.Tensor, **fields: object) -> abi.Op:
    _check_rows("x", x, x.dtype)
    _check_rows("out", out, x.dtype)
    dtype = abi.DTYPES[x.dtype]
    op = abi.Op(kind=kind, dtype=dtype, out_dtype=dtype, size=out.shape[-1], **fields)
    op.num_heads = x.shape[1] if x.ndim == 3 else 1
    _point(op, "input", x)
    _point(op, "out", out)
    return op


def _point(op: abi.Op, name: str, rows: torch.Tensor) -> None:
    begin = "in" if name == "input" else name
    setattr(op, name, rows.data_ptr())
    setattr(op, f"{begin}_stride", rows.stride(0))
    setattr(op, f"{begin}_head_stride", rows.stride(1) if rows.ndim == 3 else 0)


def _run_step(kernels: NativeKernels, op: abi.Op, step: abi.Step) -> None:
    kernels.run((abi.Op * 1)(op), 1, step)


def _vector(name: str, values: torch.Tensor, x: torch.Tensor) -> int:
    """The address of a vector with one value for each element of a row of x."""
    _check_rows("x", x, x.dtype)
    _check_rows(name, values, x.dtype)
    if values.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} is {tuple(values.shape)}, but x, {tuple(x.shape)}, needs {tuple(x.shape[-1:])}"
        )
    return values.data_ptr()


def _check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    is_adjacent = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    if dtype not in abi.DTYPES or tensor.dtype != dtype or not is_adjacent or tensor.ndim > 3:
        raise ValueError(
            f"{name} is {tensor.dtype} with strides {tensor.stride()}, but must be {dtype}, one of"
            f" {', '.join(map(str, abi.DTYPES))}, with the elements of a row side by side"
        )
