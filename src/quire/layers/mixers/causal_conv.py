"""A causal convolution of each channel by itself, with its weights.

It goes before Gated DeltaNet and Mamba-2, over several parts of a fused projection at once. Called
by the mixers of this folder. Shapes: T tokens, C channels, W width.
"""

import torch

from quire.layers.fused_parameter import FusedParameter
from quire.layers.recurrent import RecurrentModule
from quire.recurrence.state_specs import ShortConvSpec


class CausalConv(RecurrentModule):
    """See `ShortConvSpec`. part_sizes: channels of each part that a checkpoint has, or that ranks
    share out, by itself; C is their sum."""

    def __init__(
        self,
        layer: int,
        spec: ShortConvSpec,
        part_sizes: tuple[int, ...],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layer)
        assert sum(part_sizes) == spec.num_channels
        # As checkpoints have it: a convolution's weight is [C, inputs of a channel, W].
        self.conv_taps = FusedParameter(
            part_sizes, (1, spec.width), has_bias=has_bias, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, C], rows of which may lie apart -> [T, C]."""
        taps = self.conv_taps
        return self.states.short_conv(self.layer, x, taps.weight.squeeze(1), taps.bias)
