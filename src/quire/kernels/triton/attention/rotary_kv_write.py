"""Norms and rotates q and k, and stores K and V in pages, in one launch.

For each token t and head h, let n(x) = weight * round(x / sqrt(mean(x^2) + eps)) if heads are
normed, and n(x) = x otherwise. With cos and sin rounded to the dtype:

    q, k: y[:R/2]  = round(n(x)[:R/2] cos) - round(n(x)[R/2:R] sin)
          y[R/2:R] = round(n(x)[R/2:R] cos) + round(n(x)[:R/2] sin)
          y[R:]    = n(x)[R:]
    page[0, h, offset] = y of k,  page[1, h, offset] = v

Sources: rotary position embedding arXiv:2104.09864, paged KV arXiv:2309.06180. The reference
calls `kernels/rotary.py::rotate`, and then stores K and V by index. Every product and every sum is
rounded to the dtype as in the reference, and multiply-adds are not fused. So without norms, results
are bit-identical to the reference in all dtypes. With norms, they equal those of `rms_norm.py` up
to the order of the sums of squares.

A page is one layer's part of a block: kv[block] of kv [N, 2, Hkv, B, D]. A head's B tokens are
contiguous, so that attention loads a head's tile of a block as one piece. Pages lie kv.stride(0)
elements apart, since the layers of a group interleave.

Bound by memory: a token reads and writes (Hq + 2 Hkv) D elements. For 32 + 8 heads of 128 in bf16
these are 12 KiB each way; the R cosines and sines come from the L2 cache. A program has one token
and 1024 elements of its heads, so even a single token occupies several multiprocessors. Only the
number of programs depends on T.

A program holds a head as two tiles of D/2 elements, `low` and `high`; a thread holds 16 bytes of
each. `low` begins with the first element of each pair that rotates, and `high` with the second
element of each; both end with half of the elements that don't rotate. If all elements rotate, `low`
and `high` are the halves of the head.

If pages rotate keys, q and k are then multiplied by a Hadamard matrix (`rotation.hadamard`) in
fp32, after each head's elements are put in order. Then k is quantized. Queries are multiplied by
the same matrix, so q·k does not change, and are rounded to the dtype of `out` once more.

Shapes: T tokens, Hq query heads, Hkv KV heads, D head size (even), R elements of a head that rotate
(even, in most models D), N blocks, B block size.

dtypes: q, k and v are fp32, bf16 or fp16, all the same; pages have the same dtype, or codes with
scales as in `quantized_kv.py`. Called by `attention/triton_paged`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.rotary import Angles, Rotation
from quire.kernels.triton.attention.quantized_kv import (
    KVPages,
    check_scales,
    pack_scales,
    quantize,
    scales_of,
)
from quire.kernels.triton.dependent_launch import await_inputs, launch_options
from quire.kernels.triton.rotation import hadamard
from quire.kernels.triton.support import check_same, next_power_of_two

#: The limit of a thread's registers for codes. Without it, ptxas would spill registers to fit more
#: programs.
MOST_REGISTERS = 128

_PROGRAM_ELEMENTS = 1024


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotation: Rotation | None,
    pages: KVPages,
    slot_mapping: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate q [T, Hq, D] and k [T, Hkv, D], write k and v [T, Hkv, D] to their slots.

    k and v may both be None; then only q is computed, and no pages are written. If `rotation` is
    None, q and k are neither normed nor rotated by angles; the Hadamard matrix of `pages` applies.
    `slot_mapping` is [T] int64: block * B + offset, or -1 for a token of padding, which is not
    written. No two tokens have the same slot.
    `out` receives q, in any dtype; if it is None, q is overwritten. k and v are not changed.
    Returns the q for attention. All tensors may be views whose last dimension is contiguous.
    """
    is_written = k is not None and v is not None
    # If nothing is written, empty views stand for k and v, which the kernel doesn't read.
    keys, values = (k, v) if k is not None and v is not None else (q[:, :0], q[:, :0])
    _check(q, keys, values, pages, slot_mapping, is_written)
    if rotation is not None:
        _check_rotation(q, rotation)
    is_moved = rotation is not None or out is not None or pages.rotates_keys
    out = q if out is None else out
    if out.shape != q.shape or out.stride(2) != 1 or out.device != q.device:
        raise ValueError(
            f"out is {tuple(out.shape)}, but must be as q, {tuple(q.shape)}, on its device with a"
            " contiguous last dimension"
        )
    if q.shape[0] and (is_moved or is_written):
        tiles = _HeadTiles.of(q, pages.numbers, is_moved=is_moved, is_written=is_written)
        _launch((q, keys, values, out), rotation or Rotation(None), pages, slot_mapping, tiles)
    return out


@dataclass(frozen=True, slots=True)
class _HeadTiles:
    """The division of a token's heads among programs."""

    #: The number of heads in a tile.
    heads: int
    #: The number of tiles of q; 0 if q stays unchanged.
    q: int
    #: The number of tiles of k and v; 0 if they are not written.
    kv: int

    @classmethod
    def of(
        cls, q: torch.Tensor, kv: torch.Tensor, *, is_moved: bool, is_written: bool
    ) -> "_HeadTiles":
        _, num_heads, size = q.shape
        num_kv_heads, half = kv.shape[2], next_power_of_two(size // 2)
        heads = min(
            max(1, _PROGRAM_ELEMENTS // (2 * half)),
            next_power_of_two(max(num_heads, num_kv_heads)),
        )
        num_q_tiles = triton.cdiv(num_heads, heads) if is_moved else 0
        return cls(heads, num_q_tiles, triton.cdiv(num_kv_heads, heads) if is_written else 0)


def _launch(
    qkv_and_out: tuple[torch.Tensor, ...],
    rotation: Rotation,
    pages: KVPages,
    slot_mapping: torch.Tensor,
    tiles: _HeadTiles,
) -> None:
    # The constants depend only on the shapes. Without angles, R is D, so tiles are halves of heads.
    q, k, v, out = qkv_and_out
    kv, scales = pages.numbers, pages.scales
    num_tokens, num_heads, size = q.shape
    angles = rotation.angles
    rotary_kv_write_kernel[(num_tokens, tiles.q + tiles.kv)](
        q,
        k,
        v,
        out,
        kv,
        scales,
        slot_mapping,
        None if angles is None else angles.table,
        None if angles is None else angles.positions,
        rotation.q_norm,
        rotation.k_norm,
        rotation.eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        kv.stride(0),
        0 if scales is None else scales.stride(0),
        HQ=num_heads,
        HKV=kv.shape[2],
        D=size,
        R=size if angles is None else angles.table.shape[1],
        B=kv.shape[3],
        NUM_Q_TILES=tiles.q,
        BLOCK_H=tiles.heads,
        BLOCK_HALF=next_power_of_two(size // 2),
        SPREAD=size & -size if pages.rotates_keys else 1,
        OFFSET=rotation.norm_offset,
        num_warps=2,
        maxnreg=None if scales is None else MOST_REGISTERS,
        enable_fp_fusion=False,  # see the module's text
        **launch_options(q.device),
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: KVPages,
    slots: torch.Tensor,
    is_written: bool,
) -> None:
    kv = pages.numbers
    check_scales(kv, pages.scales)
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    num_tokens, _, size = q.shape
    expected = (num_tokens, kv.shape[2] if is_written else 0, size)
    if k.shape != expected or v.shape != expected or kv.shape[1] != 2 or kv.shape[4] != size:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}, but q, {tuple(q.shape)}, and kv, "
            f"{tuple(kv.shape)} [N, 2, Hkv, B, D], need {expected}"
        )
    if size % 2:
        raise ValueError(f"q is {tuple(q.shape)}, but the head size must be even")
    rows = kv.shape[3] * size
    is_page = kv.stride()[1:] == (kv.shape[2] * rows, rows, size, 1)
    if not (q.stride(2) == k.stride(2) == v.stride(2) == 1 and is_page):
        raise ValueError("the last dimension of q, k and v and each page of kv must be contiguous")
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(
            f"slot_mapping is {tuple(slots.shape)} {slots.dtype}, but must be ({num_tokens},) "
            "torch.int64, contiguous"
        )


def _check_rotation(q: torch.Tensor, rotation: Rotation) -> None:
    size = q.shape[2]
    if rotation.angles is not None:
        _check_angles(q, rotation.angles)
    for name, weight in (("q_norm", rotation.q_norm), ("k_norm", rotation.k_norm)):
        if weight is None:
            continue
        check_same(name, weight, "q", q)
        if weight.shape != (size,) or not weight.is_contiguous():
            raise ValueError(f"{name} is {tuple(weight.shape)}, but must be ({size},), contiguous")


def _check_angles(q: torch.Tensor, angles: Angles) -> None:
    num_tokens, _, size = q.shape
    table, positions = angles.table, angles.positions
    is_table = table.dim() == 2 and 0 < table.shape[1] <= size and table.shape[1] % 2 == 0
    if not is_table or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(
            f"the table of angles is {tuple(table.shape)} {table.dtype}, but must be [any, {size}] "
            "or narrower by pairs, torch.float32, contiguous"
        )
    is_list = positions.dtype == torch.int64 and positions.is_contiguous()
    if positions.shape != (num_tokens,) or not is_list:
        raise ValueError(
            f"positions are {tuple(positions.shape)} {positions.dtype}, but must be "
            f"({num_tokens},) torch.int64, contiguous"
        )
    if angles.dtype != q.dtype:
        raise ValueError(f"angles are of {angles.dtype}, but must be as q, {q.dtype}")


@triton.jit  # type: ignore[untyped-decorator]
def rotary_kv_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    kv_ptr,
    kv_scales_ptr,  # [N, Hkv, B] int32, pages scale_stride apart; None if kv has no codes
    slots_ptr,
    table_ptr,  # [any, R] fp32: R/2 cosines, then R/2 sines; None if nothing is rotated
    positions_ptr,
    q_norm_ptr,  # [D]; None if nothing is normed
    k_norm_ptr,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    out_token_stride,
    out_head_stride,
    page_stride,
    scale_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    NUM_Q_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    SPREAD: tl.constexpr,  # rows of the Hadamard matrix; 1: none
    OFFSET: tl.constexpr = None,  # added to the norms' weights; None: the quotient is rounded first
    IS_EARLY: tl.constexpr = False,  # see dependent_launch.py
):
    """One program for each token and tile of heads: first the tiles of q, then of k and v."""
    await_inputs(IS_EARLY)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK_HALF)
    places = _places(lanes, D, R)
    heads = tl.where(tile < NUM_Q_TILES, tile, tile - NUM_Q_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < tl.where(tile < NUM_Q_TILES, HQ, HKV)
    mask = is_head[:, None] & (lanes < D // 2)[None, :]
    # A program has either some heads of q, or the same heads of k and of v.
    if tile < NUM_Q_TILES:
        low, high = _load(q_ptr + token * q_token_stride, heads, q_head_stride, places, mask)
        low, high = _norm_and_rotate(
            low, high, lanes, q_norm_ptr, eps, table_ptr, positions_ptr, token, D, R, OFFSET
        )
        target = out_ptr + token * out_token_stride + heads[:, None] * out_head_stride
        if SPREAD == 1:
            _store(target, (low, high), places, mask)
        else:
            _store_heads(target, hadamard(_in_order(low, high, D, R), SPREAD), is_head, D)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            v = _load(v_ptr + token * v_token_stride, heads, v_head_stride, places, mask)
            k = _load(k_ptr + token * k_token_stride, heads, k_head_stride, places, mask)
            k = _norm_and_rotate(
                k[0], k[1], lanes, k_norm_ptr, eps, table_ptr, positions_ptr, token, D, R, OFFSET
            )
            target = kv_ptr + slot // B * page_stride + slot % B * D + heads[:, None] * (B * D)
            if kv_scales_ptr is not None:
                pairs_at = kv_scales_ptr + slot // B * scale_stride + slot % B + heads * B
                k_and_v = (k[0], k[1], v[0], v[1])
                _store_codes(k_and_v, target, pairs_at, places, is_head, HKV * B * D, D, R, SPREAD)
            else:
                _store(target, k, places, mask)
                _store(target + HKV * B * D, v, places, mask)


@triton.jit
def _load(token_ptr, heads, head_stride, places, mask):  # type: ignore[no-untyped-def]
    """The parts `low` and `high` of a token's heads; 0 where the mask is false."""
    source = token_ptr + heads[:, None] * head_stride
    low = tl.load(source + places[0][None, :], mask, other=0.0)
    high = tl.load(source + places[1][None, :], mask, other=0.0)
    return low, high


@triton.jit
def _store(target, parts, places, mask):  # type: ignore[no-untyped-def]
    stored = target.dtype.element_ty
    tl.store(target + places[0][None, :], parts[0].to(stored), mask)
    tl.store(target + places[1][None, :], parts[1].to(stored), mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store_codes(  # type: ignore[no-untyped-def]
    parts,  # low and high of K, then of V
    target,
    pairs_at,
    places,
    is_head,
    v_distance,
    D: tl.constexpr,
    R: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Quantize K and V of some heads, and store codes and scales.

    The codes of K begin at `target`, and the codes of V `v_distance` elements later.
    """
    k_low, k_high, v_low, v_high = parts
    kind: tl.constexpr = target.dtype.element_ty
    mask = is_head[:, None] & (tl.arange(0, k_low.shape[1]) < D // 2)[None, :]
    if SPREAD > 1:
        k_wide = hadamard(_in_order(k_low, k_high, D, R), SPREAD)
        k_scales = scales_of(k_wide, k_wide, kind)
        _store_heads(target, quantize(k_wide, k_scales, kind), is_head, D)
    else:
        k_scales = scales_of(k_low, k_high, kind)
        k_codes = quantize(k_low, k_scales, kind), quantize(k_high, k_scales, kind)
        _store(target, k_codes, places, mask)
    v_scales = scales_of(v_low, v_high, kind)
    v_codes = quantize(v_low, v_scales, kind), quantize(v_high, v_scales, kind)
    _store(target + v_distance, v_codes, places, mask)
    tl.store(pairs_at, pack_scales(k_scales, v_scales), is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _store_heads(target, x, is_head, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store x [heads, at least D], whose elements are in order."""
    dims = tl.arange(0, x.shape[1])
    mask = is_head[:, None] & (dims < D)[None, :]
    tl.store(target + dims[None, :], x.to(target.dtype.element_ty), mask)


@triton.jit  # type: ignore[untyped-decorator]
def _places(lanes, D: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """(indices within a head of the elements of `low`, the same for `high`)."""
    low_at = lanes
    high_at = lanes + D // 2
    if R < D:
        low_at = tl.where(lanes < R // 2, lanes, lanes + R // 2)
        high_at = tl.where(lanes < R // 2, lanes + R // 2, high_at)
    return low_at, high_at


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    low,  # [heads, D/2]
    high,  # [heads, D/2]
    lanes,
    norm_ptr,
    eps,
    table_ptr,
    positions_ptr,
    token,
    D: tl.constexpr,
    R: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """(low, high), normed if there is a norm, then rotated if there is a table of angles."""
    dtype = low.dtype
    # First, the norm: its weight is multiplied after the quotient is rounded, unless it has OFFSET.
    if norm_ptr is not None:
        is_lane = lanes < D // 2
        low_at, high_at = _places(lanes, D, R)
        low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(low_wide * low_wide + high_wide * high_wide, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        low_weight = tl.load(norm_ptr + low_at, is_lane, other=0.0).to(tl.float32)
        high_weight = tl.load(norm_ptr + high_at, is_lane, other=0.0).to(tl.float32)
        low_wide, high_wide = low_wide * scale, high_wide * scale
        if OFFSET is None:
            low_wide = low_wide.to(dtype).to(tl.float32)
            high_wide = high_wide.to(dtype).to(tl.float32)
        else:
            low_weight += OFFSET
            high_weight += OFFSET
        low = (low_wide * low_weight[None, :]).to(dtype)
        high = (high_wide * high_weight[None, :]).to(dtype)
    # Then the rotation; every product and sum is rounded, as in the reference.
    if table_ptr is not None:
        is_turned = lanes < R // 2
        row = table_ptr + tl.load(positions_ptr + token) * R + lanes
        cos = tl.load(row, is_turned, other=0.0).to(dtype).to(tl.float32)[None, :]
        sin = tl.load(row + R // 2, is_turned, other=0.0).to(dtype).to(tl.float32)[None, :]
        low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
        low_cos = (low_wide * cos).to(dtype).to(tl.float32)
        low_sin = (low_wide * sin).to(dtype).to(tl.float32)
        high_cos = (high_wide * cos).to(dtype).to(tl.float32)
        high_sin = (high_wide * sin).to(dtype).to(tl.float32)
        turned_low, turned_high = (low_cos - high_sin).to(dtype), (high_cos + low_sin).to(dtype)
        if R < D:
            turned_low = tl.where(is_turned[None, :], turned_low, low)
            turned_high = tl.where(is_turned[None, :], turned_high, high)
        low, high = turned_low, turned_high
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _in_order(low, high, D: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Joins the two tiles [n, P] of heads to [n, 2 P] fp32.

    The D elements of each head are in their order, followed by zeros.
    """
    PART: tl.constexpr = low.shape[1]
    x = tl.join(low.to(tl.float32), high.to(tl.float32)).permute(0, 2, 1)
    x = x.reshape(low.shape[0], 2 * PART)
    if R < D or D < 2 * PART:
        dims = tl.arange(0, 2 * PART)
        places = tl.where(dims < R // 2, dims, PART + dims - R // 2)
        of_rest = tl.where(dims < R // 2 + D // 2, dims - R // 2, PART + dims - D // 2)
        places = tl.where(dims < R, places, of_rest)
        places = tl.where(dims < D, places, 0)
        x = tl.gather(x, tl.broadcast_to(places[None, :], x.shape), axis=1)
        x = tl.where((dims < D)[None, :], x, 0.0)
    return x
