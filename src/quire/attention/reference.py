"""Reference attention: dense, one sequence at a time, in float64.

It is slow and simple on purpose, and documents what an `AttentionSpec` means. The backends' tests
compare with it.
"""

from collections.abc import Sequence

import torch

from quire.attention.interface import AttentionSpec


def visible_keys(
    spec: AttentionSpec, num_queries: int, num_keys: int, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_queries, num_keys] bool, True if the query sees the key. Queries are the last tokens.

    In a window of w, a query sees keys at a distance below w: before it, and if the layer is not
    causal, also after it. ends [num_queries]: see `AttentionBatch.visible_ends`. Up to there, the
    window does not hide keys after the query.
    """
    queries = torch.arange(num_keys - num_queries, num_keys)[:, None]
    keys = torch.arange(num_keys)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if not spec.sees_ahead:
        ends = None
    if ends is not None:
        visible &= keys < ends[:, None]
    elif spec.causal:
        visible &= keys <= queries
    if spec.window is not None:
        visible &= queries - keys < spec.window
        visible &= (keys - queries < spec.window) | (ends is not None)
    return visible


def attend_dense(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [Tq, Hq, D], k and v [Tk, Hkv, D] -> out [Tq, Hq, Dv], lse [Tq, Hq], float64.

    v is None in latent layers, whose values are the first Dv elements of k. lse is the natural
    logarithm of the sum of exp(score) over visible keys and the sink, if there is one.

    ends: as in `visible_keys`.
    """
    group_size = spec.num_heads // spec.num_kv_heads
    stored, k = k, k.double().repeat_interleave(group_size, dim=1)
    if spec.value_dim is not None:
        v = stored[..., : spec.value_dim]
    assert v is not None, "a layer that is not latent is called with values"
    v = v.double().repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    hidden = ~visible_keys(spec, q.shape[0], k.shape[0], ends).to(q.device)
    scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    if spec.has_sinks:
        assert sinks is not None, "a layer with sinks is called with them"
        sink_column = sinks.double().expand(q.shape[0], -1)[..., None]
        scores = torch.cat([scores, sink_column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    probs = torch.exp(scores - lse[..., None])[..., : k.shape[0]]
    return torch.einsum("qhk,khd->qhd", probs, v), lse


def attend_sequences(
    spec: AttentionSpec,
    qs: Sequence[torch.Tensor],
    ks: Sequence[torch.Tensor],
    vs: Sequence[torch.Tensor | None],
    sinks: torch.Tensor | None = None,
    ends: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_dense` for each sequence, with concatenated results: [T, Hq, Dv] and [T, Hq]."""
    each_ends = [None] * len(qs) if ends is None else ends
    parts = [
        attend_dense(spec, q, k, v, sinks, end)
        for q, k, v, end in zip(qs, ks, vs, each_ends, strict=True)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
