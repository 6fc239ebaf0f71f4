"""Device functions that locate units of recurrent states and sum in a fixed order.

The kernels of this folder share them. A sequence's state lies in the pages listed in its row of a
table, cut in units that are computed independently of each other:

    unit u of a layer   in entry (first_unit + u) // units_per_page of the row,
                        at word ((first_unit + u) % units_per_page) * words of a unit of that page

A matrix state's unit is 16 columns of a head, fp32 [rows][16]. A program has one unit, or only some
of its columns if all would not fit a warp's registers; columns are independent too. A program is
one warp, so that sums over rows wait for no other warp.

No result depends on how a prompt was cut into chunks, for three reasons. One kernel with one loop
over tokens computes decode and prefill. Each operation is rounded by itself: launches turn off the
fusing of multiply-adds, and `tl.fma` is explicit. And `sum_rows` defines the order of its sums,
while the order of Triton's own sum follows from the layout of registers, and so from the alignment
of arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import next_power_of_two

#: The number of columns in a matrix state's unit.
UNIT_COLUMNS = 16

#: The largest number of rows of a matrix state.
MAX_ROWS = 1024

#: Maximum number of words of a state in one program: 64 registers of each of its 32 threads.
_PROGRAM_WORDS = 2048

#: The number of programs that fills a large GPU, with one warp for each quarter of a processor.
_MANY_PROGRAMS = 512


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of one layer, in one step of S sequences."""

    #: [N, words] fp32; pages may be any distance apart.
    pages: torch.Tensor
    #: The pages of each row's states, [R, most entries] int32.
    table: torch.Tensor
    #: Each sequence's first token in the step, and the end of the last one, [S + 1] int32.
    query_start: torch.Tensor
    #: The number of each sequence's tokens up to the end of the step, [S] int32. If the step has
    #: all of these tokens, the state begins as zeros. 0 marks padding, whose state is neither read
    #: nor written.
    context_lens: torch.Tensor
    #: Each sequence's row of the table, [S] int64.
    rows: torch.Tensor
    #: The index of the layer's first unit among the units of a row.
    first_unit: int
    units_per_page: int
    #: The number of sequences that may have several tokens in the step. It selects the launch, and
    #: does not change results.
    num_prompts: int
    #: The number of each sequence's last tokens that are drafts, [S] int32: the state before them
    #: is stored. None if there are no drafts.
    num_drafts: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor | int | None, ...]:
        """The last arguments of each kernel, after those of its layer."""
        return (
            self.pages,
            self.table,
            self.query_start,
            self.context_lens,
            self.rows,
            self.num_drafts,
            self.pages.stride(0),
            self.table.stride(0),
            self.first_unit,
            self.units_per_page,
        )

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]


def program_columns(num_rows: int, num_columns: int, num_prompts: int) -> int:
    """The number of a unit's columns in each program, for states of num_rows x num_columns.

    It is the most that fit the registers, or fewer if the long programs of prompts would leave
    processors of a large GPU idle. Results don't depend on it.
    """
    columns = max(1, min(UNIT_COLUMNS, _PROGRAM_WORDS // next_power_of_two(num_rows)))
    while num_prompts and columns > 4 and num_columns // columns * num_prompts < _MANY_PROGRAMS:
        columns //= 2
    return columns


def dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, size] with each token's elements contiguous; copied only if they are not."""
    is_dense = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if is_dense else x.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def unit_places(  # type: ignore[no-untyped-def]
    pages_ptr,
    table_ptr,
    row,  # int64
    page_stride,
    table_stride,
    unit,  # first_unit is added already; an int32 or a tensor of them
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
    """Pointers [BLOCK_ROWS, COLUMNS] to the program's part of a matrix state, and the number of its
    first column among all of the layer's. The program's first id selects the part.

    With IS_WIDE, a thread loads four columns of a row at once, and sums of rows go over many
    threads. Otherwise a thread has single words of more rows, and computes most of a sum alone,
    which is faster in a loop over tokens.
    """
    unit = tl.program_id(0) // (16 // COLUMNS)
    part = tl.program_id(0) % (16 // COLUMNS) * COLUMNS
    if not IS_WIDE:
        # Compute the same number as a remainder, which Triton does not know to be aligned. So it
        # gives single words to a thread.
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


@triton.jit
def kept_end(num_drafts_ptr, sequence, end):  # type: ignore[no-untyped-def]
    """The end of a sequence's tokens without its drafts. `end` is the end of all of its tokens."""
    if num_drafts_ptr is not None:
        end -= tl.load(num_drafts_ptr + sequence)
    return end


@triton.jit  # type: ignore[untyped-decorator]
def sum_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [ROWS, COLUMNS] -> [COLUMNS]; ROWS is a power of two.

    The lower half of the rows is added to the upper half, until one row is left. A sum of two
    numbers has the same result in every layout.
    """
    for level in tl.static_range(10):  # MAX_ROWS is 2^10
        if ROWS >> level > 1:
            x = tl.sum(tl.reshape(x, (2, ROWS >> (level + 1), COLUMNS)), axis=0)
    return tl.reshape(x, (COLUMNS,))
