"""Copies all KV blocks of a step in one launch, in Triton.

    target[pairs[i, 1]] = source[pairs[i, 0]]

Copy on write needs it when a sequence first writes into a block that it shares (arXiv:2309.06180,
section 4.4). The reference is torch's `Tensor.index_copy_`, which gathers into a temporary first. A
copy within the device has the same storage as source and target. To move blocks between tiers, the
source or the target is page-locked host memory, which a GPU can read and write.

Bound by memory: a block is read and written once, and each thread copies 4 times 16 bytes, adjacent
to the bytes of its neighbours.

Shapes: N blocks, P bytes of a block (a multiple of 16), C pairs. Called by `runtime/kv_cache.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import VECTOR_BYTES

_WORD_BYTES = 4
_PIECE_WORDS = 4096


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks of `source` to `target`, both [N, P] uint8 with contiguous blocks; N may differ.

    `pairs` is [C, 2] int64: the block's number in the source, and in the target. Pairs are copied
    in any order, so no block may be a target twice, or both a source and a target. Numbers outside
    the storages are not detected.
    """
    size = source.shape[1]
    for name, storage in (("source", source), ("target", target)):
        if storage.dtype != torch.uint8 or storage.shape[1] != size or storage.stride(1) != 1:
            raise ValueError(
                f"{name} is {tuple(storage.shape)} {storage.dtype}, but must be [any, {size}] "
                "torch.uint8, each block contiguous"
            )
        if (size | storage.stride(0) | storage.data_ptr()) % VECTOR_BYTES:
            raise ValueError(
                f"{name} begins at {storage.data_ptr():#x} with blocks of {size} bytes "
                f"{storage.stride(0)} apart, but all three must be multiples of {VECTOR_BYTES}"
            )
    if pairs.shape[1:] != (2,) or pairs.dtype != torch.int64 or not pairs.is_contiguous():
        raise ValueError(
            f"pairs are {tuple(pairs.shape)} {pairs.dtype}, but must be [any, 2] torch.int64"
        )
    num_words = size // _WORD_BYTES
    num_pieces = triton.cdiv(num_words, _PIECE_WORDS)
    if pairs.shape[0] and num_pieces:
        copy_blocks_kernel[(pairs.shape[0] * num_pieces,)](
            source.view(torch.int32),
            target.view(torch.int32),
            pairs,
            source.stride(0) // _WORD_BYTES,
            target.stride(0) // _WORD_BYTES,
            num_words,
            num_pieces,
            PIECE=_PIECE_WORDS,
            num_warps=8,
            enable_fp_fusion=True,
        )


@triton.jit  # type: ignore[untyped-decorator]
def copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source_ptr,
    target_ptr,
    pairs_ptr,
    source_stride,  # in words of 4 bytes, like all sizes here
    target_stride,
    num_words,
    num_pieces,
    PIECE: tl.constexpr,
):
    """One program for each piece of each pair, all on axis 0, since other axes are limited to
    65535."""
    pair = tl.program_id(0) // num_pieces
    words = tl.program_id(0) % num_pieces * PIECE + tl.arange(0, PIECE)
    mask = words < num_words
    source = tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    content = tl.load(source_ptr + source * source_stride + words, mask)
    tl.store(target_ptr + target * target_stride + words, content, mask)
