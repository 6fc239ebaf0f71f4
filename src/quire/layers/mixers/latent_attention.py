"""Multi-head latent attention (MLA): all heads attend to one small latent vector per token.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1. In prefill and decode, a head's key projection
is applied to its query, and its value projection to its result, so keys and values are never
computed (see `attention.interface`). Called by the models.

Shapes: T tokens, H heads, L size of the latent, N elements of a head without rotation, R elements
with rotation, V size of a head's value, Q size of the compressed query.
"""

from dataclasses import dataclass
from typing import Unpack

import torch

from quire.attention.interface import AttentionCall
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles
from quire.layers.linear import AdapterHalf, Linear, LinearKind
from quire.layers.mixers.head_linears import HeadLinears
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage

LATENT_NORM_EPS = 1e-6
"""The eps of both latents' norms, independent of the model's other norms."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes L, N, R, V and Q of one layer."""

    latent: int
    nope: int
    rope: int
    value: int
    #: None if queries are projected from the hidden state without compression.
    query: int | None
    #: The number of the rank's first head in the whole model.
    first_head: int = 0


class LatentAttention(OperatorModule):
    """One layer's attention block. `layer` is its index in the attention call.

    `has_bias` applies to the projections from and to the hidden size.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        *,
        has_bias: bool,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        self.layer, self.num_heads, self.sizes = layer, num_heads, sizes

        def linear(inputs: int, outputs: tuple[int, ...], kind: LinearKind, bias: bool) -> Linear:
            return Linear(inputs, outputs, kind, bias=bias, **storage)

        kv = (sizes.latent, sizes.rope)
        self.kv_a_proj = linear(hidden_size, kv, LinearKind.REPLICATED, has_bias)
        self.q_a_layernorm: RMSNorm | None = None
        if sizes.query is not None:
            self.q_a_proj = linear(hidden_size, (sizes.query,), LinearKind.REPLICATED, has_bias)
            self.q_a_layernorm = RMSNorm(sizes.query, LATENT_NORM_EPS, **storage)
        queries = (num_heads * sizes.nope, num_heads * sizes.rope)
        self.q_b_proj = linear(sizes.query or hidden_size, queries, LinearKind.COLUMN, False)
        self.kv_a_layernorm = RMSNorm(sizes.latent, LATENT_NORM_EPS, **storage)
        heads = range(sizes.first_head, sizes.first_head + num_heads)
        # Checkpoints store the projections to keys and values in one linear. The projection to keys
        # is used transposed.
        of_keys = sizes.nope, sizes.latent, AdapterHalf.B
        of_values = sizes.latent, sizes.value, AdapterHalf.A
        self.k_up = HeadLinears(heads, *of_keys, **storage)
        self.v_up = HeadLinears(heads, *of_values, **storage)
        values = num_heads * sizes.value
        self.o_proj = linear(values, (hidden_size,), LinearKind.ROW, has_bias)

    def forward(
        self, hidden: torch.Tensor, angles: Angles | None, attention: AttentionCall
    ) -> torch.Tensor:
        """hidden [T, hidden size] -> [T, hidden size]."""
        assert angles is not None
        sizes, heads = self.sizes, (self.num_heads, -1)
        latent, k = self.kv_a_proj(hidden).split((sizes.latent, sizes.rope), dim=-1)
        query = hidden
        if self.q_a_layernorm is not None:
            query = self.q_a_layernorm(self.q_a_proj(hidden))
        widths = (self.num_heads * sizes.nope, self.num_heads * sizes.rope)
        nope, rope = self.q_b_proj(query).split(widths, dim=-1)
        absorbed = self.k_up(nope.unflatten(-1, heads))
        q = self.operators.join_turned(absorbed, rope.unflatten(-1, heads), angles)
        latent = self.kv_a_layernorm(latent)
        k = self.operators.join_turned(latent.unsqueeze(1), k.unsqueeze(1), angles)
        attended = attention(self.layer, AttentionInputs(q, k, None))
        output: torch.Tensor = self.o_proj(self.v_up(attended).flatten(-2))
        return output
