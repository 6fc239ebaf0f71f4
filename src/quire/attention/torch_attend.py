"""Dense attention in fp32 and the merging of parts, for the torch backend.

Knows no blocks and no steps. A part is attention over some of the keys: its output, normalized,
and its natural log-sum-exp. Parts over disjoint keys merge exactly:
out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i))).

Shapes: b batch, h heads, m queries, l keys, D head size.
"""

from dataclasses import dataclass
from functools import cache

import torch

_NEVER = float("-inf")
_PROBED_TILE_TOKENS = 32

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
    """Decode tiles before they are merged, an item for each tile, row and KV head, in any order:
    acc [n, G, D] is the sum of exp(score - peak) * value, mass [n, G] the sum of exp(score - peak),
    peak [n, G] the greatest score."""

    acc: torch.Tensor
    mass: torch.Tensor
    peak: torch.Tensor

    @staticmethod
    def num_elements(num_items: int, group_size: int, head_dim: int) -> int:
        """How large a buffer `over` takes."""
        return num_items * group_size * (head_dim + 2)

    @staticmethod
    def over(buffer: torch.Tensor, group_size: int, head_dim: int) -> "TileParts":
        """Views of a flat fp32 buffer of exactly `num_elements`."""
        num_items = buffer.shape[0] // (group_size * (head_dim + 2))
        num_heads = num_items * group_size
        acc, mass, peak = buffer.split_with_sizes([num_heads * head_dim, num_heads, num_heads])
        shape = (num_items, group_size)
        return TileParts(acc.view(*shape, head_dim), mass.view(shape), peak.view(shape))

    @staticmethod
    def empty(num_items: int, group_size: int, head_dim: int, like: torch.Tensor) -> "TileParts":
        """In a new buffer of `like`'s dtype and device."""
        num_elements = TileParts.num_elements(num_items, group_size, head_dim)
        return TileParts.over(like.new_empty(num_elements), group_size, head_dim)

    def split(self, sizes: list[int]) -> list["TileParts"]:
        """Views of so many items each, one after the other."""
        if len(sizes) == 1:
            return [self]
        return list(map(TileParts, *(x.split_with_sizes(sizes) for x in self.tensors())))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.acc, self.mass, self.peak


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
    mask: torch.Tensor | None,
    soft_cap: float | None,
    out: TileParts,
) -> None:
    """q [n, packs, P * G, P * D] as packed, scaled; k, v [n, l, Hkv * D]; mask [n, 1, l].

    out: items [n, Hkv], written. A tile's result does not depend on the others in the call: a
    single tile is computed twice, because for a batch of one the library splits the product itself
    among the threads.
    """
    num_tiles, num_packs, _, width = q.shape
    group_size, head_dim = out.acc.shape[1:]
    if num_tiles == 1:
        twice = TileParts.empty(2 * len(out.acc), group_size, head_dim, out.acc)
        q, k, v = (x.expand(2, *x.shape[1:]) for x in (q, k, v))
        attend_tiles(q, k, v, mask, soft_cap, twice)
        for theirs, ours in zip(twice.tensors(), out.tensors(), strict=True):
            ours.copy_(theirs[: len(ours)])
        return
    packs = [slice(i * width, (i + 1) * width) for i in range(num_packs)]
    products = [torch.bmm(q[:, i], k[:, :, p].transpose(1, 2)) for i, p in enumerate(packs)]
    scores = torch.cat(products, dim=1) if num_packs > 1 else products[0]
    if mask is not None or soft_cap is not None:
        _hide_and_cap(scores, mask, soft_cap)
    probs = _softmax_parts(scores, out)
    pack = width // head_dim
    acc = out.acc.view(num_tiles, num_packs, pack, group_size, head_dim)
    for i, (part, p) in enumerate(zip(probs.chunk(num_packs, dim=1), packs, strict=True)):
        # Each head's own values are the diagonal of what the pack was multiplied with.
        blocks = torch.bmm(part, v[:, :, p]).view(num_tiles, pack, group_size, pack, head_dim)
        acc[:, i].copy_(blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2))


def _hide_and_cap(scores: torch.Tensor, mask: torch.Tensor | None, soft_cap: float | None) -> None:
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask


def _softmax_parts(scores: torch.Tensor, out: TileParts) -> torch.Tensor:
    """scores [..., l], overwritten -> exp(score - peak). Writes peak and mass of `out`."""
    peak = out.peak.view(scores.shape[:-1])
    torch.amax(scores, dim=-1, out=peak)
    probs = scores.sub_(peak[..., None]).exp_()
    torch.sum(probs, dim=-1, out=out.mass.view(peak.shape))
    return probs


def attend_stack(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, soft_cap: float | None, out: TileParts
) -> None:
    """Every row of q [m, Hkv, G, D], scaled, with every tile of k, v [n, l, Hkv * D].

    out: items [Hkv, n, m], written. The rows' queries of a KV head make one matrix, and products of
    many rows are fast: for 16 a seventh of the time of `attend_tiles` (AMD EPYC, one core).
    `stacks_exactly` knows whether the bits are the same.
    """
    num_rows, num_kv_heads, group_size, head_dim = q.shape
    num_tiles, tile_tokens = k.shape[:2]
    if num_tiles == 1:  # as in attend_tiles
        twice = TileParts.empty(2 * len(out.acc), group_size, head_dim, out.acc)
        attend_stack(q, k.expand(2, -1, -1), v.expand(2, -1, -1), soft_cap, twice)
        for theirs, ours in zip(twice.tensors(), out.tensors(), strict=True):
            once = theirs.view(num_kv_heads, 2, num_rows, *ours.shape[1:])[:, 0]
            ours.view(once.shape).copy_(once)
        return
    num_queries = num_rows * group_size
    queries = q.transpose(0, 1).reshape(num_kv_heads, 1, num_queries, head_dim)
    queries = queries.expand(-1, num_tiles, -1, -1)
    heads = [slice(i * head_dim, (i + 1) * head_dim) for i in range(num_kv_heads)]
    scores = q.new_empty(num_kv_heads, num_tiles, num_queries, tile_tokens)
    for i, head in enumerate(heads):
        torch.bmm(queries[i], k[:, :, head].transpose(1, 2), out=scores[i])
    _hide_and_cap(scores, None, soft_cap)
    probs = _softmax_parts(scores, out)
    acc = out.acc.view(num_kv_heads, num_tiles, num_queries, head_dim)
    for i, head in enumerate(heads):
        torch.bmm(probs[i], v[:, :, head], out=acc[i])


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, soft_cap: float | None, out: TileParts
) -> None:
    """As `attend_stack`, with the bits of `attend_tiles` in any case: row by row."""
    num_rows, num_kv_heads, group_size, head_dim = q.shape
    num_tiles = k.shape[0]
    own = TileParts.empty(num_tiles * num_kv_heads, group_size, head_dim, out.acc)
    for row, packed in enumerate(pack_queries(q.flatten(1, 2), num_kv_heads)):
        attend_tiles(packed.expand(num_tiles, -1, -1, -1), k, v, None, soft_cap, own)
        for ours, theirs in zip(out.tensors(), own.tensors(), strict=True):
            items = ours.view(num_kv_heads, num_tiles, num_rows, *ours.shape[1:])
            by_tile = theirs.view(num_tiles, num_kv_heads, *ours.shape[1:])
            items[:, :, row].copy_(by_tile.transpose(0, 1))


@cache
def stacks_exactly(
    num_rows: int, num_kv_heads: int, group_size: int, head_dim: int, num_threads: int
) -> bool:
    """Whether `attend_stack` of so many rows gives the bits of `attend_tiles` on this machine.

    A matrix product's elements do not depend on its number of rows as long as the library sums
    over their terms in one order. It does from a few rows on; for one or two it has kernels of its
    own (MKL 2024.2). No document promises either, so it is tried, on random numbers: another order
    shows in a good part of the elements. Once a process for each argument, 1 to 16 ms.
    """
    del num_threads  # the library may cut products otherwise for another number of them
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_rows, num_kv_heads, group_size, head_dim, generator=generator)
    packed = pack_queries(q.flatten(1, 2), num_kv_heads)
    for num_tiles in (1, 3):
        shape = (2, num_tiles, _PROBED_TILE_TOKENS, num_kv_heads * head_dim)
        k, v = torch.randn(shape, generator=generator)
        num_items = num_kv_heads * num_tiles * num_rows
        stack = TileParts.empty(num_items, group_size, head_dim, q)
        attend_stack(q, k, v, None, stack)
        own = TileParts.empty(num_rows * num_kv_heads, group_size, head_dim, q)
        for tile in range(num_tiles):
            tile_k, tile_v = (x[tile].expand(num_rows, -1, -1) for x in (k, v))
            attend_tiles(packed, tile_k, tile_v, None, None, own)
            for ours, theirs in zip(stack.tensors(), own.tensors(), strict=True):
                by_head = theirs.view(num_rows, num_kv_heads, *theirs.shape[1:]).transpose(0, 1)
                of_tile = ours.view(num_kv_heads, num_tiles, num_rows, *ours.shape[1:])[:, tile]
                if not torch.equal(of_tile, by_head):
                    return False
    return True


def merge_tiles(tiles: TileParts, rows: torch.Tensor, num_rows: int) -> Part:
    """Sum item i into row rows[i] -> out [num_rows, G, D], lse [num_rows, G].

    A row here is that of one KV head. tiles.acc is overwritten: a copy costs as much as the sum.
    On the CPU a row's items are summed in their order in `rows`, whatever lies between them.
    """
    group_size, head_dim = tiles.acc.shape[1:]
    index = rows[:, None].expand_as(tiles.peak)
    peak = tiles.peak.new_full((num_rows, group_size), _NEVER)
    peak.scatter_reduce_(0, index, tiles.peak, "amax")
    weight = (tiles.peak - peak[rows]).exp_()
    mass = weight.new_zeros(num_rows, group_size).index_add_(0, rows, tiles.mass * weight)
    total = weight.new_zeros(num_rows, group_size, head_dim)
    total.index_add_(0, rows, tiles.acc.mul_(weight[..., None]))
    return total.div_(mass[..., None]), mass.log_().add_(peak)


def add_sinks(part: Part, sinks: torch.Tensor) -> Part:
    """Let a learned logit per head, sinks [H], join the softmax of out [T, H, D], lse [T, H]."""
    out, lse = part
    sinks = sinks.to(lse.dtype)
    return out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)
