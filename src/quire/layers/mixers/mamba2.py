"""The Mamba-2 block: a state space model whose decay depends on the token.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 7; used by Falcon-H1 and Nemotron-H.
One projection computes the gate z, x, B, C and the step dt. A short convolution is applied to x, B
and C, and the scan to its result. Then z gates the scan's output, before or after an optional norm
of each group.

Shapes: T tokens, H hidden size, D = heads x head size, G groups, N state size.
"""

from dataclasses import dataclass, replace
from typing import Unpack

import torch

from quire.formats.weight_format import empty_parameter
from quire.kernels.activations import ActivationFunction
from quire.kernels.state_calls import Mamba2Inputs, Mamba2Weights
from quire.layers.linear import Linear, LinearKind
from quire.layers.mixers.causal_conv import CausalConv
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule, RecurrentModule
from quire.layers.storage import Storage
from quire.recurrence.state_specs import Mamba2Spec, ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """The sizes of one layer, or of a rank's shard of it."""

    hidden_size: int
    scan: Mamba2Spec
    conv_width: int
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    #: The eps of the groups' norms; None if there are no norms.
    norm_eps: float | None = None
    #: Whether the scan's output is multiplied by the gate before the norm, not after it.
    gates_first: bool = False
    #: The factors by which z, x, B, C and dt are multiplied.
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def part_sizes(self) -> tuple[int, int, int, int, int]:
        """The sizes of a token's z, x, B, C and dt."""
        inner, grouped = self.scan.num_heads * self.scan.head_dim, self._grouped
        return inner, inner, grouped, grouped, self.scan.num_heads

    @property
    def conv(self) -> ShortConvSpec:
        """The convolution over x, B and C."""
        return ShortConvSpec(sum(self.part_sizes[1:4]), self.conv_width)

    @property
    def _grouped(self) -> int:
        return self.scan.num_groups * self.scan.state_size

    def why_not_split(self, num_ranks: int) -> str | None:
        """The reason why it can't be split; see `models.config.ModelConfig.why_not_split`."""
        groups = self.scan.num_groups
        if self.scan.num_heads % num_ranks:
            return f"the model's {self.scan.num_heads} heads of Mamba-2 can't be shared out equally"
        if groups % num_ranks and (num_ranks % groups or self.norm_eps is not None):
            return f"the model's {groups} groups of Mamba-2's heads can't be shared out equally"
        return None

    def share(self, num_ranks: int) -> "MambaSizes":
        """The sizes of one rank's share. `why_not_split` must allow `num_ranks`."""
        scan = replace(
            self.scan,
            num_heads=self.scan.num_heads // num_ranks,
            num_groups=max(1, self.scan.num_groups // num_ranks),
        )
        return replace(self, scan=scan)


class Mamba2Mixer(RecurrentModule, OperatorModule):
    """One layer's block.

    `layer` is the index of the convolution's state, and `layer` + 1 the index of the scan's state.
    """

    factors: torch.Tensor | None

    def __init__(self, layer: int, sizes: MambaSizes, **storage: Unpack[Storage]) -> None:
        super().__init__(layer + 1)
        self.sizes, scan, parts = sizes, sizes.scan, sizes.part_sizes
        # First, the input projection, and the factors of its outputs.
        self.in_proj = Linear(
            sizes.hidden_size, parts, LinearKind.COLUMN, bias=sizes.input_bias, **storage
        )
        factors = None
        if any(factor != 1.0 for factor in sizes.factors):
            each = zip(parts, sizes.factors, strict=True)
            wide = torch.cat([torch.full((size,), factor) for size, factor in each])
            factors = wide.to(**storage)
        self.register_buffer("factors", factors, persistent=False)
        # Then, the convolution and the weights of the scan.
        self.conv = CausalConv(layer, sizes.conv, parts[1:4], has_bias=sizes.conv_bias, **storage)
        self.A_log, self.D, self.dt_bias = (
            empty_parameter((scan.num_heads,), **storage) for _ in range(3)
        )
        # Last, the norm of the output and its projection.
        self.norm: RMSNorm | None = None
        if sizes.norm_eps is not None:
            self.norm = RMSNorm(parts[0], sizes.norm_eps, **storage)
        self.out_proj = Linear(
            parts[0], (sizes.hidden_size,), LinearKind.ROW, bias=sizes.output_bias, **storage
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        scan, (inner, _, grouped, _, heads) = self.sizes.scan, self.sizes.part_sizes
        projected = self.in_proj(hidden)
        if self.factors is not None:
            projected = self.operators.scale_columns(projected, self.factors)
        z, xbc, dt = projected.split((inner, inner + 2 * grouped, heads), dim=-1)
        x, b, c = self.conv(xbc).split((inner, grouped, grouped), dim=-1)
        b, c = (part.unflatten(-1, (scan.num_groups, -1)) for part in (b, c))
        weights = Mamba2Weights(-self.A_log.float().exp(), self.D, self.dt_bias)
        inputs = Mamba2Inputs(x.unflatten(-1, (-1, scan.head_dim)), dt, b, c)
        scanned = self.states.mamba2(self.layer, inputs, weights).flatten(-2)
        output: torch.Tensor = self.out_proj(self._gated(scanned, z))
        return output

    def _gated(self, scanned: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gate, and normalise if there is a norm: scanned, z [T, D] -> [T, D]."""
        if self.norm is None:
            return self.operators.gate(scanned, z, ActivationFunction.SILU)
        groups = self.sizes.scan.num_groups
        shape = len(z), groups, z.shape[1] // groups
        scanned, z = (part.reshape(shape) for part in (scanned, z))
        weight = self.norm.weight.view(groups, -1)
        gates_first = self.sizes.gates_first
        normed = self.operators.gated_rms_norm(
            scanned, z, weight, self.norm.eps, gates_first=gates_first
        )
        return normed.flatten(-2)
