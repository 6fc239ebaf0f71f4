"""The input of a linear before its RMSNorm, for linears that compute the norm themselves.

The residual stream makes it, if only one linear reads the norm and its method can compute it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """Rows x, or sums `residual + scale * x`, whose RMSNorm a linear multiplies.

    The result equals that of `Operators.rms_norm` or `Operators.add_rms_norm` and the linear.
    """

    #: [T, H], contiguous.
    x: torch.Tensor
    #: [T, H], contiguous; None if x itself is normed.
    residual: torch.Tensor | None
    #: [T, H], contiguous memory of its own, to which the linear writes the sums. None if `residual`
    #: is None.
    total: torch.Tensor | None
    #: The factor by which x is multiplied before it is added.
    scale: float
    #: The norm's weight, [H].
    weight: torch.Tensor
    eps: float
    #: The number added to the norm's weight, if not None; see `kernels.rms_norm`.
    offset: float | None
