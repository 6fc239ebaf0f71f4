"""How coded weights lie in a GPU's memory, and how a kernel takes them apart.

One layout for every coding (`formats.codes`). For each stretch of 256 inputs (K is padded with
zeros):

    levels  [stretches][N][256 * width / 8]  bytes
    words   [stretches][W][N]                words of four bytes: all that is a group's or block's

so that what a program reads of a stretch is one run of bytes, and each word brings several groups'
numbers. Levels of width 4: of quarter t of a stretch (32 bytes) the low half of byte j is input
64 t + j, the high half input 64 t + 32 + j. Levels of width 8 are signed bytes. Words, in this
order:

    scales   two floats a word, or four int8 where there are blocks, of consecutive groups
    zeros    four int8 a word, where groups have them
    offsets  as scales
    factors  of a block: that of scales in the low half, that of offsets in the high half

Shapes: R rows (outputs), I inputs, G groups, W words. Called by `coded_matmul.py`,
`grouped_coded_matmul.py`, `coded_rows.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

STRETCH = 256
CHUNK_INPUTS = 32
"""That share a scale of x."""

_HALVES = "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;"
# prmt takes bytes of two words by nibbles of its selector, of which the top bit must be clear:
# eight entries of the table at a time, and then from either eight as the codes' top bits say. What
# comes out has the low and high halves of bytes in turn.
_LOOK_UP = """
{{
.reg .b32 places, tops, below, above, first, second;
and.b32 places, $2, 0x77777777;
shr.u32 tops, $2, 1;
lop3.b32 tops, tops, 0x44444444, 0x32103210, 0xEA;
prmt.b32 below, {0}, {1}, places;
prmt.b32 above, {2}, {3}, places;
prmt.b32 first, below, above, tops;
shr.u32 places, places, 16;
shr.u32 tops, tops, 16;
prmt.b32 below, {0}, {1}, places;
prmt.b32 above, {2}, {3}, places;
prmt.b32 second, below, above, tops;
prmt.b32 $0, first, second, 0x6420;
prmt.b32 $1, first, second, 0x7531;
}}
"""


@dataclass(frozen=True, slots=True)
class CodedLayout:
    """The layout of one coding's weights; kernels are given it as a constant.

    name: of the coding. zero: that levels are above the numbers that they stand for. table: what
    these are instead, sixteen int8; None: they are. has_bfloat: floats of groups are bf16, else
    fp16. is_blocked: scales and offsets are integers that blocks' factors multiply. ptx: takes
    levels of width 4 apart (`ptx_of`); None: Triton's own operations do, as the interpreter knows
    no PTX.
    """

    name: str
    width: int
    group_size: int
    zero: int
    table: tuple[int, ...] | None
    has_zeros: bool
    has_offsets: bool
    has_bfloat: bool
    is_blocked: bool
    ptx: str | None

    def mangle(self) -> str:
        """A name for it in those of compiled functions."""
        return f"{self.name}_{self.group_size}"

    @property
    def parts_of_chunk(self) -> int:
        """Groups of 32 inputs, where these are several."""
        return max(1, 32 // self.group_size)

    @property
    def chunks_of_group(self) -> int:
        """Times 32 inputs; 1 for smaller groups."""
        return max(1, self.group_size // 32)

    @property
    def groups_of_word(self) -> int:
        """Of scales and offsets."""
        return 4 if self.is_blocked else 2

    @property
    def zeros_at(self) -> int:
        """The first word of zeros, and so how many of scales there are."""
        return STRETCH // self.group_size // self.groups_of_word

    @property
    def offsets_at(self) -> int:
        """The first word of offsets."""
        num_zeros = STRETCH // self.group_size if self.has_zeros else 0
        return self.zeros_at + -(-num_zeros // 4)

    @property
    def factors_at(self) -> int:
        """The word of factors."""
        return self.offsets_at + (self.zeros_at if self.has_offsets else 0)

    @property
    def num_words(self) -> int:
        """Of an output and a stretch."""
        return self.factors_at + self.is_blocked

    @property
    def level_bytes(self) -> int:
        """Of an output and a stretch."""
        return STRETCH * self.width // 8

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Of levels and words of a weight of this size."""
        return num_stretches(num_inputs) * num_outputs * (self.level_bytes + 4 * self.num_words)

    def empty(
        self, num_outputs: int, num_inputs: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels and words, uninitialised."""
        stretches = num_stretches(num_inputs)
        kind = torch.uint8 if self.width == 4 else torch.int8
        levels = torch.empty(stretches, num_outputs, self.level_bytes, dtype=kind, device=device)
        shape = (stretches, self.num_words, num_outputs)
        return levels, torch.empty(shape, dtype=torch.int32, device=device)

    def pack(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        offsets: torch.Tensor | None,
        factors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows -> levels [stretches, R, bytes] and words [stretches, W, R].

        codes [R, I] uint8, or int8 of width 8, as levels are; scales, offsets [R, G] of the
        layout's kind; zeros [R, G] int8; factors [R, B, 2] fp16.
        """
        stretches = num_stretches(codes.shape[1])
        words = [
            self._words(each, stretches) for each in (scales, zeros, offsets) if each is not None
        ]
        if factors is not None:
            words.append(factors.contiguous().view(torch.int32).permute(1, 2, 0))
        return self._pack_levels(codes, stretches), torch.cat(words, dim=1)

    def _pack_levels(self, codes: torch.Tensor, stretches: int) -> torch.Tensor:
        padded = functional.pad(codes, (0, stretches * STRETCH - codes.shape[1]))
        if self.width == 8:
            return padded.view(len(codes), stretches, STRETCH).transpose(0, 1)
        quarters = padded.view(len(codes), stretches, 4, 2, 32)
        packed = quarters[:, :, :, 0] | quarters[:, :, :, 1] << 4
        return packed.flatten(2).transpose(0, 1)

    def _words(self, of_groups: torch.Tensor, stretches: int) -> torch.Tensor:
        """[R, G] floats or bytes -> [stretches, words, R] int32."""
        num_groups = STRETCH // self.group_size
        numbers = functional.pad(of_groups, (0, stretches * num_groups - of_groups.shape[1]))
        numbers = numbers.view(len(numbers), stretches, num_groups)
        numbers = functional.pad(numbers, (0, -num_groups % (4 // numbers.element_size())))
        return numbers.contiguous().view(torch.int32).permute(1, 2, 0)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """levels and words as `CodedLayout.empty` makes them; bias [N], of any floating dtype, or
    None."""

    layout: CodedLayout
    levels: torch.Tensor
    words: torch.Tensor
    bias: torch.Tensor | None


def num_stretches(num_inputs: int) -> int:
    """Of a weight with so many inputs."""
    return -(-num_inputs // STRETCH)


def ptx_of(table: tuple[int, ...] | None) -> str:
    """Takes four bytes of levels of width 4 apart: values of the low and of the high halves."""
    if table is None:
        return _HALVES
    entries = [
        sum((entry & 255) << 8 * at for at, entry in enumerate(table[first : first + 4]))
        for first in range(0, 16, 4)
    ]
    return _LOOK_UP.format(*map(hex, entries))


@triton.jit  # type: ignore[untyped-decorator]
def halves(levels, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels of width 4 -> values of the low halves and of the high ones, int8."""
    if LAYOUT.ptx is not None:
        low, high = tl.inline_asm_elementwise(
            LAYOUT.ptx, "=r,=r,r", [levels], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low = value_of((levels & 15).to(tl.int8), LAYOUT)
        high = value_of((levels >> 4).to(tl.int8), LAYOUT)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def value_of(codes, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of the table, int8; without one the codes themselves."""
    values = codes
    if LAYOUT.table is not None:
        for code in tl.static_range(16):
            values = tl.where(codes == code, LAYOUT.table[code], values).to(tl.int8)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def float_of(words, place, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the two floats of each word, fp32."""
    half = (words >> (16 * place)).to(tl.int16)
    if LAYOUT.has_bfloat:
        number = half.to(tl.bfloat16, bitcast=True)
    else:
        number = half.to(tl.float16, bitcast=True)
    return number.to(tl.float32)


@triton.jit
def byte_of(words, place):  # type: ignore[no-untyped-def]
    """One of the four signed bytes of each word, int8."""
    return (words >> (8 * place)).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator]
def number_of(words, place, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A scale or offset: int8 where there are blocks, else fp32."""
    return byte_of(words, place) if LAYOUT.is_blocked else float_of(words, place, LAYOUT)
