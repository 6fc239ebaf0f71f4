"""How products of block-quantized weights are launched."""

from tests.formats.block_quantized_samples import BLOCK_FORMATS as SAMPLES
from tests.formats.block_quantized_samples import NVFP4
from tests.kernels.triton.compiling import KernelSpec, early

from quire.formats.block_quantized.triton_method import layout_of
from quire.kernels.triton.linear.block_quantized_layout import BlockQuantizedLayout
from quire.kernels.triton.linear.block_quantized_matmul import (
    block_quantized_matmul_kernel,
    most_rows,
)
from quire.kernels.triton.linear.block_quantized_rows import unpack_rows_kernel
from quire.kernels.triton.linear.grouped_block_quantized_matmul import (
    grouped_block_quantized_matmul_kernel,
)
from quire.kernels.triton.linear.quantize_groups import quantize_groups_kernel
from quire.kernels.triton.linear.widened_block_matmul import tile_of, widened_block_matmul_kernel

BLOCK_FORMATS = SAMPLES | {"floats, a factor": NVFP4}
GPUS = (80, 86, 89, 90, 100, 120)
UNFUSED = {"enable_fp_fusion": False}


def _layout(block_format: str) -> BlockQuantizedLayout:
    layout = layout_of(BLOCK_FORMATS[block_format])
    assert isinstance(layout, BlockQuantizedLayout)
    return layout


def _levels(layout: BlockQuantizedLayout) -> str:
    return "*u8" if layout.width == 4 else "*i8"


def _quantized(
    block_format: str, rows: int, outputs: int, num_stages: int, targets: tuple[int, ...] = (90,)
) -> KernelSpec:
    layout = _layout(block_format)
    return KernelSpec(
        block_quantized_matmul_kernel,
        f"{rows} rows, {block_format}",
        {
            "x_ptr": "*i8",
            "x_scales_ptr": "*fp32",
            "levels_ptr": _levels(layout),
            "words_ptr": "*i32",
            "out_ptr": "*bf16",
            "num_rows": "i32",
            "num_outputs": "i32:16",
            "num_stretches": "i32",
        },
        {"bias_ptr": None, "LAYOUT": layout, "BLOCK_M": rows, "BLOCK_N": outputs, "GROUP_M": 8}
        | {"PREFETCHED": 512 // outputs if layout.width == 4 else 256 // outputs},
        num_warps=outputs // 16,
        num_stages=num_stages,
        targets=targets,
        options=UNFUSED,
    )


def _quantize(size: int) -> KernelSpec:
    return KernelSpec(
        quantize_groups_kernel,
        f"of {size}",
        {"x_ptr": "*bf16", "q_ptr": "*i8", "scales_ptr": "*fp32"}
        | dict.fromkeys(("num_inputs", "width", "x_stride"), "i32:16")
        | {"scales_stride": "i32"},
        {"group_stride": 1, "SIZE": size, "ROTATION": 1, "BLOCK": 1024},
        options=UNFUSED,
    )


def _grouped(block_format: str, top_k: int) -> KernelSpec:
    return KernelSpec(
        grouped_block_quantized_matmul_kernel,
        f"experts, {top_k}, {block_format}",
        {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "addresses_ptr": "*i64", "out_ptr": "*bf16"}
        | dict.fromkeys(["tiles_ptr"] + ["order_ptr"] * (top_k > 1), "*i32")
        | {"num_experts": "i32:16", "num_outputs": "i32:16", "num_stretches": "i32"},
        {"biases_ptr": None, "LAYOUT": _layout(block_format), "PAIRS_PER_ROW": top_k}
        | {"BLOCK_M": 16, "BLOCK_N": 32}
        | ({} if top_k > 1 else {"order_ptr": None}),
        num_warps=2,
        num_stages=4,
        options=UNFUSED,
    )


def _rows(block_format: str, *, picked: bool) -> KernelSpec:
    layout = _layout(block_format)
    return KernelSpec(
        unpack_rows_kernel,
        f"{'picked, ' * picked}{block_format}",
        {"levels_ptr": _levels(layout), "words_ptr": "*i32", "out_ptr": "*bf16", "first": "i32"}
        | {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16"}
        | ({"rows_ptr": "*i64"} if picked else {}),
        {"LAYOUT": layout, "BLOCK": 32} | ({} if picked else {"rows_ptr": None}),
        options=UNFUSED,
    )


def _widened(block_format: str, rows: int, targets: tuple[int, ...]) -> KernelSpec:
    layout, tile = _layout(block_format), tile_of(rows)
    sizes = ("num_outputs", "num_inputs", "x_stride")
    return KernelSpec(
        widened_block_matmul_kernel,
        f"{rows} rows, {block_format}",
        {"x_ptr": "*bf16", "levels_ptr": _levels(layout), "words_ptr": "*i32", "out_ptr": "*fp32"}
        | dict.fromkeys(sizes, "i32:16")
        | {"num_rows": "i32", "num_stretches": "i32:16", "slice_size": "i32"},
        {"bias_ptr": None, "LAYOUT": layout, "IS_EVEN": True, "BLOCK_M": tile.rows}
        | {"BLOCK_N": tile.outputs, "QUARTERS": tile.quarters, "GROUP_M": 8}
        | {"NUM_STAGES": tile.num_stages},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=targets,
        max_stack_bytes=16,  # of some formats, most with 64 rows
    )


SPECS = [
    _quantize(32),
    _quantized("blocks, offsets", 16, 64, 3),
    _grouped("a table", 8),
    _grouped("floats, a factor", 8),
    _rows("blocks, offsets", picked=True),
    _widened("blocks, offsets", 16, (80, 90)),
]
MORE = [
    *(_widened(name, rows, GPUS) for name in BLOCK_FORMATS for rows in (16, 32, 64)),
    _quantized("a table", 8, 32, 5, (80,)),
    early(_quantize(32)),
    early(_quantized("blocks, offsets", 8, 16, 5)),
    early(_quantized("bytes", 8, 32, 4)),
    *(_grouped(name, 1) for name in BLOCK_FORMATS),
    *(_rows(name, picked=False) for name in BLOCK_FORMATS),
    *(
        _quantized(name, 8, 32, 5 if block_format.width == 4 else 4)
        for name, block_format in BLOCK_FORMATS.items()
    ),
    *(
        _quantized(name, 16, 32, 5 if block_format.width == 4 else 4)
        for name, block_format in BLOCK_FORMATS.items()
    ),
    *(_quantized(name, most_rows(_layout(name)), 64, 3) for name in BLOCK_FORMATS),
]
