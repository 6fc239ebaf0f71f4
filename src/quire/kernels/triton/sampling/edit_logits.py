"""Applies masks, banned words and biases to logits, in Triton.

These options forbid tokens or make them likelier; logits are changed in place.

    forbid_unset    logit = -inf unless the token's bit is set: grammar masks, allowed_token_ids
    forbid_before   logit = -inf for some tokens while a line is shorter than a limit: min_tokens
    forbid_words    logit = -inf for a word's last token if its others were generated just before
    add_bias        logit + bias, in fp32: logit_bias

Definitions and reference: the processors of `sampling/host/processors.py`. Each pair of a line and
a token is written by one program, or by several with the same value, so the order doesn't matter.
Only lines that use an option are touched. forbid_unset reads V / 8 bytes a line and writes only the
forbidden logits; the other kernels cost little more than their launch.

Shapes: R lines of logits [R, V] fp32, n lines that use an option, P pairs of a line and a token, W
words of up to L tokens before the last. Called by `sampling/device/processors.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling.scan_logits import check_logits

_BLOCK = 1024
_BLOCK_PAIRS = 128

#: The number of tokens whose bits one int32 of a mask holds, the lowest bit first.
MASK_BITS = 32

#: Fills the front of `Words.before` for short words, and matches any token.
ANY_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Words:
    """Forbidden words: the last token of each is impossible after all its other tokens."""

    #: Each word's line of the logits, [W] int32.
    lines: torch.Tensor
    #: Each word's row of the table of token ids, [W] int64.
    rows: torch.Tensor
    #: Each word's last token, which is forbidden, [W] int32.
    last: torch.Tensor
    #: The tokens before the last, aligned to the right after ANY_TOKEN, [W, L] int32.
    before: torch.Tensor
    #: The number of prompt tokens plus the number of tokens before the last, [W] int32. Only
    #: generated tokens match, so a shorter sequence can't end with the tokens before the last.
    min_length: torch.Tensor


def forbid_unset(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """`masks` is [n, 1 + ceil(V / 32)] int32: each row has the line's number, then its bits."""
    check_logits(logits)
    vocab_size = logits.shape[1]
    num_lines, width = masks.shape
    assert width == 1 + triton.cdiv(vocab_size, MASK_BITS), "masks are not of this vocabulary"
    forbid_unset_kernel[(triton.cdiv(vocab_size, _BLOCK), num_lines)](
        logits,
        logits.stride(0),
        masks,
        width,
        V=vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )


def forbid_before(
    logits: torch.Tensor,
    lines: torch.Tensor,
    token_ids: torch.Tensor,
    limits: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """`lines`, `token_ids` and `limits` are [P] int32; `lengths` is [R] int64."""
    check_logits(logits)
    num_pairs = len(lines)
    forbid_before_kernel[(triton.cdiv(num_pairs, _BLOCK_PAIRS),)](
        *(logits, logits.stride(0), lines, token_ids, limits, lengths, num_pairs),
        BLOCK=_BLOCK_PAIRS,
        num_warps=4,
        enable_fp_fusion=True,
    )


def forbid_words(
    logits: torch.Tensor, words: Words, lengths: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """`lengths` is [R] int64; `token_ids` is [N, max_len] int32, the tokens of all rows."""
    check_logits(logits)
    num_words, longest = words.before.shape
    forbid_words_kernel[(triton.cdiv(num_words, _BLOCK_PAIRS),)](
        *(logits, logits.stride(0), words.lines, words.rows, words.last, words.before),
        *(words.min_length, lengths, token_ids, token_ids.stride(0), num_words, longest),
        BLOCK=_BLOCK_PAIRS,
        num_warps=4,
        enable_fp_fusion=True,
    )


def add_bias(
    logits: torch.Tensor, lines: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """`lines` and `token_ids` are [P] int32, all pairs different; `bias` is [P] fp32."""
    check_logits(logits)
    num_pairs = len(lines)
    add_bias_kernel[(triton.cdiv(num_pairs, _BLOCK_PAIRS),)](
        *(logits, logits.stride(0), lines, token_ids, bias, num_pairs),
        BLOCK=_BLOCK_PAIRS,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit  # type: ignore[untyped-decorator]
def forbid_unset_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    masks_ptr,  # [n, width]
    width,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mask_ptr = masks_ptr + tl.program_id(1).to(tl.int64) * width
    line = tl.load(mask_ptr).to(tl.int64)
    token_ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_line = token_ids < V
    bits = tl.load(mask_ptr + 1 + (token_ids >> 5), in_line, other=-1)
    is_set = ((bits >> (token_ids & 31)) & 1) == 1
    forbidden = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + line * stride + token_ids, forbidden, in_line & (is_set == 0))


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def forbid_before_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    lines_ptr,  # [P]
    token_ids_ptr,  # [P]
    limits_ptr,  # [P]
    lengths_ptr,  # [R]
    num_pairs,
    BLOCK: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    line = tl.load(lines_ptr + pairs, is_pair, other=0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + pairs, is_pair, other=0)
    length = tl.load(lengths_ptr + line, is_pair, other=0)
    is_short = length < tl.load(limits_ptr + pairs, is_pair, other=0)
    forbidden = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + line * stride + token_id, forbidden, is_pair & is_short)


@triton.jit(do_not_specialize=["num_words", "longest"])  # type: ignore[untyped-decorator]
def forbid_words_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    lines_ptr,  # [W]
    rows_ptr,  # [W]
    last_ptr,  # [W]
    before_ptr,  # [W, longest]
    min_length_ptr,  # [W]
    lengths_ptr,  # [R]
    token_ids_ptr,  # [N, max_len]
    ids_stride,
    num_words,
    longest,
    BLOCK: tl.constexpr,
):
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_word = words < num_words
    line = tl.load(lines_ptr + words, is_word, other=0).to(tl.int64)
    row_ptr = token_ids_ptr + tl.load(rows_ptr + words, is_word, other=0) * ids_stride
    length = tl.load(lengths_ptr + line, is_word, other=0)
    min_length = tl.load(min_length_ptr + words, is_word, other=0)
    matches = is_word & (length >= min_length)
    for index in range(longest):
        wanted = tl.load(before_ptr + words * longest + index, is_word, other=-1)
        compares = matches & (wanted >= 0)
        # The place lies in the row: min_length is at least the number of tokens before the last.
        found = tl.load(row_ptr + (length - longest + index), compares, other=-1)
        matches = matches & ((wanted < 0) | (found == wanted))
    token_id = tl.load(last_ptr + words, is_word, other=0)
    forbidden = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + line * stride + token_id, forbidden, matches)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def add_bias_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    stride,
    lines_ptr,  # [P]
    token_ids_ptr,  # [P]
    bias_ptr,  # [P]
    num_pairs,
    BLOCK: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    line = tl.load(lines_ptr + pairs, is_pair, other=0).to(tl.int64)
    at = logits_ptr + line * stride + tl.load(token_ids_ptr + pairs, is_pair, other=0)
    bias = tl.load(bias_ptr + pairs, is_pair, other=0.0)
    tl.store(at, tl.load(at, is_pair, other=0.0) + bias, is_pair)
