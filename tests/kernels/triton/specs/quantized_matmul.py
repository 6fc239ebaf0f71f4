"""How quantized matrix products are launched."""

from tests.kernels.triton.compiling import KernelSpec

from quire.kernels.triton.linear.grouped_int4_matmul import grouped_int4_matmul_kernel
from quire.kernels.triton.linear.grouped_int8_matmul import grouped_int8_matmul_kernel
from quire.kernels.triton.linear.int4_matmul import int4_matmul_kernel
from quire.kernels.triton.linear.int8_matmul import int8_matmul_kernel
from quire.kernels.triton.linear.quantize_groups import quantize_groups_kernel
from quire.kernels.triton.linear.quantize_rows import quantize_rows_kernel

UNFUSED = {"enable_fp_fusion": False}
SIZES = {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16", "x_stride": "i32:16"}


def _quantize(dtype: str) -> KernelSpec:
    return KernelSpec(
        quantize_rows_kernel,
        dtype,
        {"x_ptr": f"*{dtype}", "q_ptr": "*i8", "scales_ptr": "*fp32"}
        | dict.fromkeys(("num_inputs", "width", "x_stride"), "i32:16"),
        {"BLOCK": 4096},
        options=UNFUSED,
    )


def _quantize_groups(dtype: str, size: int, rotation: int) -> KernelSpec:
    return KernelSpec(
        quantize_groups_kernel,
        f"{dtype} of {size}{f', {rotation} rotated' * (rotation > 1)}",
        {"x_ptr": f"*{dtype}", "q_ptr": "*i8", "scales_ptr": "*fp32"}
        | dict.fromkeys(("num_inputs", "width", "x_stride"), "i32:16")
        | {"group_stride": "i32"},
        {"scales_stride": 1, "SIZE": size, "ROTATION": rotation, "BLOCK": 1024},
        options=UNFUSED,
    )


def _int8(
    label: str,
    tile: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    *,
    gated: bool = False,
    has_groups: bool = True,
    even: bool = True,
    targets: tuple[int, ...] = (90,),
) -> KernelSpec:
    """tile: rows, outputs, groups of inputs."""
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
            "IS_GATED": gated,
            "HAS_GROUPS": has_groups,
            "IS_EVEN": even,
            "GROUPS": tile[2],
            "BLOCK_M": tile[0],
            "BLOCK_N": tile[1],
            "GROUP_M": 8,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        targets=targets,
        options=UNFUSED,
    )


def _int4(
    label: str,
    rows: int,
    outputs: int,
    num_stages: int,
    *,
    num_wide: int = 0,
    targets: tuple[int, ...] = (90,),
) -> KernelSpec:
    wide = {
        "wide_x_ptr": "*i8",
        "wide_x_scales_ptr": "*fp32",
        "wide_levels_ptr": "*i8",
        "wide_scales_ptr": "*fp32",
    }
    return KernelSpec(
        int4_matmul_kernel,
        label,
        {
            "x_ptr": "*i8",
            "x_scales_ptr": "*fp32",
            "levels_ptr": "*u8",
            "scales_ptr": "*i32",
            "offsets_ptr": "*i32",
            "scale_factors_ptr": "*bf16",
            "offset_factors_ptr": "*bf16",
            "out_ptr": "*bf16",
            "num_rows": "i32",
            "num_outputs": "i32:16",
            "num_stretches": "i32",
        }
        | (wide if num_wide else {}),
        {"bias_ptr": None, "NUM_WIDE": num_wide}
        | {"BLOCK_M": rows, "BLOCK_N": outputs, "GROUP_M": 8}
        | ({} if num_wide else dict.fromkeys(wide)),
        num_warps=outputs // 16,
        num_stages=num_stages,
        targets=targets,
        options=UNFUSED,
    )


def _grouped(
    label: str, *, has_groups: bool = True, even: bool = True, targets: tuple[int, ...] = (90,)
) -> KernelSpec:
    pointers = ("order_ptr", "tiles_ptr")
    return KernelSpec(
        grouped_int8_matmul_kernel,
        label,
        {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "addresses_ptr": "*i64", "scales_ptr": "*fp32"}
        | dict.fromkeys(pointers, "*i32")
        | {"biases_ptr": "*bf16", "out_ptr": "*bf16"}
        | SIZES,
        {"PAIRS_PER_ROW": 8, "HAS_GROUPS": has_groups, "IS_EVEN": even}
        | {"BLOCK_M": 16, "BLOCK_N": 64},
        num_warps=4,
        num_stages=3,
        targets=targets,
        options=UNFUSED,
    )


def _grouped_int4(label: str, top_k: int, targets: tuple[int, ...]) -> KernelSpec:
    return KernelSpec(
        grouped_int4_matmul_kernel,
        label,
        {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "addresses_ptr": "*i64"}
        | {"scale_factors_ptr": "*bf16", "offset_factors_ptr": "*bf16", "out_ptr": "*bf16"}
        | dict.fromkeys(["tiles_ptr"] + ["order_ptr"] * (top_k > 1), "*i32")
        | {
            "num_rows": "i32",
            "num_experts": "i32:16",
            "num_outputs": "i32:16",
            "num_stretches": "i32",
        },
        {"biases_ptr": None, "PAIRS_PER_ROW": top_k, "BLOCK_M": 16, "BLOCK_N": 32}
        | ({} if top_k > 1 else {"order_ptr": None}),
        num_warps=2,
        num_stages=6,
        targets=targets,
        options=UNFUSED,
    )


SPECS = [
    _grouped_int4("experts", 8, (80, 90)),
    _grouped("experts", targets=(80, 90)),
    _quantize("bf16"),
    _quantize_groups("bf16", 256, 64),
    _int8("8 rows", (8, 32, 2), 2, 5),
    _int8("64 rows", (64, 64, 1), 4, 2, targets=(80, 90)),
    _int4("8 rows", 8, 32, 8),
    _int4("32 rows", 32, 64, 5, targets=(80, 90)),
]
MORE = [
    _grouped_int4("experts, of pairs", 1, (90,)),
    _grouped("experts, odd I", even=False),
    _grouped("experts, whole rows", has_groups=False),
    _quantize("fp32"),
    _quantize_groups("fp32", 256, 64),
    _quantize_groups("bf16", 128, 1),
    _int8("16 rows, gated", (16, 32, 1), 2, 5, gated=True),
    _int8("16 rows, odd K", (16, 16, 2), 1, 5, even=False),
    _int8("8 rows, whole rows", (8, 32, 2), 2, 5, has_groups=False),
    _int8("64 rows, whole rows", (64, 64, 1), 4, 2, has_groups=False),
    _int8("64 rows, odd K", (64, 64, 1), 4, 2, even=False),
    _int4("16 rows, narrow", 16, 16, 8),
    _int4("16 rows", 16, 32, 8),
    _int4("16 rows, wide inputs", 16, 32, 8, num_wide=12),
]
