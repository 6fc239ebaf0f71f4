"""Latent attention in the interpreter: against float64, and to the bit whole or in parts."""

import pytest
import torch
from tests.attention.paged import make_spec

from quire.attention.reference import attend_dense

pytest.importorskip("triton")

from quire.kernels.triton.attention.latent_attention import latent_attention
from quire.kernels.triton.attention.merge_parts import merge_parts
from quire.kernels.triton.attention.paged_attention import AttendShape, AttendWork

TOTAL, CHUNK, PARTS, PROGRAMS = 78, 32, 3, 2
NUM_LAST = 7


def attend(q, pages, table, shape, first, is_split):
    """The output of the last tokens, from `first` on, in whole items or one for each chunk."""
    count, num_heads = TOTAL - first, shape.num_heads
    items, merges = [], []
    for position in range(first, TOTAL, shape.queries):
        size = min(shape.queries, TOTAL - position)
        low = max(0, position + 1 - (shape.window or TOTAL)) // shape.tile * shape.tile
        end, token = position + size, position - first
        chunks = range(low // CHUNK, -(-end // CHUNK))
        head = (0, token, size, position)
        if not is_split:
            items.append((*head, low, end, -1, TOTAL))
            continue
        for number, chunk in enumerate(chunks):
            keys = (max(low, chunk * CHUNK), min((chunk + 1) * CHUNK, end))
            items.append((*head, *keys, token * PARTS + number, TOTAL))
        merges += [(t, t * PARTS, len(chunks), 0) for t in range(token, token + size)]
    num_rows = count * PARTS * num_heads
    size = num_rows + 2 * PROGRAMS * shape.rows
    parts, scales = torch.full((size, shape.value_dim), torch.nan), torch.full((size, 2), torch.nan)
    out = torch.full((count, num_heads, shape.value_dim), torch.nan)
    listed = torch.tensor(items, dtype=torch.int32)
    num_items = torch.tensor([len(items)], dtype=torch.int32)
    merged = torch.tensor(merges, dtype=torch.int32)
    work = AttendWork(listed, num_items, PROGRAMS, parts, scales, merged, None, PARTS, CHUNK)
    latent_attention(q[first:], pages, table, work, None, out, shape)
    if is_split:
        stored = (x[:num_rows].unflatten(0, (-1, num_heads)) for x in (parts, scales))
        merge_parts(merged, *stored, None, out, None)
    return out


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_dim", "block_size", "window", "cap"),
    [(5, 48, 40, 8, None, None), (20, 48, 40, 32, 30, 4.0), (3, 40, 40, 16, None, None)],
)
def test_items_whole_or_in_parts_give_the_same_bits(
    num_heads, head_dim, value_dim, block_size, window, cap
):
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(TOTAL, 1, head_dim, generator=generator)
    q = torch.randn(TOTAL, num_heads, head_dim, generator=generator)
    pages = torch.full((TOTAL // block_size + 2, block_size, head_dim), torch.nan)
    table = torch.randperm(len(pages), generator=generator)[None].int()
    for token in range(TOTAL):
        pages[table[0, token // block_size], token % block_size] = k[token, 0]
    scale = head_dim**-0.5
    spec = make_spec(num_heads, 1, head_dim, window=window, soft_cap=cap, value_dim=value_dim)
    shape = AttendShape(
        num_heads, 1, head_dim, block_size, scale, window, cap, True, True, 16, 32, 8, 2, value_dim
    )
    whole = attend(q, pages, table, shape, TOTAL - NUM_LAST, False)
    expected, _ = attend_dense(spec, q, k, None)
    torch.testing.assert_close(whole.double(), expected[-NUM_LAST:], atol=5e-6, rtol=5e-6)
    for count, is_split in ((1, False), (1, True), (4, True), (NUM_LAST, True)):
        out = attend(q, pages, table, shape, TOTAL - count, is_split)
        assert torch.equal(out, whole[-count:])
