"""A causal depthwise convolution with its weights, part of Gated DeltaNet and Mamba-2.

One convolution covers several parts of a fused projection, such as q, k and v. Called by the mixers
of this folder. Shapes: T tokens, C channels, W width.
"""

from typing import Unpack

import torch

from quire.layers.fused_parameter import FusedParameter
from quire.layers.operator_module import RecurrentModule
from quire.layers.storage import Storage
from quire.recurrence.state_specs import ShortConvSpec


class CausalConv(RecurrentModule):
    """The convolution of a `ShortConvSpec`.

    `part_sizes` are the numbers of channels of the parts (q, k, v) that checkpoints store or ranks
    split separately. Their sum is C.
    """

    def __init__(
        self,
        layer: int,
        spec: ShortConvSpec,
        part_sizes: tuple[int, ...],
        *,
        has_bias: bool,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(layer)
        assert sum(part_sizes) == spec.num_channels
        # The shape in checkpoints: a convolution's weight is [C, inputs of a channel, W].
        self.conv_taps = FusedParameter(part_sizes, (1, spec.width), has_bias=has_bias, **storage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, C] -> [T, C]. The rows of x need not be adjacent in memory."""
        taps = self.conv_taps
        return self.states.short_conv(self.layer, x, taps.weight.squeeze(1), taps.bias)
