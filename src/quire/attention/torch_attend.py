"""Dense attention in fp32 and the merging of parts, for the torch backend.

Knows no blocks and no steps. A part is attention over some of the keys: its output, normalized,
and its natural log-sum-exp. Parts over disjoint keys merge exactly:
out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i))).

Shapes: b batch, h heads, m queries, l keys, D head size.
"""

from dataclasses import dataclass

import torch

_NEVER = float("-inf")

Part = tuple[torch.Tensor, torch.Tensor]


def attend_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool,
    mask: torch.Tensor | None,
) -> Part:
    """q [b, h, m, D], k and v [b, h, l, D], on the CPU -> out [b, h, m, D], lse [b, h, m].

    is_causal: query i sees the keys up to i. mask: added to the scores, broadcast to [b, h, m, l].
    Where a query sees no key, out is 0 and lse is not to be used. This is the operator under
    `scaled_dot_product_attention`; only called directly does it give the log-sum-exp.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, lse


def attend_materialized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool,
    mask: torch.Tensor | None,
    soft_cap: float | None,
) -> Part:
    """As `attend_fused` on any device, with a soft cap, holding a score matrix [b, h, m, l]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, _NEVER)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, dim=-1)
    probs = scores.sub_(lse.masked_fill(lse == _NEVER, 0.0)[..., None]).exp_()
    return torch.matmul(probs, v), lse


def merge_two(first: Part, second: Part) -> Part:
    """Merge parts of the same queries. Every query saw a key of the first part."""
    lse = torch.logaddexp(first[1], second[1])
    out = first[0] * (first[1] - lse).exp_()[..., None]
    out += second[0] * (second[1] - lse).exp_()[..., None]
    return out, lse


@dataclass(frozen=True, slots=True)
class TileParts:
    """Decode tiles before they are merged: acc [n, Hq, D] is the sum of exp(score - peak) * value,
    mass [n, Hq] the sum of exp(score - peak), peak [n, Hq] the greatest score."""

    acc: torch.Tensor
    mass: torch.Tensor
    peak: torch.Tensor


def pack_queries(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """q [S, Hq, D] -> [S, packs, P * G, P * D]: P KV heads side by side, zeros off the diagonal.

    The G query heads of a KV head make a matrix product of very few rows. P heads in one product
    multiply zeros too, but read K as it lies and call the library less often: 15 to 20 % faster
    for 4 and 12 query heads (AMD EPYC, 2 cores). P is the most with P * G <= 8.
    """
    num_rows, num_heads, head_dim = q.shape
    group_size = num_heads // num_kv_heads
    pack = 1
    while num_kv_heads % (2 * pack) == 0 and 2 * pack * group_size <= 8:
        pack *= 2
    q = q.reshape(num_rows, -1, pack, group_size, head_dim)
    packed = q.new_zeros(num_rows, q.shape[1], pack, group_size, pack, head_dim)
    packed.diagonal(dim1=2, dim2=4).copy_(q.permute(0, 1, 3, 4, 2))
    return packed.view(num_rows, -1, pack * group_size, pack * head_dim)


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    head_dim: int,
    mask: torch.Tensor | None,
    soft_cap: float | None,
) -> TileParts:
    """q [n, packs, P * G, P * D] as packed, scaled; k, v [n, l, Hkv * D]; mask [n, 1, l].

    A tile's result does not depend on the others in the call: a single tile is computed twice,
    because for a batch of one the library splits the product itself among the threads.
    """
    num_tiles, num_packs, _, width = q.shape
    if num_tiles == 1:
        q, k, v = (x.expand(2, *x.shape[1:]) for x in (q, k, v))
    packs = [slice(i * width, (i + 1) * width) for i in range(num_packs)]
    products = [torch.bmm(q[:, i], k[:, :, p].transpose(1, 2)) for i, p in enumerate(packs)]
    scores = torch.cat(products, dim=1) if num_packs > 1 else products[0]
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask
    peak = scores.amax(dim=-1, keepdim=True)
    probs = scores.sub_(peak).exp_()
    parts = probs.chunk(num_packs, dim=1)
    sums = [torch.bmm(x, v[:, :, p]) for x, p in zip(parts, packs, strict=True)]
    acc = torch.cat([_unpack(x, head_dim) for x in sums], dim=1)
    mass = probs.sum(dim=-1)
    return TileParts(acc[:num_tiles], mass[:num_tiles], peak[:num_tiles, :, 0])


def _unpack(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[n, P * G, P * D] -> its diagonal [n, P * G, D]: what each head made of its own values."""
    num_tiles, num_heads, width = packed.shape
    pack = width // head_dim
    blocks = packed.view(num_tiles, pack, num_heads // pack, pack, head_dim)
    own = blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return own.reshape(num_tiles, num_heads, head_dim)


def merge_tiles(tiles: TileParts, rows: torch.Tensor, num_rows: int) -> Part:
    """Sum tile i into row rows[i] -> out [num_rows, Hq, D], lse [num_rows, Hq].

    On the CPU a row's tiles are summed in their order in `rows`, whatever lies between them.
    """
    num_heads, head_dim = tiles.acc.shape[1:]
    index = rows[:, None].expand_as(tiles.peak)
    peak = tiles.peak.new_full((num_rows, num_heads), _NEVER)
    peak.scatter_reduce_(0, index, tiles.peak, "amax")
    weight = (tiles.peak - peak[rows]).exp_()
    mass = weight.new_zeros(num_rows, num_heads).index_add_(0, rows, tiles.mass * weight)
    total = weight.new_zeros(num_rows, num_heads, head_dim)
    total.index_add_(0, rows, tiles.acc * weight[..., None])
    return total.div_(mass[..., None]), mass.log_().add_(peak)


def add_sinks(part: Part, sinks: torch.Tensor) -> Part:
    """Let a learned logit per head, sinks [H], join the softmax of out [T, H, D], lse [T, H]."""
    out, lse = part
    sinks = sinks.to(lse.dtype)
    return out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)
