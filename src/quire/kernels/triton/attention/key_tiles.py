"""Device functions for a tile of keys: finding blocks, capping scores, masking scores.

Called by `paged_attention.py` and `latent_attention.py`. S is an `AttendShape`. A tile has S.tile
keys and begins at a multiple of S.tile.
"""

import triton
import triton.language as tl

from quire.kernels.triton.attention.online_softmax import LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def load_blocks(table, start, seen, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block of each key of a tile, or a single block if the tile lies in one block. `seen` is
    (first, end) of the keys that some row sees; other keys have block 0."""
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
    """Apply the layer's soft cap, if it has one, to products of q and k. The result times
    `S.to_log2` is an exponent of two in the softmax."""
    if S.soft_cap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), with e^2x in powers of two.
        powers = tl.exp2(scores * (2.0 * S.scale / S.soft_cap * LOG2_E))
        scores = 1.0 - 2.0 / (powers + 1.0)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def hide_unseen(scores, keys, is_seen, positions, lasts, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """scores [rows, tile] with -inf for each key that a row doesn't see from its position.
    `is_seen` [tile] is false for keys that no row sees. `lasts` [rows] are the positions of the
    last keys that the rows of a causal layer see."""
    visible = is_seen[None, :]
    if S.causal:
        visible = visible & (keys[None, :] <= lasts[:, None])
    if S.window is not None:
        visible = visible & (keys[None, :] > positions[:, None] - S.window)
        if not S.causal:
            visible = visible & (keys[None, :] < positions[:, None] + S.window)
    return tl.where(visible, scores, float("-inf"))
