"""The batch-invariant Triton product: y = x W^T + b.

A row's result has the same bits in every batch. An output element is the sum over K of products of
one row of x and one row of W, in an order that depends only on the shape and dtype of W:

    K is cut into slices of equal size, except for the last; their number is `slices_of`
    p_s = fp32 sum over the slice, in the tensor core, steps of k = 16 in ascending order
    y   = round((((0 + p_0) + p_1) + ...) + b)

M only changes which programs compute an element, never the order of additions:

- A tile of 64 rows is computed by one group of four warps, a tile of 128 rows by two. On sm_90 each
  group issues the same instruction, wgmma m64 n128 k16, with one accumulator for a slice; below
  sm_90 both tile sizes use mma m16 n8 k16. An element of the instruction's result depends only on
  one row of A and one column of B.
- One program computes all slices, one after the other. If the tiles alone don't fill the device,
  each slice has a program, and `merge_slices_kernel` adds their fp32 sums in the same order. An
  fp32 addition is the same operation in both cases; there is no product to fuse it with.

fp32 is multiplied without tensor cores, in chains of fused multiply-adds with ascending k.

W may be an fp8 weight: codes (e4m3, as uint8) with scales [G, N] fp32, of G groups of inputs. Codes
are widened to x's dtype in registers, which is exact, and x is not rounded. If G is 1, the scale of
an output multiplies its sum when the bias is added, in one rounding. Otherwise the sum over the
inputs of a tile, which are of one group, is multiplied by its scale when it is added: p_s is a
chain of fused multiply-adds. Then all tiles have 64 rows and eight warps, since there is one more
sum in registers.

Decode (M <= 64) streams W. A program has 3 tiles of 128 x 64 x 2 bytes in flight, and two programs
fit on an SM. Slices give a weight of any shape about 128 programs or more, if K is long enough to
be cut. Prefill has 64 operations for each byte that a 128 x 128 tile reads from L2.

Shapes: M rows of x, K inputs, N outputs, G groups of inputs. dtypes: bf16, fp16, fp32; x and W
alike. Called by `formats.dense` and `formats.block_quantized.float8_method`. Reference:
`torch.nn.functional.linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.support import as_rows, check_same
from quire.kernels.triton.widening import widen

_BLOCK_N = 128
#: The number of programs that fill a device, about its number of SMs. Results depend on this
#: number, so all devices use the same number.
_ENOUGH_PROGRAMS = 128
_SMALLEST_SLICE = 512
#: The size of slices is a multiple of this number, which is a multiple of the inputs of a tile.
_SLICE_UNIT = 64
#: The number of tiles of rows that read the same columns of W while these columns are in L2.
_GROUPED_ROWS = 8
#: Groups of inputs with a scale have a multiple of this number, so that the tensor core can sum
#: over the tile of inputs of one group.
SMALLEST_GROUP = 32


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tile of a program in one launch; the module's docstring says why it may depend on M."""

    rows: int
    inputs: int
    num_warps: int
    num_stages: int


def slices_of(num_outputs: int, num_inputs: int) -> int:
    """The number of slices that K is cut into, for a weight of this shape."""
    wanted = -(-_ENOUGH_PROGRAMS // -(-num_outputs // _BLOCK_N))
    return max(1, min(wanted, num_inputs // _SMALLEST_SLICE))


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N] in `out_dtype`: x's dtype (None), or fp32,
    where sums are not rounded. `scales` [G, N] fp32 are those of a weight of codes; None for other
    weights."""
    check_operands(x, weight, bias, scales)
    num_outputs = len(weight)
    out = torch.empty((*x.shape[:-1], num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        _launch(as_rows(x), weight, scales, bias, out.view(-1, num_outputs))
    return out


def check_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> None:
    """Raises ValueError unless x [..., K] can be multiplied by weight [N, K], contiguous, with the
    scales [G, N] of codes, and bias [N] added."""
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"weight is {tuple(weight.shape)}, but must be [N, K] and contiguous")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, but weight needs [..., {weight.shape[1]}]")
    if scales is None:
        check_same("x", x, "weight", weight)
    else:
        check_scales(weight, scales)
    if bias is None:
        return
    check_same("bias", bias, "x", x)
    if bias.shape != weight.shape[:1] or not bias.is_contiguous():
        raise ValueError(f"bias is {tuple(bias.shape)}, but must be [{weight.shape[0]}]")


def check_scales(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises ValueError unless codes [N, K] uint8 can have scales [G, N] fp32."""
    num_outputs, num_inputs = codes.shape
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32:
        raise ValueError(
            f"weight is {codes.dtype} and scales {scales.dtype}, but must be uint8 and float32"
        )
    num_groups, is_whole = len(scales), not num_inputs % max(1, len(scales))
    if scales.shape != (num_groups, num_outputs) or not scales.is_contiguous() or not is_whole:
        raise ValueError(
            f"scales are {tuple(scales.shape)}, but must be [G, {num_outputs}], contiguous, for G"
            f" equal groups of {num_inputs} inputs"
        )
    if num_groups != 1 and num_inputs // num_groups % SMALLEST_GROUP:
        raise ValueError(
            f"a group has {num_inputs // num_groups} inputs, but must have a multiple of "
            f"{SMALLEST_GROUP}"
        )


def inputs_of_scale(num_inputs: int, scales: torch.Tensor | None) -> int:
    """The number of inputs that share a scale; 0 if all do, or if there are no scales."""
    return 0 if scales is None or len(scales) == 1 else num_inputs // len(scales)


def inputs_of_tile(most: int, group: int) -> int:
    """The largest power of two that divides `group`, at most `most`; `most` if group is 0."""
    return min(most, group & -group) if group else most


def _tiles(num_rows: int, dtype: torch.dtype, group: int) -> _Tiles:
    if dtype == torch.float32:
        return _Tiles(rows=64, inputs=inputs_of_tile(16, group), num_warps=8, num_stages=2)
    if group:
        return _Tiles(rows=64, inputs=inputs_of_tile(64, group), num_warps=8, num_stages=4)
    if num_rows <= 64:
        return _Tiles(rows=64, inputs=64, num_warps=4, num_stages=4)
    return _Tiles(rows=128, inputs=64, num_warps=8, num_stages=3)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """x is [M, K] with any stride of rows; `out` is [M, N], contiguous."""
    # First, cut K into slices, and give them programs of their own if there are too few tiles.
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    group = inputs_of_scale(num_inputs, scales)
    tiles = _tiles(num_rows, x.dtype, group)
    # Scales of whole rows multiply sums last; those of groups in the loop over K.
    last_scales = None if group else scales
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_outputs, _BLOCK_N)
    num_slices = slices_of(num_outputs, num_inputs)
    slice_size = triton.cdiv(num_inputs, num_slices * _SLICE_UNIT) * _SLICE_UNIT
    is_split = num_slices > 1 and num_tiles < _ENOUGH_PROGRAMS
    sums = (
        torch.empty(num_slices, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        if is_split
        else out
    )
    matmul_kernel[(num_tiles, num_slices if is_split else 1)](
        x,
        weight,
        scales if group or not is_split else None,
        None if is_split else bias,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        slice_size,
        GROUP=group,
        NUM_SLICES=1 if is_split else num_slices,
        IS_EVEN=num_inputs % tiles.inputs == 0,
        BLOCK_M=tiles.rows,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=tiles.inputs,
        GROUP_M=_GROUPED_ROWS,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    # If each slice had its own program, add the slices' sums, scale them, and add the bias.
    if is_split:
        merge_slices(sums, last_scales, bias, out)


def merge_slices(
    sums: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Set out [M, N] = the sum of sums [slices, M, N] fp32, in their order, times scales [N], plus
    bias [N]."""
    merge_slices_kernel[(triton.cdiv(out.numel(), 1024),)](
        sums,
        scales,
        bias,
        out,
        *out.shape,
        len(sums),
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows x_stride apart
    weight_ptr,  # [N, K], of x's dtype or of codes
    scales_ptr,  # [G, N] of codes; None: they are multiplied later, or there are none
    bias_ptr,  # [N], or None
    out_ptr,  # [programs along axis 1, M, N]
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    slice_size,  # a multiple of BLOCK_K
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of BLOCK_K; 0: all, or no scales
    NUM_SLICES: tl.constexpr,  # slices in this program; if 1, it has slice tl.program_id(1)
    IS_EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,  # as of the launch; with it, scales are fetched ahead, too
):
    rows, is_row, outputs, near = tile_of_program(num_rows, num_outputs, BLOCK_M, BLOCK_N, GROUP_M)
    inputs = tl.arange(0, BLOCK_K)
    # Rows beyond the last are not read, since with few rows they would be most of the reads.
    row_mask = is_row[:, None]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    weight_ptrs = weight_ptr + near[:, None] * num_inputs + inputs[None, :]
    first_slice = tl.program_id(1)

    # Sum slice by slice, each with a sum of its own.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for index in range(NUM_SLICES):
        start = (first_slice + index) * slice_size
        end = tl.minimum(start + slice_size, num_inputs)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(start, end, BLOCK_K, num_stages=NUM_STAGES):
            x = load_rows(x_ptrs + k, row_mask, inputs, num_inputs - k, IS_EVEN)
            weight = load_weight(weight_ptrs + k, inputs, num_inputs - k, IS_EVEN)
            weight = tl.trans(widen(weight, x.dtype, True))
            if GROUP:
                scales = tl.load(scales_ptr + k // GROUP * num_outputs + near)
                sums += tl.dot(x, weight, input_precision="ieee") * scales[None, :]
            else:
                sums = tl.dot(x, weight, sums, input_precision="ieee")
        total += sums

    IS_SCALED: tl.constexpr = scales_ptr is not None and GROUP == 0
    scales = tl.load(scales_ptr + near)[None, :] if IS_SCALED else None
    bias = None if bias_ptr is None else tl.load(bias_ptr + near)[None, :].to(tl.float32)
    total = scale_and_add(total, scales, bias)
    out_rows = first_slice.to(tl.int64) * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None] * num_outputs + outputs[None, :]
    out_mask = row_mask & (outputs[None, :] < num_outputs)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), out_mask)


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(  # type: ignore[no-untyped-def]
    ptrs, row_mask, inputs, num_left, IS_EVEN: tl.constexpr
):
    """A tile of x [rows, inputs], with zeros in rows where the mask [rows, 1] is false, and, unless
    IS_EVEN, from input num_left on."""
    if IS_EVEN:
        tile = tl.load(ptrs, row_mask, other=0.0)
    else:
        tile = tl.load(ptrs, row_mask & (inputs[None, :] < num_left), other=0.0)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def load_weight(ptrs, inputs, num_left, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of W [outputs, inputs], with zeros from input num_left on, unless IS_EVEN."""
    return tl.load(ptrs) if IS_EVEN else tl.load(ptrs, inputs[None, :] < num_left, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def add_product(  # type: ignore[no-untyped-def]
    sums, weight, x, scales_ptrs, k, num_inputs, num_outputs, GROUP: tl.constexpr
):
    """sums + W x [outputs, rows], for inputs of one group, from input k on.

    W [outputs, inputs] is of the dtype of x [inputs, rows], or of codes. Unless GROUP is 0, the
    product is multiplied by the group's scales, which `scales_ptrs` [outputs] have for group 0.
    """
    weight = widen(weight, x.dtype, True)
    if GROUP:
        # A tile beyond the last input has zeros alone, and reads scales that exist.
        group = tl.minimum(k, num_inputs - 1) // GROUP
        scales = tl.load(scales_ptrs + group * num_outputs)
        sums += tl.dot(weight, x, input_precision="ieee") * scales[:, None]
    else:
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    return sums


@triton.jit
def scale_and_add(total, scales, bias):  # type: ignore[no-untyped-def]
    """total * scales + bias, rounded once. Either may be None."""
    if scales is not None and bias is not None:
        total = tl.fma(total, scales, bias)
    elif scales is not None:
        total *= scales
    elif bias is not None:
        total += bias
    return total


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_program(  # type: ignore[no-untyped-def]
    num_rows,
    num_outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The rows of a program's tile, whether each exists, its outputs, and as int64 the outputs that
    it reads: the last one instead of missing ones.

    Consecutive programs compute GROUP_M tiles of rows for one tile of outputs, then for the next.
    """
    program = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    group_size = GROUP_M * tl.cdiv(num_outputs, BLOCK_N)
    first_m = program // group_size * GROUP_M
    group_rows = tl.minimum(tiles_m - first_m, GROUP_M)
    place = program % group_size
    rows = (first_m + place % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = place // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, rows < num_rows, outputs, tl.minimum(outputs, num_outputs - 1).to(tl.int64)


@triton.jit
def store_transposed(  # type: ignore[no-untyped-def]
    out_ptr, result, rows, is_row, outputs, num_outputs
):
    """Store a result [outputs, rows] to rows of out [M, num_outputs]."""
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    out_mask = is_row[None, :] & (outputs[:, None] < num_outputs)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), out_mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def merge_slices_kernel(  # type: ignore[no-untyped-def]
    sums_ptr,  # [num_slices, M, N] fp32
    scales_ptr,  # [N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_slices,
    BLOCK: tl.constexpr,
):
    num_elements = num_rows.to(tl.int64) * num_outputs
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    total = tl.zeros((BLOCK,), tl.float32)
    sums_ptrs = sums_ptr + places
    for _ in range(num_slices):
        total += tl.load(sums_ptrs, mask, other=0.0)
        sums_ptrs += num_elements
    outputs = places % num_outputs
    scales = None if scales_ptr is None else tl.load(scales_ptr + outputs, mask, other=0.0)
    bias = None if bias_ptr is None else tl.load(bias_ptr + outputs, mask, other=0.0)
    total = scale_and_add(total, scales, bias)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask)
