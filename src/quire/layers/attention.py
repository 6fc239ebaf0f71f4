"""The attention block of a layer: projections, q/k norm, rotation and the attention call.

Called by the models. Only the `attention` callable knows where K and V are stored.

Shapes: T tokens, H hidden size, Hq query heads, Hkv KV heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.formats.weight_format import empty_parameter
from quire.kernels.activations import ActivationFunction
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles, Rotation
from quire.kernels.unnormed_rows import UnnormedRows
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import NormReader
from quire.layers.storage import Storage


@dataclass(frozen=True, slots=True)
class AttentionBias:
    """Flags for the biases of the projections."""

    qkv: bool = False
    output: bool = False


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of q and k before the rotation."""

    eps: float
    #: Whether each head is normalised separately, instead of all heads together.
    per_head: bool = True
    #: The number added to the norm's weights, if not None; see `kernels.rms_norm`.
    offset: float | None = None


class Attention(NormReader):
    """One layer's attention block. `layer` is its index in the attention call.

    If `qk_norm` is None, q and k are not normalised. If `is_gated`, the heads' results are
    multiplied by the sigmoid of a fourth projection, which has q's size (Qwen3-Next). `input_size`
    is the width of the input; None if it is the hidden size, as in most models.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        bias: AttentionBias,
        qk_norm: QKNorm | None = None,
        is_gated: bool = False,
        input_size: int | None = None,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        input_size = hidden_size if input_size is None else input_size
        self.layer = layer
        self.spec = spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.part_sizes = (q_size, kv_size, spec.num_kv_heads * spec.output_dim)
        # First, the projections.
        self.qkv_proj = Linear(
            input_size, self.part_sizes, LinearKind.COLUMN, bias=bias.qkv, **storage
        )
        self.gate_proj: Linear | None = None
        if is_gated:
            self.gate_proj = Linear(
                input_size, (q_size,), LinearKind.COLUMN, bias=bias.qkv, **storage
            )
        self.o_proj = Linear(
            spec.num_heads * spec.output_dim,
            (hidden_size,),
            LinearKind.ROW,
            bias=bias.output,
            **storage,
        )
        # Then, the sinks and the norms of q and k, which only some models have.
        self.sinks: nn.Parameter | None = None
        if spec.has_sinks:
            self.sinks = empty_parameter((spec.num_heads,), **storage)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.qk_norm = qk_norm
        if qk_norm is not None:
            head = spec.head_dim
            sizes = (head, head) if qk_norm.per_head else (q_size, kv_size)
            self.q_norm, self.k_norm = (
                RMSNorm(size, qk_norm.eps, **storage, offset=qk_norm.offset) for size in sizes
            )

    @property
    def input_linear(self) -> Linear | None:
        return self.qkv_proj if self.gate_proj is None else None

    def forward(
        self, hidden: torch.Tensor | UnnormedRows, angles: Angles | None, attention: AttentionCall
    ) -> torch.Tensor:
        """hidden [T, input size] -> [T, H]. If `angles` is None, nothing is rotated.

        The attention call gets q, k and v as strided views of the fused output, which it may
        overwrite, and a `Rotation` that says how to normalise and rotate q and k.
        """
        fused: Any = self.qkv_proj.read(hidden)  # torch's split has no types
        q, k, v = fused.split(self.part_sizes, dim=-1)
        # A norm over all heads is computed here; a norm per head is part of the rotation.
        if self.qk_norm is not None and not self.qk_norm.per_head:
            assert self.q_norm is not None and self.k_norm is not None
            q, k = self.q_norm(q, overwrites=True), self.k_norm(k, overwrites=True)
        if angles is not None and angles.growth is not None:
            assert self.qk_norm is None
            q = self.operators.gate(q, angles.growth, ActivationFunction.IDENTITY)
        q, k = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in (q, k))
        v = v.unflatten(-1, (-1, self.spec.output_dim))
        inputs = AttentionInputs(q, k, v, self.sinks, self._rotation(angles))
        attended = attention(self.layer, inputs).flatten(-2)
        if self.gate_proj is not None:
            by = self.gate_proj(hidden)
            attended = self.operators.gate(attended, by, ActivationFunction.SIGMOID)
        output: torch.Tensor = self.o_proj(attended)
        return output

    def _rotation(self, angles: Angles | None) -> Rotation | None:
        if self.qk_norm is None or not self.qk_norm.per_head:
            return None if angles is None else Rotation(angles)
        assert self.q_norm is not None and self.k_norm is not None
        weights = self.q_norm.weight, self.k_norm.weight
        return Rotation(angles, *weights, self.qk_norm.eps, self.qk_norm.offset)
