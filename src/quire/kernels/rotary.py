"""Rotary position embedding in torch (arXiv:2104.09864).

It uses the half-split layout of published checkpoints.

    out[:R/2]  = x[:R/2] * cos - x[R/2:R] * sin
    out[R/2:R] = x[R/2:R] * cos + x[:R/2] * sin
    out[R:]    = x[R:]

`layers.attention` describes the rotation of q and k by a `Rotation`. Attention backends apply it,
by `rotate` or fused with the write of K and V. `layers.rotary` makes the table of cosines and sines
for each rope type.

Shapes: T tokens, Hq query heads, Hkv KV heads, D head size (even), R rotated elements of a head
(even, at most D; D in most models). Cosines and sines hold each of their R/2 values twice: [c, c].
All tensors have one dtype; q and k may be strided views.
"""

from dataclasses import dataclass

import torch

from quire.kernels.rms_norm import rms_norm


class Angles:
    """The rotation angles of a step's tokens."""

    def __init__(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> None:
        #: [max_model_len, R] fp32, for each position R/2 cosines, then R/2 sines.
        self.table = table
        #: [T] int64.
        self.positions = positions
        #: The model's dtype, to which cosines and sines are rounded before the products.
        self.dtype = dtype
        #: [T, 1], the factor by which a model multiplies each query before the rotation; None for
        #: no factors.
        self.growth: torch.Tensor | None = None
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of each token, [T, R] each, gathered once for all layers."""
        if self._cos_sin is None:
            rows = self.table.index_select(0, self.positions).to(self.dtype)
            cos, sin = rows.chunk(2, dim=-1)
            self._cos_sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return self._cos_sin


@dataclass(frozen=True, slots=True)
class Rotation:
    """The norms and the rotation of q and k before attention."""

    #: None if q and k are not rotated.
    angles: Angles | None
    #: [D], the weight of the RMSNorm of each head of q before the rotation; None for no norm.
    q_norm: torch.Tensor | None = None
    #: [D], the weight of the RMSNorm of each head of k before the rotation; None for no norm.
    k_norm: torch.Tensor | None = None
    #: The parameters of these norms, as in `kernels.rms_norm`.
    eps: float = 0.0
    norm_offset: float | None = None


def rotate(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k [T, Hkv, D] -> (q, k) normed and rotated; q and k may be overwritten."""
    if rotation.q_norm is not None:
        q = rms_norm(q, rotation.q_norm, rotation.eps, rotation.norm_offset)
    if rotation.k_norm is not None:
        k = rms_norm(k, rotation.k_norm, rotation.eps, rotation.norm_offset)
    if rotation.angles is None:
        return q, k
    return rotary(q, k, *rotation.angles.cos_sin(), in_place=True)


def rotate_queries(q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Like `rotate`, for q only."""
    return rotate(q, q[:, :0], rotation)[0]


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k [T, Hkv, D], cos and sin [T, R] -> (rotated q, rotated k).

    With `in_place`, the results overwrite q and k.
    """
    num_tokens, _, size = q.shape
    rotary_dim = cos.shape[-1]
    is_even_part = 0 < rotary_dim <= size and rotary_dim % 2 == 0
    are_alike = cos.shape == sin.shape == (num_tokens, rotary_dim)
    if not (is_even_part and are_alike) or k.shape[::2] != (num_tokens, size):
        raise ValueError(
            f"k is {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}, but for q, "
            f"{tuple(q.shape)}, k must have the same tokens and head size, and cos and sin must be "
            f"{(num_tokens, size)} or narrower, with an even width"
        )
    if not (q.dtype == k.dtype == cos.dtype == sin.dtype):
        raise ValueError(
            f"q, k, cos and sin must have one dtype, but have {q.dtype}, {k.dtype}, {cos.dtype} "
            f"and {sin.dtype}"
        )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotary_torch(q, cos, sin, in_place), _rotary_torch(k, cos, sin, in_place)


def _rotary_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_place: bool
) -> torch.Tensor:
    size = cos.shape[-1]
    if size < x.shape[-1]:
        rotated = _rotary_torch(x[..., :size], cos, sin, in_place)
        return x if in_place else torch.cat((rotated, x[..., size:]), dim=-1)
    half = size // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1).mul_(sin)
    # A fused multiply-add would omit a rounding of transformers.
    return (x.mul_(cos) if in_place else x * cos).add_(swapped)
