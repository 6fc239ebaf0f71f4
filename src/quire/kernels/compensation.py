"""Rounds rotated weights to int8 so that errors cancel for typical inputs of their linear.

Rounding a weight changes its output by the rounding error times the input. Inputs of a block are
correlated, so the later weights of the block can compensate most of the change: after input j is
rounded, its error times `feedback[j, k]` is subtracted from each later input k. The factors come
from the Gram matrix of typical inputs, as in GPTQ (arXiv:2210.17323, section 3), but within blocks
only, so that no linear needs the matrix of all its inputs. Scales, layouts and products are the
same as with `quantize_int8_weight`. `cpu/csrc/rounding/compensate_int8.cpp` stores the same bytes.

Shapes: T tokens, N rows of a weight, K inputs, B blocks of 64 inputs.
"""

import torch

from quire.kernels.quantize import INT8_LEVELS, int8_factors, rotate_blocks, rotation_size

BLOCK = 64
"""The number of inputs that are rounded together, which is also the size of a rotated block."""

DAMPING = 0.5
"""The share of the Gram matrix's mean diagonal that is added to its diagonal. A sample of few
tokens spans few directions of the inputs, and rounding should not assume zeros in the other
directions. On layers of SmolLM2-135M, shares of 0.1 to 2 differed by less than 6% in the error of
other texts."""


def can_compensate(num_inputs: int) -> bool:
    """Whether `num_inputs` is a multiple of 64."""
    return rotation_size(num_inputs) == BLOCK


def error_feedback(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], typical inputs of a linear -> feedback [B, 64, 64] fp32.

    With the damped Gram matrix H of a block's rotated inputs and the upper Cholesky factor U of its
    inverse, the feedback is U with each row divided by its diagonal element. A block whose inputs
    are all zero, or not finite, gets the identity, with which rounding is not compensated.
    """
    rotation = rotate_blocks(torch.eye(BLOCK, device=x.device), BLOCK).double()
    rotated = x.double().view(len(x), -1, BLOCK).transpose(0, 1) @ rotation
    gram = rotated.mT @ rotated
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += DAMPING * diagonal.mean(-1, keepdim=True)
    # H = R R^T with an upper R, found with rows and columns in reverse. Then U is the inverse of R.
    lower, failures = torch.linalg.cholesky_ex(gram.flip(1, 2))
    identity = torch.eye(BLOCK, dtype=gram.dtype, device=x.device).expand_as(gram)
    upper = torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
    feedback = upper / upper.diagonal(dim1=1, dim2=2)[..., None]
    is_sound = (failures == 0) & feedback.isfinite().all(-1).all(-1)
    return torch.where(is_sound[:, None, None], feedback, identity).float()


def compensate_int8(
    rows: torch.Tensor, feedback: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [N, K] of a weight -> (levels [N, K] int8, scales [N] fp32).

    Like `quantize_int8_weight`, with the same scales, but errors are compensated by `feedback` [B,
    64, 64].
    """
    rotated = rotate_blocks(rows, BLOCK) * (1.0 / BLOCK)
    factors, scales = int8_factors(rotated)
    is_rounded = factors > 0
    steps = torch.where(is_rounded, scales, 0.0)
    blocks = torch.where(is_rounded[:, None], rotated, 0.0).view(len(rows), -1, BLOCK)
    x = blocks.permute(2, 1, 0).contiguous()
    for j in range(BLOCK):
        level = (x[j] * factors).clamp_(-INT8_LEVELS, INT8_LEVELS).nan_to_num_(-INT8_LEVELS)
        level.round_()
        error = x[j] - level * steps
        x[j + 1 :] -= feedback[:, j, j + 1 :].T[..., None] * error
        x[j] = level
    return x.permute(2, 1, 0).reshape(rows.shape).to(torch.int8), scales
