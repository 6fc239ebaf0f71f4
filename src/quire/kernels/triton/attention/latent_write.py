"""Writes the vectors of latent layers into their pages, in Triton.

    pages[slot // B, slot % B] = k of the token, for each token whose slot is not -1

One program writes one token. Bound by memory: D elements are read and written, 1,152 bytes each way
for the 576 bf16 elements of DeepSeek-V2 (arXiv:2405.04434). Models with latent layers rotate their
keys themselves, so nothing is computed here. The reference is an assignment by index.

Shapes: T tokens, D elements a vector, N blocks, B block size. Called by `attention/triton_paged.py`
before `latent_attention.py`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import check_same, next_power_of_two


def latent_write(k: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k [T, 1, D], of any token stride, to pages [N, B, D], of any page stride.

    `slot_mapping` is [T] int64: block * B + offset, or -1 for a token of padding. No two tokens
    have the same slot. Raises ValueError for other shapes.
    """
    check_same("pages", pages, "k", k)
    num_tokens, _, size = k.shape
    is_page = pages.shape[2] == size and pages.stride()[1:] == (size, 1)
    if k.shape[1] != 1 or k.stride(2) != 1 or not is_page:
        raise ValueError(
            f"k is {tuple(k.shape)}, strides {k.stride()}, and pages {tuple(pages.shape)}, strides "
            f"{pages.stride()}, but must be [T, 1, D] and [N, B, D] with contiguous pages"
        )
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping is {tuple(slot_mapping.shape)} {slot_mapping.dtype}, but must be "
            f"({num_tokens},) torch.int64"
        )
    if num_tokens:
        latent_write_kernel[(num_tokens,)](
            k,
            pages,
            slot_mapping,
            k.stride(0),
            pages.stride(0),
            D=size,
            B=pages.shape[1],
            BLOCK=next_power_of_two(size),
            num_warps=2,
            enable_fp_fusion=True,
        )


@triton.jit  # type: ignore[untyped-decorator]
def latent_write_kernel(  # type: ignore[no-untyped-def]
    k_ptr,  # [T, 1, D], tokens k_stride apart
    pages_ptr,  # [N, B, D], pages page_stride apart
    slots_ptr,  # [T] int64
    k_stride,
    page_stride,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        dims = tl.arange(0, BLOCK)
        place = pages_ptr + slot // B * page_stride + slot % B * D
        tl.store(place + dims, tl.load(k_ptr + token * k_stride + dims, dims < D), dims < D)
