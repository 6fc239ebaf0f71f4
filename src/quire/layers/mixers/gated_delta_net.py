"""Gated DeltaNet: linear attention with a decaying state that the delta rule updates.

Source: Yang et al., "Gated Delta Networks", 2024; used by Qwen3-Next and Qwen3.5. Projections
compute q, k, v, the output gate z, and b and a for each value head. A short convolution is applied
to q, k and v, and the gated delta rule to its result. Last, each head's output is normalised and
gated by z.

Shapes: T tokens, H hidden size, Hk key heads, Hv value heads, dk and dv their sizes, C = 2 Hk dk +
Hv dv channels of the convolution.
"""

from dataclasses import dataclass
from typing import Unpack

import torch

from quire.formats.weight_format import empty_parameter
from quire.kernels.state_calls import GatedDeltaInputs
from quire.layers.linear import Linear, LinearKind
from quire.layers.mixers.causal_conv import CausalConv
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule, RecurrentModule
from quire.layers.storage import Storage
from quire.recurrence.state_specs import GatedDeltaSpec, ShortConvSpec


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """The sizes of one layer, or of a rank's shard of it."""

    hidden_size: int
    delta: GatedDeltaSpec
    conv_width: int

    @property
    def part_sizes(self) -> tuple[int, int, int]:
        """The sizes of a token's q, k and v."""
        keys = self.delta.num_k_heads * self.delta.key_dim
        return keys, keys, self.delta.num_v_heads * self.delta.value_dim

    @property
    def conv(self) -> ShortConvSpec:
        """The convolution over q, k and v."""
        return ShortConvSpec(sum(self.part_sizes), self.conv_width)


class GatedDeltaNet(RecurrentModule, OperatorModule):
    """One layer's block, which replaces attention.

    `layer` is the index of the convolution's state, and `layer` + 1 the index of the delta rule's
    state.
    """

    def __init__(
        self, layer: int, sizes: DeltaNetSizes, eps: float, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(layer + 1)
        self.spec, parts = sizes.delta, sizes.part_sizes
        heads = self.spec.num_v_heads
        self.in_proj, self.in_proj_ba = (
            Linear(sizes.hidden_size, each, LinearKind.COLUMN, bias=False, **storage)
            for each in ((*parts, parts[2]), (heads, heads))
        )
        # Gates are not quantized, since they affect all later tokens, and have few weights.
        self.in_proj_ba.stays_dense = True
        self.conv = CausalConv(layer, sizes.conv, parts, has_bias=False, **storage)
        self.A_log = empty_parameter((heads,), **storage)
        self.dt_bias = empty_parameter((heads,), **storage)
        self.norm = RMSNorm(self.spec.value_dim, eps, **storage)
        self.out_proj = Linear(
            parts[2], (sizes.hidden_size,), LinearKind.ROW, bias=False, **storage
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        spec, inner = self.spec, self.spec.num_v_heads * self.spec.value_dim
        projected = self.in_proj(hidden)
        qkv, z = projected.split((projected.shape[-1] - inner, inner), dim=-1)
        b, a = self.in_proj_ba(hidden).chunk(2, dim=-1)
        keys = spec.num_k_heads * spec.key_dim
        q, k, v = self.conv(qkv).split((keys, keys, qkv.shape[-1] - 2 * keys), dim=-1)
        q, k = (part.unflatten(-1, (-1, spec.key_dim)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, spec.value_dim)) for part in (v, z))
        g, beta = self.operators.delta_gates(a, b, self.A_log, self.dt_bias)
        read = self.states.gated_delta(self.layer, GatedDeltaInputs(q, k, v, g, beta))
        gated = self.operators.gated_rms_norm(read, z, self.norm.weight, self.norm.eps)
        output: torch.Tensor = self.out_proj(gated.flatten(-2))
        return output
