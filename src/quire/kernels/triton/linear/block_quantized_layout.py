"""The layout of block-quantized weights in GPU memory, and device functions that unpack them.

All block formats (the quantized formats of `formats.block_quantized.weights`) have the same layout.
Each stretch of 256 inputs has levels (the packed codes) and words (K is padded with zeros):

    levels  [stretches][N][256 * width / 8]  bytes
    words   [stretches][W][N]                words of four bytes: scales, zeros, offsets, factors

So a program reads one contiguous range of levels for each stretch, and a word has the scales, zeros
or offsets of several groups. Levels of width 8 are signed bytes. Levels of width 4 share bytes. In
quarter t of a stretch (32 bytes), byte j has input 64 t + j in its low half and 64 t + 32 + j in
its high half. Words, in this order:

    scales   two floats in a word, or four bytes if there are factors, of consecutive groups
    zeros    four int8 in a word, if groups have them
    offsets  like scales, if groups have them
    factors  of a block: the factor of scales in the low half, of offsets in the high half; or the
             fp32 factor of scales that are e4m3 floats

Shapes: R rows (outputs), I inputs, G groups, W words. Called by `block_quantized_matmul.py`,
`grouped_block_quantized_matmul.py`, `block_quantized_rows.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

#: The number of inputs in a stretch.
STRETCH = 256
#: The number of inputs that share a scale of x.
CHUNK_INPUTS = 32

_HALVES = "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;"
# prmt selects bytes of two words by the nibbles of its selector, whose top bits must be clear. So
# it looks up eight entries of the table at a time; a third prmt chooses between both results by the
# codes' top bits. The last two separate the low halves of bytes from the high halves.
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
class BlockQuantizedLayout:
    """The layout of one block format's weights, which kernels take as a constant."""

    #: The name of the block format.
    name: str
    #: The number of bits of a level, 4 or 8.
    width: int
    #: The number of inputs in a group.
    group_size: int
    #: A constant that is subtracted from each level.
    zero: int
    #: Sixteen int8 values that levels index; None if levels are the values.
    table: tuple[int, ...] | None
    #: Whether groups have zeros and offsets of their own.
    has_zeros: bool
    has_offsets: bool
    #: Whether the floats of groups are bf16; otherwise they are fp16.
    has_bfloat: bool
    #: Whether scales and offsets are small numbers, multiplied by factors.
    is_blocked: bool
    #: Whether these scales are e4m3 floats, with fp32 factors; otherwise they are integers.
    has_float8: bool
    #: Instructions that unpack levels of width 4 (`ptx_of`). None means Triton's own operations,
    #: since the interpreter runs no PTX.
    ptx: str | None

    def mangle(self) -> str:
        """The layout's name within the names of compiled functions; Triton calls it."""
        return f"{self.name}_{self.group_size}"

    @property
    def parts_of_chunk(self) -> int:
        """The number of groups in 32 inputs; 1 for larger groups."""
        return max(1, 32 // self.group_size)

    @property
    def chunks_of_group(self) -> int:
        """The number of chunks of 32 inputs in a group; 1 for smaller groups."""
        return max(1, self.group_size // 32)

    @property
    def groups_of_word(self) -> int:
        """The number of groups whose scales, or offsets, share a word."""
        return 4 if self.is_blocked else 2

    @property
    def zeros_at(self) -> int:
        """The index of the first word of zeros, which is also the number of words of scales."""
        return STRETCH // self.group_size // self.groups_of_word

    @property
    def offsets_at(self) -> int:
        """The index of the first word of offsets."""
        num_zeros = STRETCH // self.group_size if self.has_zeros else 0
        return self.zeros_at + -(-num_zeros // 4)

    @property
    def factors_at(self) -> int:
        """The index of the word of factors."""
        return self.offsets_at + (self.zeros_at if self.has_offsets else 0)

    @property
    def num_words(self) -> int:
        """The number of words of one output in one stretch."""
        return self.factors_at + self.is_blocked

    @property
    def level_bytes(self) -> int:
        """The number of bytes of the levels of one output in one stretch."""
        return STRETCH * self.width // 8

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """The number of bytes of levels and words of a weight of this size."""
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
        """Pack some rows -> levels [stretches, R, bytes] and words [stretches, W, R].

        `codes` are [R, I] uint8, or int8 for width 8. `scales` and `offsets` are [R, G] of the
        layout's kind, `zeros` [R, G] int8, and `factors` [R, B, 2] fp16 for B blocks, or [R, 1, 1]
        fp32. Arguments that the layout doesn't have are None.
        """
        stretches = num_stretches(codes.shape[1])
        words = [
            self._words(each, stretches) for each in (scales, zeros, offsets) if each is not None
        ]
        if factors is not None:
            of_stretches = factors.contiguous().view(torch.int32).permute(1, 2, 0)
            words.append(of_stretches.expand(stretches, -1, -1))
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
class BlockQuantizedWeight:
    """A packed weight with its layout; `BlockQuantizedLayout.empty` makes its levels and words."""

    layout: BlockQuantizedLayout
    levels: torch.Tensor
    words: torch.Tensor
    #: The bias, [N] of any floating dtype; None adds nothing.
    bias: torch.Tensor | None


def num_stretches(num_inputs: int) -> int:
    """The number of stretches of a weight with `num_inputs` inputs."""
    return -(-num_inputs // STRETCH)


def ptx_of(table: tuple[int, ...] | None) -> str:
    """PTX that unpacks four bytes of levels of width 4 to the values of low and high halves."""
    if table is None:
        return _HALVES
    entries = [
        sum((entry & 255) << 8 * at for at, entry in enumerate(table[first : first + 4]))
        for first in range(0, 16, 4)
    ]
    return _LOOK_UP.format(*map(hex, entries))


@triton.jit  # type: ignore[untyped-decorator]
def halves(levels, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels of width 4 -> the values of the low halves and of the high halves, int8."""
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
    """The table's entries for the codes, int8; without a table, the codes themselves."""
    values = codes
    if LAYOUT.table is not None:
        for code in tl.static_range(16):
            values = tl.where(codes == code, LAYOUT.table[code], values).to(tl.int8)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def float_of(words, place, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float at `place` (0 or 1) of each word, as fp32."""
    half = (words >> (16 * place)).to(tl.int16)
    if LAYOUT.has_bfloat:
        number = half.to(tl.bfloat16, bitcast=True)
    else:
        number = half.to(tl.float16, bitcast=True)
    return number.to(tl.float32)


@triton.jit
def byte_of(words, place):  # type: ignore[no-untyped-def]
    """The signed byte at `place` (0 to 3) of each word, as int8."""
    return (words >> (8 * place)).to(tl.int8)


@triton.jit
def float8_of(words, place):  # type: ignore[no-untyped-def]
    """The positive e4m3 float at `place` (0 to 3) of each word, as fp32. GPUs before sm_89 have no
    conversion: exponents are biased by 7 in e4m3 and by 127 in fp32, which the product corrects,
    for subnormal numbers too."""
    bits = ((words >> (8 * place)) & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit  # type: ignore[untyped-decorator]
def number_of(words, place, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale or offset at `place` of each word: int8 or fp32 if it has a factor, otherwise
    fp32."""
    if LAYOUT.has_float8:
        number = float8_of(words, place)
    elif LAYOUT.is_blocked:
        number = byte_of(words, place)
    else:
        number = float_of(words, place, LAYOUT)
    return number


@triton.jit  # type: ignore[untyped-decorator]
def factor_of(words, place, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of scales (place 0) or of offsets (1) in each word, as fp32."""
    if LAYOUT.has_float8:
        factor = words.to(tl.float32, bitcast=True)
    else:
        factor = float_of(words, place, LAYOUT)
    return factor
