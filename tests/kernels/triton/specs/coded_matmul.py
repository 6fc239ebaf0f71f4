"""How products of coded weights are launched."""

from tests.formats.coded_samples import CODINGS
from tests.kernels.triton.compiling import KernelSpec, early

from quire.formats.coded_triton import layout_of
from quire.kernels.triton.linear.coded_layout import CodedLayout
from quire.kernels.triton.linear.coded_matmul import coded_matmul_kernel, most_rows
from quire.kernels.triton.linear.coded_rows import unpack_rows_kernel
from quire.kernels.triton.linear.grouped_coded_matmul import grouped_coded_matmul_kernel
from quire.kernels.triton.linear.quantize_groups import quantize_groups_kernel

UNFUSED = {"enable_fp_fusion": False}


def _layout(coding: str) -> CodedLayout:
    layout = layout_of(CODINGS[coding])
    assert isinstance(layout, CodedLayout)
    return layout


def _levels(layout: CodedLayout) -> str:
    return "*u8" if layout.width == 4 else "*i8"


def _coded(
    coding: str, rows: int, outputs: int, num_stages: int, targets: tuple[int, ...] = (90,)
) -> KernelSpec:
    layout = _layout(coding)
    return KernelSpec(
        coded_matmul_kernel,
        f"{rows} rows, {coding}",
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


def _grouped(coding: str, top_k: int) -> KernelSpec:
    return KernelSpec(
        grouped_coded_matmul_kernel,
        f"experts, {top_k}, {coding}",
        {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "addresses_ptr": "*i64", "out_ptr": "*bf16"}
        | dict.fromkeys(("experts_ptr", "firsts_ptr", "ends_ptr"), "*i32")
        | ({"order_ptr": "*i32"} if top_k > 1 else {})
        | {"num_experts": "i32:16", "num_outputs": "i32:16", "num_stretches": "i32"},
        {"biases_ptr": None, "LAYOUT": _layout(coding), "PAIRS_PER_ROW": top_k}
        | {"BLOCK_M": 16, "BLOCK_N": 32}
        | ({} if top_k > 1 else {"order_ptr": None}),
        num_warps=2,
        num_stages=4,
        options=UNFUSED,
    )


def _rows(coding: str, *, picked: bool) -> KernelSpec:
    layout = _layout(coding)
    return KernelSpec(
        unpack_rows_kernel,
        f"{'picked, ' * picked}{coding}",
        {"levels_ptr": _levels(layout), "words_ptr": "*i32", "out_ptr": "*bf16", "first": "i32"}
        | {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16"}
        | ({"rows_ptr": "*i64"} if picked else {}),
        {"LAYOUT": layout, "BLOCK": 32} | ({} if picked else {"rows_ptr": None}),
        options=UNFUSED,
    )


SPECS = [
    _quantize(32),
    _coded("blocks, offsets", 16, 64, 3),
    _grouped("a table", 8),
    _rows("blocks, offsets", picked=True),
]
MORE = [
    _coded("a table", 8, 32, 5, (80,)),
    early(_quantize(32)),
    early(_coded("blocks, offsets", 8, 16, 5)),
    early(_coded("bytes", 8, 32, 4)),
    *(_grouped(name, 1) for name in CODINGS),
    *(_rows(name, picked=False) for name in CODINGS),
    *(_coded(name, 8, 32, 5 if coding.width == 4 else 4) for name, coding in CODINGS.items()),
    *(_coded(name, 16, 32, 5 if coding.width == 4 else 4) for name, coding in CODINGS.items()),
    *(_coded(name, most_rows(_layout(name)), 64, 3) for name in CODINGS),
]
