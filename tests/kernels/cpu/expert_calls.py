"""Routing and linears by head in one native call each.

Programs (`quire.kernels.cpu.program`) run the same kernels without Python between them. Results are
rounded as in `kernels.routing`.

Legend: T tokens, K inputs and N outputs of a linear.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch

from quire.kernels.cpu import experts_abi
from quire.kernels.cpu.abi import DTYPES
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.mixture import linear_array, router_struct
from quire.kernels.routing import RouterSpec, Routing


def route(
    kernels: NativeKernels,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    spec: RouterSpec,
    dtype: torch.dtype,
) -> Routing:
    """Computes `kernels.routing.route`. Raises ValueError."""
    if logits.dtype not in DTYPES or logits.ndim != 2 or logits.shape[1] != spec.num_experts:
        raise ValueError(
            f"logits are {tuple(logits.shape)} {logits.dtype}, but must be [any, "
            f"{spec.num_experts}] float32 or bfloat16"
        )
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"bias is {bias.dtype}, but must be float32, and contiguous")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    words = torch.empty((len(logits), 2 * spec.top_k))
    kernels.library.route(
        kernels.context,
        byref(router_struct(spec, bias, dtype)),
        DTYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        len(logits),
        words.data_ptr(),
        words.stride(0),
    )
    ids = words[:, : spec.top_k].view(torch.int32).long()
    return Routing(ids, words[:, spec.top_k :])


def linears_by_head(
    kernels: NativeKernels, linears: Sequence[PackedLinear], x: torch.Tensor
) -> torch.Tensor:
    """x [T, heads, K] -> [T, heads, N], by one linear per head, all of one format and size.

    Raises ValueError.
    """
    first = linears[0]
    if x.ndim != 3 or x.shape[1:] != (len(linears), first.num_inputs) or x.stride(2) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)}, but must be [any, {len(linears)}, {first.num_inputs}] with"
            " adjacent columns"
        )
    array = linear_array(linears)
    struct = experts_abi.LinearsByHead(num_heads=len(linears), linears=ctypes.addressof(array))
    out = torch.empty((len(x), len(linears), first.num_outputs), dtype=x.dtype)
    kernels.library.linears_by_head(
        kernels.context,
        byref(struct),
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        len(x),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
    )
    return out
