"""A causal depthwise convolution in Triton, whose last inputs are a paged state.

    y[t] = bias + sum over i of weight[i] x[t - W + 1 + i], then y * sigmoid(y) if has_silu

The reference is `quire/recurrence/reference.py::short_conv`. Products are added in the order of i;
each is rounded by itself, so that a token has the same bits in every tile. The state is the last W
- 1 inputs, zeros before the first; a unit of the state is 64 channels, fp32 [W - 1][64], the oldest
first.

A tile has BLOCK_T tokens and BLOCK_C channels. A prompt has `num_tiles` programs for each block of
channels, and each takes every `num_tiles`-th tile. Inputs before a tile that its taps need are read
again, from the cache. Only the first program of a sequence reads the state and writes the new one.

Bound by memory: a token reads and writes C elements, a state 2 (W - 1) C fp32.

Shapes: T tokens, C channels, W width (2 to 4). dtypes: x fp32, bf16 or fp16; weight and bias any of
these; states fp32. Called by `recurrence/triton_states`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.recurrence.units import StepStates, kept_end, unit_places

_CHANNELS = 128
_TOKENS = 16
#: The number of programs in a step with prompts: several for each processor of the largest GPUs.
_MANY_PROGRAMS = 2048

#: Arguments for whose values Triton compiles no variants.
_COUNTS = ["num_sequences", "num_prompts", "num_tiles", "first_unit", "units_per_page"]


def causal_conv(
    states: StepStates,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """x [T, C], weight [C, W], bias [C] -> [T, C] in x's dtype; the states are updated in place.

    Views of fused tensors are read without a copy. Raises ValueError for other shapes.
    """
    num_tokens, num_channels = x.shape
    width = weight.shape[1]
    if weight.shape[0] != num_channels or not 2 <= width <= 4:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, but must be [T, C] and [C, W]"
            " with W from 2 to 4"
        )
    if bias is not None and (bias.shape != (num_channels,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)}, but must be ({num_channels},), contiguous")
    # Each prompt gets several programs for a block of channels, a decoding sequence one.
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_parts = triton.cdiv(num_channels, _CHANNELS)
    num_tiles = 1
    if states.num_prompts:
        most = max(1, _MANY_PROGRAMS // (num_parts * states.num_prompts))
        num_tiles = min(triton.cdiv(num_tokens, _TOKENS), most)
    num_sequences, num_prompts = states.num_sequences, states.num_prompts
    num_programs = num_sequences + num_prompts * (num_tiles - 1)
    causal_conv_kernel[(num_parts, num_programs)](
        x,
        weight,
        bias,
        out,
        x.stride(0),
        *weight.stride(),
        num_sequences,
        max(1, num_prompts),
        num_tiles,
        *states.arguments,
        C=num_channels,
        WIDTH=width,
        HAS_SILU=has_silu,
        BLOCK_T=_TOKENS if states.num_prompts else 1,
        BLOCK_C=_CHANNELS,
        num_warps=2,
        enable_fp_fusion=False,  # see `units.py`
    )
    return out


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def causal_conv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, C]
    weight_ptr,  # [C, W]
    bias_ptr,  # [C], or None
    out_ptr,  # [T, C], contiguous
    x_stride,
    channel_stride,
    tap_stride,
    num_sequences,
    num_prompts,  # prompts come last among the sequences
    num_tiles,
    pages_ptr,  # these as in `StepStates`
    table_ptr,
    query_start_ptr,
    context_lens_ptr,
    rows_ptr,
    num_drafts_ptr,  # or None
    page_stride,
    table_stride,
    first_unit,
    units_per_page,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The grid has programs (channels, sequence), then (channels, further program of a prompt)."""
    sequence, first_tile = _sequence_and_tile(num_sequences, num_prompts)
    context, row = tl.load(context_lens_ptr + sequence), tl.load(rows_ptr + sequence)
    first, end = tl.load(query_start_ptr + sequence), tl.load(query_start_ptr + sequence + 1)
    if context > 0:
        channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        is_channel = channels < C
        num_tokens = end - first
        x_ptr += first.to(tl.int64) * x_stride
        unit, words = first_unit + tl.minimum(channels, C - 1) // 64, (WIDTH - 1) * 64
        places = unit_places(
            pages_ptr, table_ptr, row, page_stride, table_stride, unit, units_per_page, words
        )
        places += channels % 64
        # First, read the state. The sequence's other programs read no inputs before the step.
        is_known = is_channel & (first_tile == 0) & (context > num_tokens)
        kept = _kept(places, is_known, WIDTH)
        learned = _weights(weight_ptr, bias_ptr, (channel_stride, tap_stride), channels, C, WIDTH)
        # Then convolve the program's tiles.
        for tile in range(first_tile, tl.cdiv(num_tokens, BLOCK_T), num_tiles):
            tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            y = tl.broadcast_to(learned[0][None, :], (BLOCK_T, BLOCK_C))
            for tap in tl.static_range(WIDTH):
                at = tokens + tap + 1 - WIDTH
                inputs = _inputs(x_ptr, x_stride, at, num_tokens, kept, channels, C, WIDTH)
                y += learned[tap + 1][None, :] * inputs
            if HAS_SILU:
                y = y / (1.0 + tl.exp(-y))
            out_rows = out_ptr + (first + tokens).to(tl.int64)[:, None] * C
            mask = (tokens < num_tokens)[:, None] & is_channel[None, :]
            tl.store(out_rows + channels[None, :], y.to(out_ptr.dtype.element_ty), mask)
        if first_tile == 0:
            # Last, write the new state, after all threads have read the old one.
            tl.debug_barrier()
            num_kept = kept_end(num_drafts_ptr, sequence, end) - first
            for entry in tl.static_range(WIDTH - 1):
                token = num_kept + entry + 1 - WIDTH + tl.arange(0, 1)
                last = _inputs(x_ptr, x_stride, token, num_tokens, kept, channels, C, WIDTH)
                tl.store(places[None, :] + entry * 64, last, is_channel[None, :])


@triton.jit
def _sequence_and_tile(num_sequences, num_prompts):  # type: ignore[no-untyped-def]
    """The program's sequence, and the number of its first tile in that sequence."""
    further = tl.program_id(1) - num_sequences
    prompt = num_sequences - num_prompts + further % num_prompts
    sequence = tl.where(further < 0, tl.program_id(1), prompt)
    return sequence, tl.where(further < 0, 0, 1 + further // num_prompts)


@triton.jit  # type: ignore[untyped-decorator]
def _kept(places, is_known, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last inputs before the step, the oldest first; missing ones are zeros."""
    oldest = tl.load(places, is_known, other=0.0)
    second = tl.load(places + 64, is_known & (WIDTH > 2), other=0.0)
    third = tl.load(places + 128, is_known & (WIDTH > 3), other=0.0)
    return oldest, second, third


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    weight_ptr, bias_ptr, strides, channels, C: tl.constexpr, WIDTH: tl.constexpr
):
    """The bias, then four taps, each [channels] fp32; missing ones are zeros."""
    is_channel = channels < C
    bias = tl.zeros(channels.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channels, is_channel, other=0.0).to(tl.float32)
    at, tap = weight_ptr + channels * strides[0], strides[1]
    first = tl.load(at, is_channel, other=0.0).to(tl.float32)
    second = tl.load(at + tap, is_channel, other=0.0).to(tl.float32)
    third = tl.load(at + 2 * tap, is_channel & (WIDTH > 2), other=0.0).to(tl.float32)
    fourth = tl.load(at + 3 * tap, is_channel & (WIDTH > 3), other=0.0).to(tl.float32)
    return bias, first, second, third, fourth


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(  # type: ignore[no-untyped-def]
    x_ptr,
    x_stride,
    tokens,  # [tokens], counted from the sequence's first token in the step; earlier: negative
    num_tokens,
    kept,  # the state as rows [channels], the oldest first
    channels,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Inputs [tokens, channels] fp32 at tokens of the step, or of the state before it."""
    is_new = ((tokens >= 0) & (tokens < num_tokens))[:, None] & (channels < C)[None, :]
    places = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + channels[None, :]
    new = tl.load(places, is_new, other=0.0).to(tl.float32)
    entry = (tokens + WIDTH - 1)[:, None]
    old = tl.where(entry == 1, kept[1][None, :], kept[2][None, :])
    old = tl.where(entry == 0, kept[0][None, :], old)
    return tl.where(tokens[:, None] < 0, old, new)
