"""Device functions about a tile of keys: their blocks, their scores, which rows see them.

Called by `paged_attention.py` and `latent_attention.py`, whose `AttendShape` S is. A tile has
S.tile keys and begins at a multiple of it.
"""

import triton
import triton.language as tl

from quire.kernels.triton.attention.online_softmax import LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def load_blocks(table, start, seen, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks of the keys that are seen of a tile: of each key, or one block for all."""
    if S.block_size >= S.tile:
        blocks = tl.load(table + start // S.block_size, start < seen[1], other=0)
    else:
        keys = start + tl.arange(0, S.tile)
        blocks = tl.load(
            table + keys // S.block_size, (keys >= seen[0]) & (keys < seen[1]), other=0
        )
    return blocks


@triton.jit  # type: ignore[untyped-decorator]
def cap_scores(scores, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of q and k -> what times `S.to_log2` is a score in units of log2."""
    if S.soft_cap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), with e^2x in powers of two.
        powers = tl.exp2(scores * (2.0 * S.scale / S.soft_cap * LOG2_E))
        scores = 1.0 - 2.0 / (powers + 1.0)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def hide_unseen(scores, keys, is_seen, positions, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """scores [rows, tile], -inf where the row at a position doesn't see a key. is_seen: [tile]."""
    visible = is_seen[None, :]
    if S.causal:
        visible = visible & (keys[None, :] <= positions[:, None])
    if S.window is not None:
        visible = visible & (keys[None, :] > positions[:, None] - S.window)
        if not S.causal:
            visible = visible & (keys[None, :] < positions[:, None] + S.window)
    return tl.where(visible, scores, float("-inf"))
