"""The 4-bit format of K and V that loses least: `quire bench perplexity` measures its loss.

14 formats of 4 bits were compared: symmetric, with offsets, NF4, FP4; groups of 16, 32 and D;
rotated or not. Only groups of 16 lose less, but they take 0.75 bytes per element.
"""

import torch

from quire.attention.kv_format import Arrays, KVFormat, VectorFormat, rotate_vectors
from quire.errors import ConfigurationError

_GROUP, _LARGEST_LEVEL = 32, 15.0
# The smallest scale, so that a vector of zeros is not divided by zero.
_SMALLEST = 1e-30


class _Int4(VectorFormat):
    """Vectors are rotated. The 16 levels of a group of 32 elements range from its minimum to its
    maximum. Two levels are stored in a byte, and a scale and an offset for each group."""

    dtype = torch.uint8

    def arrays(self, head_dim: int) -> Arrays:
        if head_dim % _GROUP:
            raise ConfigurationError(
                f"int4 has groups of {_GROUP} elements, but this model's head size is {head_dim}"
            )
        factors = (torch.bfloat16, (head_dim // _GROUP,))
        return (self.dtype, (head_dim // 2,)), factors, factors

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = rotate_vectors(x).view(*x.shape[:-1], -1, _GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / _LARGEST_LEVEL).clamp_min(_SMALLEST).bfloat16()
        offsets = low.bfloat16()
        levels = (groups - offsets.float()[..., None]) / scales.float()[..., None]
        levels = levels.round_().clamp_(0.0, _LARGEST_LEVEL).to(torch.uint8).flatten(-2)
        return levels[..., ::2] | levels[..., 1::2] << 4, scales, offsets

    def decode(self, *arrays: torch.Tensor) -> torch.Tensor:
        pairs, scales, offsets = arrays
        levels = torch.stack((pairs & 15, pairs >> 4), -1).view(*scales.shape, _GROUP)
        groups = levels * scales.float()[..., None] + offsets.float()[..., None]
        return rotate_vectors(groups.flatten(-2))


INT4 = KVFormat("int4", _Int4(), _Int4())
