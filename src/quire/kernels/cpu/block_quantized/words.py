"""Unpacks int32 words that hold several quantized weights (`csrc/packing/unpack_words.cpp`)."""

import ctypes

import torch

from quire.kernels.cpu.library import load_library

_WIDTHS = (4, 8)
_IN_ORDER = 8
"""The number of rows whose codes a word holds if there is an `order`."""


def unpack_words(
    words: torch.Tensor, width: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Codes [R, I] uint8 of R rows and I inputs, from words [A, B] int32, with any stride of A.

    Without an `order`, a word has 32 / width inputs of one row, from the lowest bits up, and B = R.
    With an `order`, a word has one input of eight rows, four bits each, and the i-th lowest bits
    belong to row order[i]. Then A = I, a multiple of 8. Raises ValueError.
    """
    if words.dim() != 2 or words.dtype is not torch.int32 or words.stride(1) != 1:
        raise ValueError(
            f"words are {words.dtype} {list(words.shape)} with strides {words.stride()}, but must"
            " be int32 [A, B], with the words of a row side by side"
        )
    num_rows, num_columns = words.shape
    if width not in _WIDTHS:
        raise ValueError(f"width is {width}, but must be 4 or 8")
    each, given = 32 // width, None
    shape = (num_columns, num_rows * each)
    if order is not None:
        if width != 4 or sorted(order) != list(range(_IN_ORDER)) or num_rows % _IN_ORDER:
            raise ValueError(
                f"order is {order} for {num_rows} inputs of {width} bits, but must have 0 to 7 once"
                " each, for a multiple of 8 inputs of 4 bits"
            )
        given, shape = (ctypes.c_int32 * _IN_ORDER)(*order), (num_columns * _IN_ORDER, num_rows)
    codes = torch.empty(shape, dtype=torch.uint8)
    load_library().unpack_words(
        *(words.data_ptr(), words.stride(0), num_rows, num_columns),
        *(width, given, codes.data_ptr()),
    )
    return codes
