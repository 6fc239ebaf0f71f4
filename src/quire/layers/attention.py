"""The attention block around the attention call: projections, q/k norm, rotary.

Called by the models. Where K and V are kept is the business of the `attention` callable alone.

Shapes: T tokens, H hidden size, Hq query heads, Hkv KV heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import nn

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.kernels.cpu import abi
from quire.kernels.cpu.program import Buffer, ProgramBuilder
from quire.kernels.rotary import Angles, Rotation
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import RMSNorm
from quire.layers.packed_linear import packed


@dataclass(frozen=True, slots=True)
class AttentionBias:
    """Which projections have a bias."""

    qkv: bool = False
    output: bool = False


class Attention(nn.Module):
    """One layer's attention block; `layer` is its index in the attention call.

    qk_norm_eps: normalise each head of q and k before the rotation; None: don't.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        bias: AttentionBias,
        qk_norm_eps: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.part_sizes = (q_size, kv_size, kv_size)
        self.qkv_proj = Linear(
            hidden_size,
            self.part_sizes,
            LinearKind.COLUMN,
            bias=bias.qkv,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            q_size, (hidden_size,), LinearKind.ROW, bias=bias.output, dtype=dtype, device=device
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, qk_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(spec.head_dim, qk_norm_eps, dtype=dtype, device=device)

    def forward(
        self, hidden: torch.Tensor, angles: Angles, attention: AttentionCall
    ) -> torch.Tensor:
        """hidden [T, H] -> [T, H].

        The attention call gets q, k and v as strided views of the fused output, which is its to
        overwrite, and is told how to norm and rotate the first two.
        """
        head_dim = self.spec.head_dim
        q, k, v = (
            part.unflatten(-1, (-1, head_dim))
            for part in self.qkv_proj(hidden).split(self.part_sizes, dim=-1)
        )
        rotation = Rotation(angles)
        if self.q_norm is not None and self.k_norm is not None:
            rotation = Rotation(angles, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        attended = attention(self.layer, q, k, v, rotation=rotation)
        output: torch.Tensor = self.o_proj(attended.flatten(-2))
        return output

    def lower(
        self, program: ProgramBuilder, normed: Buffer, rope_table: torch.Tensor, residual: Buffer
    ) -> None:
        """`forward` of normed, added to the residual stream, as operations of a native program.

        rope_table: of all positions, as `layers.rotary` keeps it.
        """
        rotation = abi.Rotary(table=rope_table.data_ptr())
        if self.q_norm is not None and self.k_norm is not None:
            rotation.q_norm = self.q_norm.weight.data_ptr()
            rotation.k_norm = self.k_norm.weight.data_ptr()
            rotation.norm_eps = self.q_norm.eps
        qkv = program.linear(normed, packed(self.qkv_proj), "qkv")
        program.keep(self, rope_table)
        program.rotate_and_write_kv(self.layer, qkv, rotation)
        attended = program.attention(self.layer, qkv)
        program.add_linear(attended, packed(self.o_proj), residual)
