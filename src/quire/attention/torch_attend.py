"""Dense attention in fp32 and the merging of parts, for the torch backend.

Knows no blocks and no steps. A part is attention over some of the keys: its output, normalized,
and its natural log-sum-exp. Parts over disjoint keys merge exactly:
out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i))).

Shapes: b batch, h heads, m queries, l keys, D head size.
"""

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


def merge_tiles(out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, num_rows: int) -> Part:
    """Sum tiles into their rows: out [n, H, D], lse [n, H], rows [n] -> [num_rows, H, D], [.., H].

    On the CPU a row's tiles are summed in their order in `rows`, whatever lies between them.
    """
    num_heads, head_dim = out.shape[1:]
    index = rows[:, None].expand_as(lse)
    peak = lse.new_full((num_rows, num_heads), _NEVER).scatter_reduce_(0, index, lse, "amax")
    weight = (lse - peak[rows]).exp_()
    weighted = out * weight[..., None]
    total = out.new_zeros(num_rows, num_heads, head_dim).index_add_(0, rows, weighted)
    mass = lse.new_zeros(num_rows, num_heads).index_add_(0, rows, weight)
    return total.div_(mass[..., None]), mass.log_().add_(peak)


def add_sinks(part: Part, sinks: torch.Tensor) -> Part:
    """Let a learned logit per head, sinks [H], join the softmax of out [T, H, D], lse [T, H]."""
    out, lse = part
    sinks = sinks.to(lse.dtype)
    return out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)
