"""Rotary position embedding in torch (arXiv:2104.09864).

In the half-split layout of published checkpoints.

    out[:R/2]  = x[:R/2] * cos - x[R/2:R] * sin
    out[R/2:R] = x[R/2:R] * cos + x[:R/2] * sin
    out[R:]    = x[R:]

`layers.attention` says with a `Rotation` what is to be done to q and k, and the attention backends
do it, by `rotate` or fused with the write of K and V. Knows no rope types: the table of cosines and
sines comes from `layers.rotary`.

Shapes: T tokens, Hq query heads, Hkv KV heads, D head size (even), R elements of a head that rotate
(even, at most D; in most models D). cos and sin hold each of their R/2 values twice: [c, c]. All
tensors have one dtype; q and k may be strided views.
"""

from dataclasses import dataclass

import torch

from quire.kernels.rms_norm import rms_norm


class Angles:
    """How far the tokens of a step are turned.

    table: [max_model_len, R] fp32, for each position R/2 cosines, then R/2 sines. positions: [T]
    int64. dtype: the model's, to which cosines and sines are rounded before they multiply.
    growth: [T, 1], by which the models multiply queries before they are turned; None: by nothing.
    """

    def __init__(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> None:
        self.table = table
        self.positions = positions
        self.dtype = dtype
        self.growth: torch.Tensor | None = None
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, [T, R] each, every value twice: gathered once for all layers."""
        if self._cos_sin is None:
            rows = self.table.index_select(0, self.positions).to(self.dtype)
            cos, sin = rows.chunk(2, dim=-1)
            self._cos_sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return self._cos_sin


@dataclass(frozen=True, slots=True)
class Rotation:
    """What is done to q and k before they are stored and compared.

    angles: None: they are not turned. q_norm, k_norm: [D], weights of the RMSNorm of each head
    before it is turned; None: it has none. eps, norm_offset: of those norms, as of
    `kernels.rms_norm`.
    """

    angles: Angles | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    norm_offset: float | None = None


def rotate(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k [T, Hkv, D] -> (normed and rotated q, k); both may be overwritten."""
    if rotation.q_norm is not None:
        q = rms_norm(q, rotation.q_norm, rotation.eps, rotation.norm_offset)
    if rotation.k_norm is not None:
        k = rms_norm(k, rotation.k_norm, rotation.eps, rotation.norm_offset)
    if rotation.angles is None:
        return q, k
    return rotary(q, k, *rotation.angles.cos_sin(), in_place=True)


def rotate_queries(q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """The q of `rotate`, where there is no k."""
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

    in_place: write the results over q and k, and return those.
    """
    num_tokens, _, size = q.shape
    rotary_dim = cos.shape[-1]
    is_even_part = 0 < rotary_dim <= size and rotary_dim % 2 == 0
    are_alike = cos.shape == sin.shape == (num_tokens, rotary_dim)
    if not (is_even_part and are_alike) or k.shape[::2] != (num_tokens, size):
        raise ValueError(
            f"k is {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}, but q, "
            f"{tuple(q.shape)}, needs the same tokens and head size, cos and sin "
            f"{(num_tokens, size)}, or an even part of that head size"
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
    # Multiply, then add: a fused multiply-add would round once less than transformers does.
    return (x.mul_(cos) if in_place else x * cos).add_(swapped)
