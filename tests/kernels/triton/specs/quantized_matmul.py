"""How quantized matrix products are launched."""

from tests.kernels.triton.compiling import KernelSpec

from quire.kernels.triton.linear.grouped_int4_matmul import grouped_int4_matmul_kernel
from quire.kernels.triton.linear.grouped_int8_matmul import grouped_int8_matmul_kernel
from quire.kernels.triton.linear.int4_matmul import int4_matmul_kernel
from quire.kernels.triton.linear.int8_matmul import int8_matmul_kernel
from quire.kernels.triton.linear.quantize_rows import quantize_rows_kernel

UNFUSED = {"enable_fp_fusion": False}
SIZES = {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16", "x_stride": "i32:16"}


def _quantize(dtype: str, *, with_sums: bool) -> KernelSpec:
    arguments = {
        "x_ptr": f"*{dtype}",
        "q_ptr": "*i8",
        "scales_ptr": "*fp32",
        "num_inputs": "i32:16",
        "width": "i32:16",
        "x_stride": "i32:16",
    }
    constants = {"BLOCK": 4096}
    if with_sums:
        arguments["sums_ptr"] = "*i32"
    return KernelSpec(
        quantize_rows_kernel,
        f"{dtype}" + " with sums" * with_sums,
        arguments,
        constants if with_sums else constants | {"sums_ptr": None},
        options=UNFUSED,
    )


def _int8(
    label: str,
    tile: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    *,
    mode: str = "",
    even: bool = True,
    targets: tuple[int, ...] = (90,),
    max_stack_bytes: int = 0,
) -> KernelSpec:
    return KernelSpec(
        int8_matmul_kernel,
        label,
        {
            "x_ptr": "*i8",
            "x_scales_ptr": "*fp32",
            "weight_ptr": "*i8",
            "scales_ptr": "*fp32",
            "bias_ptr": "*bf16",
            "out_ptr": "*bf16",
            **SIZES,
        },
        {
            "IS_GATED": mode == "gated",
            "IS_PAIRED": mode == "paired",
            "IS_EVEN": even,
            "BLOCK_M": tile[0],
            "BLOCK_N": tile[1],
            "BLOCK_K": tile[2],
            "GROUP_M": 8,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        targets=targets,
        options=UNFUSED,
        max_stack_bytes=max_stack_bytes,
    )


def _int4(
    label: str, rows: int, outputs: int, num_stages: int, targets: tuple[int, ...] = (90,)
) -> KernelSpec:
    return KernelSpec(
        int4_matmul_kernel,
        label,
        {
            "x_ptr": "*i8",
            "x_scales_ptr": "*fp32",
            "x_sums_ptr": "*i32",
            "levels_ptr": "*u8",
            "scales_ptr": "*i32",
            "offsets_ptr": "*i32",
            "scale_factors_ptr": "*fp32",
            "offset_factors_ptr": "*fp32",
            "out_ptr": "*bf16",
            "num_rows": "i32",
            "num_outputs": "i32:16",
            "num_stretches": "i32",
        },
        {"bias_ptr": None, "BLOCK_M": rows, "BLOCK_N": outputs, "GROUP_M": 8},
        num_warps=outputs // 16,
        num_stages=num_stages,
        targets=targets,
        options=UNFUSED,
    )


def _grouped(label: str, *, even: bool, targets: tuple[int, ...]) -> KernelSpec:
    pointers = ("order_ptr", "experts_ptr", "firsts_ptr", "ends_ptr")
    return KernelSpec(
        grouped_int8_matmul_kernel,
        label,
        {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "addresses_ptr": "*i64", "scales_ptr": "*fp32"}
        | dict.fromkeys(pointers, "*i32")
        | {"biases_ptr": "*bf16", "out_ptr": "*bf16"}
        | {name: kind for name, kind in SIZES.items() if name != "num_rows"},
        {"PAIRS_PER_ROW": 8, "IS_EVEN": even, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128},
        num_warps=4,
        num_stages=4,
        targets=targets,
        options=UNFUSED,
    )


def _grouped_int4(label: str, top_k: int, targets: tuple[int, ...]) -> KernelSpec:
    return KernelSpec(
        grouped_int4_matmul_kernel,
        label,
        {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "x_sums_ptr": "*i32", "addresses_ptr": "*i64"}
        | {"scale_factors_ptr": "*fp32", "offset_factors_ptr": "*fp32", "out_ptr": "*bf16"}
        | dict.fromkeys(("experts_ptr", "firsts_ptr", "ends_ptr"), "*i32")
        | ({"order_ptr": "*i32"} if top_k > 1 else {})
        | {"num_experts": "i32:16", "num_outputs": "i32:16", "num_stretches": "i32"},
        {"biases_ptr": None, "PAIRS_PER_ROW": top_k, "BLOCK_M": 16, "BLOCK_N": 32}
        | ({} if top_k > 1 else {"order_ptr": None}),
        num_warps=2,
        num_stages=4,
        targets=targets,
        options=UNFUSED,
        max_stack_bytes=8,  # on sm_80, of a pointer
    )


SPECS = [
    _grouped_int4("experts", 8, (80, 90)),
    _grouped("experts", even=True, targets=(80, 90)),
    _quantize("bf16", with_sums=False),
    _int8("8 rows", (8, 32, 256), 2, 5, mode="paired"),
    _int8("128 rows", (128, 128, 128), 8, 3, targets=(80, 90)),
    _int4("8 rows", 8, 32, 6),
]
MORE = [
    _grouped_int4("experts, of pairs", 1, (90,)),
    _grouped("experts, odd I", even=False, targets=(90,)),
    _quantize("bf16", with_sums=True),
    _quantize("fp32", with_sums=True),
    _int8("16 rows, gated", (16, 32, 256), 2, 5, mode="gated"),
    _int8("16 rows, odd K", (16, 16, 256), 1, 5, mode="paired", even=False),
    _int8("64 rows", (64, 64, 128), 4, 4),
    # On sm_80, of a pointer that the loop doesn't need.
    _int8("128 rows, odd K", (128, 128, 128), 8, 3, even=False, max_stack_bytes=8),
    _int4("16 rows, narrow", 16, 16, 6),
    _int4("16 rows", 16, 32, 6),
    _int4("32 rows", 32, 64, 3),
]
