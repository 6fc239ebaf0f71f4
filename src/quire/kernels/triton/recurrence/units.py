"""Where programs find their unit of a recurrent state, and sums in one fixed order.

What the kernels of this folder share. A sequence's state lies in the pages that its row of a table
names, cut in units that are computed independently of each other:

    unit u of a layer   in entry (first_unit + u) // units_per_page of the row,
                        at word ((first_unit + u) % units_per_page) * words of a unit of that page

A matrix state's unit is 16 columns of a head, fp32 [rows][16]. A program has one unit, or some of
its columns where there are so many rows that they would not fit a warp's registers: columns are
independent too. It is one warp, so that no sum over rows waits for another one.

The law, that no result depends on how a prompt was cut in chunks: one kernel with one loop over
tokens computes decode and prefill; each operation is rounded by itself, since launches turn the
fusing of multiply-adds off and `tl.fma` is written where it is wanted; and sums go by `sum_rows`,
whose order is part of its definition. Triton's own sum has an order that follows from the layout of
registers, which follows from the alignment of arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import next_power_of_two

UNIT_COLUMNS = 16
"""Of a matrix state's unit."""

MAX_ROWS = 1024
"""Of a matrix state."""

_PROGRAM_WORDS = 2048
"""Of a state, in the 32 threads of a program: 64 registers of each."""

_MANY_PROGRAMS = 512
"""One for each quarter of a processor, which issues one warp's instructions at a time."""


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of one layer, in one step of S sequences.

    pages: [N, words] fp32, pages any distance apart. table: [R, most entries] int32.
    query_start: [S + 1] int32. context_lens: [S] int32; as many as the sequence's tokens in the
    step: it begins with zeros; 0: nothing of it is touched. rows: [S] int64, of the table.
    num_prompts: how many sequences may have several tokens; it changes no bit.
    """

    pages: torch.Tensor
    table: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    first_unit: int
    units_per_page: int
    num_prompts: int

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """As the kernels take them, behind the layer's own."""
        return (
            self.pages,
            self.table,
            self.query_start,
            self.context_lens,
            self.rows,
            self.pages.stride(0),
            self.table.stride(0),
            self.first_unit,
            self.units_per_page,
        )

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]


def program_columns(num_rows: int, num_columns: int, num_prompts: int) -> int:
    """How many columns of a unit a program has, for states of so many rows and columns.

    As many as fit; fewer where prompts' programs, which take long, would leave processors of a
    large GPU idle. It changes no bit.
    """
    columns = max(1, min(UNIT_COLUMNS, _PROGRAM_WORDS // next_power_of_two(num_rows)))
    while num_prompts and columns > 4 and num_columns // columns * num_prompts < _MANY_PROGRAMS:
        columns //= 2
    return columns


def dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, size] with a token's elements in one run; tokens any distance apart."""
    is_dense = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if is_dense else x.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def unit_places(  # type: ignore[no-untyped-def]
    pages_ptr,
    table_ptr,
    row,  # int64
    page_stride,
    table_stride,
    unit,  # of the group: first_unit is added; int32, one or a tensor of them
    units_per_page,
    WORDS: tl.constexpr,
):
    """Pointers to the first word of units."""
    page = tl.load(table_ptr + row * table_stride + unit // units_per_page).to(tl.int64)
    return pages_ptr + page * page_stride + unit % units_per_page * WORDS


@triton.jit  # type: ignore[untyped-decorator]
def matrix_places(  # type: ignore[no-untyped-def]
    pages_ptr,
    table_ptr,
    row,
    page_stride,
    table_stride,
    first_unit,
    units_per_page,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Pointers [BLOCK_ROWS, COLUMNS] to what the program, by its first number, has of a matrix
    state, and the first of these columns among all that the layer has.

    IS_WIDE: a thread loads four columns of a row at once, and sums of rows go over many threads.
    Else a thread has single words, of more rows, and most of a sum is its own. The second is for
    loops: Triton gives a thread what it knows to be aligned, which it doesn't of a remainder.
    """
    unit = tl.program_id(0) // (16 // COLUMNS)
    part = tl.program_id(0) % (16 // COLUMNS) * COLUMNS
    if not IS_WIDE:
        part = tl.program_id(0) * COLUMNS % 16
    places = unit_places(
        pages_ptr,
        table_ptr,
        row,
        page_stride,
        table_stride,
        first_unit + unit,
        units_per_page,
        ROWS * 16,
    )
    rows = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    places += part.to(tl.int64) + rows[:, None] * 16 + tl.arange(0, COLUMNS)[None, :]
    return places, unit * 16 + part


@triton.jit  # type: ignore[untyped-decorator]
def sum_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [ROWS, COLUMNS] -> [COLUMNS]; ROWS a power of two.

    The lower half of the rows is added to the upper half, until one row is left. A sum of two has
    one result in every layout.
    """
    for level in tl.static_range(10):  # as many as MAX_ROWS has
        if ROWS >> level > 1:
            x = tl.sum(tl.reshape(x, (2, ROWS >> (level + 1), COLUMNS)), axis=0)
    return tl.reshape(x, (COLUMNS,))
