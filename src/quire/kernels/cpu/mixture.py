"""Mixtures of experts on the CPU: routing, and products of many linears in one native call.

Programs (`program.py`) run the same kernels without Python between them. `mix_experts` serves
models that run layer by layer. `csrc/experts` explains the order of the work. Results are rounded
as in `kernels.routing` and `kernels.experts`.

Legend: T tokens, E experts, K experts of a token, H hidden size, F an expert's intermediate size.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch

from quire.kernels.activations import Gating
from quire.kernels.cpu import experts_abi
from quire.kernels.cpu.abi import DTYPES, ActivationKind
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.routing import RouterSpec, Routing, Scoring

_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1, Scoring.SOFTMAX_OF_CHOSEN: 2}


class PackedExperts:
    """A layer's packed experts, as the library reads them."""

    def __init__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        gating: Gating,
        top_k: int,
    ) -> None:
        """Each linear of `gate_up` is [2 F, H], with gate and up interleaved; each linear of `down`
        is [H, F]. Raises ValueError for linears that don't fit each other."""
        first_up, first_down = gate_up[0], down[0]
        if len(gate_up) != len(down) or not first_up.interleave:
            raise ValueError(
                f"there are {len(gate_up)} gate_up and {len(down)} down, but must be equally many,"
                " and gate_up must interleave gate and up"
            )
        if first_down.num_inputs != first_up.interleave:
            raise ValueError(
                f"down has {first_down.num_inputs} inputs, but gate {first_up.interleave} outputs"
            )
        self.num_inputs, self.num_outputs = first_up.num_inputs, first_down.num_outputs
        self.dtype, self.top_k, self.num_experts = first_up.dtype, top_k, len(gate_up)
        up, downs = linear_array(gate_up), linear_array(down)
        self._kept = (gate_up, down, up, downs)
        self.struct = experts_abi.ExpertsLayer(
            num_experts=len(gate_up),
            top_k=top_k,
            is_plain=gating == Gating(),
            activation=ActivationKind[gating.activation.name],
            limit=gating.limit or 0.0,
            factor=gating.alpha,
            up_offset=gating.up_offset,
            gate_up=ctypes.addressof(up),
            down=ctypes.addressof(downs),
        )


def linear_array(linears: Sequence[PackedLinear]) -> "ctypes.Array[ctypes.c_void_p]":
    """The addresses of the linears' structures. The caller keeps the linears alive.

    Raises ValueError for linears of different formats or sizes.
    """
    first = linears[0]
    for linear in linears:
        if linear.kind != first.kind:
            raise ValueError(
                f"linears are {first.kind} and {linear.kind}, but must be of one format and size"
            )
    return (ctypes.c_void_p * len(linears))(*(ctypes.addressof(each.struct) for each in linears))


def router_struct(
    spec: RouterSpec, bias: torch.Tensor | None, dtype: torch.dtype
) -> experts_abi.RouterLayer:
    """The structure of a router. The caller keeps `bias` [E] fp32 alive. `dtype` is the model's
    dtype."""
    address = None if bias is None else bias.data_ptr()
    return experts_abi.RouterLayer(
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        scoring=_SCORINGS[spec.scoring],
        renormalizes=spec.renormalizes,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        sums_best=spec.sums_best,
        rounds=spec.rounds and dtype is torch.bfloat16,
        scale=spec.scale,
        bias=None if spec.has_scales else address,
        scales=address if spec.has_scales else None,
    )


def mix_experts(
    kernels: NativeKernels, layer: PackedExperts, x: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """x [T, H] -> [T, H], like `kernels.experts.mix_experts`. Raises ValueError."""
    if x.dtype is not layer.dtype or x.ndim != 2 or x.shape[1] != layer.num_inputs:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, but must be [any, {layer.num_inputs}] {layer.dtype}"
        )
    shape = (len(x), layer.top_k)
    if routing.ids.shape != shape or routing.weights.shape != shape:
        raise ValueError(f"routing is {tuple(routing.ids.shape)}, but must be {shape}")
    if len(x) and not 0 <= int(routing.ids.min()) <= int(routing.ids.max()) < layer.num_experts:
        raise ValueError(f"routing has an id that is not within [0, {layer.num_experts})")
    x = x if x.stride(1) == 1 else x.contiguous()
    words = torch.cat((routing.ids.int().view(torch.float32), routing.weights.float()), dim=1)
    out = torch.empty((len(x), layer.num_outputs), dtype=x.dtype)
    kernels.library.experts(
        kernels.context,
        byref(layer.struct),
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        words.data_ptr(),
        words.stride(0),
        len(x),
        out.data_ptr(),
        out.stride(0),
    )
    return out
