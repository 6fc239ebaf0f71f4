"""How matrix products are launched."""

from dataclasses import replace

from tests.kernels.triton.compiling import KernelSpec, early

from quire.kernels.triton.linear.adapter_matmul import (
    inner_adapter_kernel,
    outer_adapter_kernel,
)
from quire.kernels.triton.linear.float8_rows import float8_rows_kernel
from quire.kernels.triton.linear.group_plan import plan_groups_kernel
from quire.kernels.triton.linear.grouped_matmul import add_experts_kernel, grouped_matmul_kernel
from quire.kernels.triton.linear.matmul import inputs_of_tile, matmul_kernel, merge_slices_kernel
from quire.kernels.triton.linear.skinny_matmul import num_stages, skinny_matmul_kernel

#: The arguments of kernels whose weights may be codes, for weights that are numbers.
NUMBERS = {"scales_ptr": None, "GROUP": 0}
GPUS = (80, 86, 89, 90, 100, 120)


def _codes(spec: KernelSpec, group: int) -> KernelSpec:
    """The same launch for a weight of codes, with a scale for `group` inputs; 0: for all."""
    arguments = {**spec.arguments, "weight_ptr": "*u8", "scales_ptr": "*fp32"}
    constants = {name: value for name, value in spec.constants.items() if name != "scales_ptr"}
    inputs, stages = inputs_of_tile(constants["BLOCK_K"], group), spec.num_stages
    if spec.kernel is skinny_matmul_kernel:
        stages = num_stages(constants["BLOCK_M"], inputs)
    return replace(
        spec,
        label=f"{spec.label}, codes, {f'groups of {group}' if group else 'rows'}",
        arguments=arguments,
        constants={**constants, "GROUP": group, "BLOCK_K": inputs, "NUM_STAGES": stages},
        num_stages=stages,
    )


def _matmul(
    label: str,
    dtype: str,
    tile: tuple[int, int],
    num_warps: int,
    num_stages: int,
    *,
    slices: int = 1,
    even: bool = True,
    targets: tuple[int, ...] = (90,),
) -> KernelSpec:
    strides = {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16"}
    return KernelSpec(
        matmul_kernel,
        f"{dtype} {label}",
        {name: f"*{dtype}" for name in ("x_ptr", "weight_ptr", "bias_ptr")}
        | {"out_ptr": f"*{dtype}", "x_stride": "i32:16", "slice_size": "i32:16"}
        | strides,
        {
            "NUM_SLICES": slices,
            "IS_EVEN": even,
            "BLOCK_M": tile[0],
            "BLOCK_N": 128,
            "BLOCK_K": tile[1],
            "GROUP_M": 8,
            "NUM_STAGES": num_stages,
        }
        | NUMBERS,
        num_warps=num_warps,
        num_stages=num_stages,
        targets=targets,
    )


def _skinny(
    label: str,
    rows: int,
    outputs: int,
    *,
    gated: bool = False,
    even: bool = True,
    bias: bool = False,
    out: str = "bf16",
    targets: tuple[int, ...] = (90,),
) -> KernelSpec:
    normed = "normed" in label
    block_inputs = 128 if outputs == 32 else 256
    stages = num_stages(rows, block_inputs, normed=normed)
    norm = ("norm_ptr", "residual_ptr", "total_ptr")
    strides = {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16"}
    return KernelSpec(
        skinny_matmul_kernel,
        label,
        {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": f"*{out}", "x_stride": "i32:16"}
        | ({"bias_ptr": "*bf16"} if bias else {})
        | dict.fromkeys(norm if normed else (), "*bf16")
        | {"eps": "fp32"}
        | strides,
        {"IS_GATED": gated, "IS_EVEN": even, "BLOCK_M": rows, "BLOCK_N": outputs}
        | {"BLOCK_K": block_inputs, "NUM_LINES": 256 // outputs}
        | {"NUM_STAGES": stages, "BLOCK_D": 8192 if normed else 1}
        | ({} if normed else dict.fromkeys(norm))
        | ({} if bias else {"bias_ptr": None})
        | NUMBERS,
        num_warps=2,
        num_stages=stages,
        targets=targets,
    )


def _grouped(
    label: str,
    dtype: str,
    *,
    even: bool = True,
    top_k: int = 8,
    bias: bool = False,
    codes: int | None = None,
    rows: int = 16,
    targets: tuple[int, ...] = (90,),
) -> KernelSpec:
    """codes: the inputs that share a scale of a weight of codes; 0: all; None: it has none."""
    wide = rows > 16
    block_inputs = 32 if dtype == "fp32" else 64 if wide else 128
    stages = 4 if rows == 64 else 3
    pointers = ["tiles_ptr"] + ["order_ptr"] * (top_k > 1)
    constants = {"PAIRS_PER_ROW": top_k, "IS_EVEN": even, "BLOCK_M": rows}
    return KernelSpec(
        grouped_matmul_kernel,
        f"{dtype} {label}",
        {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "addresses_ptr": "*i64"}
        | ({} if codes is None else {"scale_addresses_ptr": "*i64"})
        | dict.fromkeys(pointers, "*i32")
        | ({"biases_ptr": f"*{dtype}"} if bias else {})
        | {"num_outputs": "i32:16", "num_inputs": "i32:16", "x_stride": "i32:16"},
        constants
        | {"BLOCK_N": 128 if wide else 64, "BLOCK_K": block_inputs}
        | {"GROUP": codes or 0, "NUM_STAGES": stages}
        | ({"scale_addresses_ptr": None} if codes is None else {})
        | ({} if bias else {"biases_ptr": None})
        | ({} if top_k > 1 else {"order_ptr": None}),
        num_warps=8 if rows == 128 else 4,
        num_stages=stages,
        targets=targets,
    )


def _plan(block: int, targets: tuple[int, ...]) -> KernelSpec:
    return KernelSpec(
        plan_groups_kernel,
        f"{block} pairs",
        {"ids_ptr": "*i64", "num_pairs": "i32", "num_tiles": "i32"}
        | dict.fromkeys(("order_ptr", "places_ptr", "tiles_ptr"), "*i32"),
        {"TOP_K": 8, "BINS": 128, "BLOCK": block, "BLOCK_M": 16},
        num_warps=8 if block > 1024 else 4,
        targets=targets,
        options={"enable_fp_fusion": False},
    )


def _inner_adapter(
    label: str, dtype: str, block_inputs: int, *, slices: int = 1, even: bool = True
) -> KernelSpec:
    pointers = ("order_ptr", "tiles_ptr", "ranks_ptr")
    sizes = {"num_inputs": "i32:16", "num_columns": "i32:16", "x_stride": "i32:16"}
    return KernelSpec(
        inner_adapter_kernel,
        f"{dtype} {label}",
        {"x_ptr": f"*{dtype}", "a_ptr": f"*{dtype}", "out_ptr": "*fp32", "num_rows": "i32"}
        | dict.fromkeys(pointers, "*i32")
        | sizes
        | {"slice_size": "i32:16"},
        {"NUM_SLICES": slices, "NUM_PARTS": 3, "MAX_RANK": 16, "IS_EVEN": even}
        | {"BLOCK_M": 16, "BLOCK_C": 16, "BLOCK_K": block_inputs},
        num_warps=2,
        num_stages=4,
        targets=(80, 90),
    )


def _outer_adapter(dtype: str, out: str, slices: int) -> KernelSpec:
    pointers = ("order_ptr", "tiles_ptr", "ranks_ptr", "blocks_ptr")
    sizes = {"num_outputs": "i32:16", "num_columns": "i32:16", "num_blocks": "i32"}
    return KernelSpec(
        outer_adapter_kernel,
        f"{dtype} to {out}, {slices} slices",
        {"inner_ptr": "*fp32", "b_ptr": f"*{dtype}", "out_ptr": f"*{out}", "scales_ptr": "*fp32"}
        | dict.fromkeys(pointers, "*i32")
        | {"num_rows": "i32"}
        | sizes,
        {"NUM_SLICES": slices, "NUM_PARTS": 3, "MAX_RANK": 16}
        | {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_C": 16},
        num_warps=4,
        targets=(80, 90),
    )


SPECS = [
    _inner_adapter("a slice", "bf16", 128),
    _outer_adapter("bf16", "bf16", 8),
    _grouped("of tokens", "bf16", targets=(80, 90)),
    _grouped("of pairs", "bf16", top_k=1),
    _grouped("of tokens, 128 rows", "bf16", rows=128, targets=(80, 90)),
    _plan(256, (80, 90)),
    KernelSpec(
        add_experts_kernel,
        "bf16",
        {
            "outputs_ptr": "*bf16",
            "weights_ptr": "*fp32",
            "order_ptr": "*i32",
            "places_ptr": "*i32",
            "out_ptr": "*bf16",
            "num_outputs": "i32:16",
        },
        {"TOP_K": 8, "BLOCK": 1024},
        num_warps=4,
    ),
    _matmul("64 rows", "bf16", (64, 64), 4, 4, targets=(80, 90)),
    _matmul("128 rows", "bf16", (128, 64), 8, 3, targets=(80, 90)),
    _matmul("128 rows, slices", "bf16", (128, 64), 8, 3, slices=4),
    KernelSpec(
        merge_slices_kernel,
        "fp32 to bf16",
        {
            "sums_ptr": "*fp32",
            "bias_ptr": "*bf16",
            "out_ptr": "*bf16",
            "num_rows": "i32",
            "num_outputs": "i32:16",
            "num_slices": "i32",
        },
        {"BLOCK": 1024, "scales_ptr": None},
    ),
    _skinny("8 rows", 8, 32),
    early(_skinny("8 rows, narrow", 8, 16)),
    early(_skinny("8 rows, narrow, gated", 8, 16, gated=True)),
    early(_skinny("8 rows, narrow, normed", 8, 16)),
    early(_skinny("8 rows, gated, normed", 8, 32, gated=True)),
    _skinny("8 rows, gated", 8, 32, gated=True, targets=(80, 90)),
    KernelSpec(
        float8_rows_kernel,
        "bf16",
        {"codes_ptr": "*u8", "scales_ptr": "*fp32", "out_ptr": "*bf16", "first": "i32"}
        | dict.fromkeys(("num_outputs", "num_inputs", "group_size"), "i32:16"),
        {"rows_ptr": None, "BLOCK": 1024},
        options={"enable_fp_fusion": False},
    ),
    _codes(_skinny("16 rows", 16, 32), 128),
    _codes(_matmul("64 rows", "bf16", (64, 64), 8, 4, slices=4), 128),
    _codes(_matmul("64 rows", "bf16", (64, 64), 4, 4), 0),
    _codes(_matmul("128 rows", "bf16", (128, 64), 8, 3), 0),
]
#: Launches for weights of codes, and the inputs that share a scale.
CODES = [
    (_skinny("8 rows", 8, 32, targets=GPUS), (0, 128)),
    (_skinny("16 rows, narrow", 16, 16, targets=GPUS), (0, 256)),
    (_skinny("16 rows, narrow, gated", 16, 16, gated=True, targets=GPUS), (128,)),
    (_skinny("16 rows, gated, bias", 16, 32, gated=True, bias=True, targets=GPUS), (0, 128)),
    (_matmul("64 rows", "bf16", (64, 64), 4, 4, slices=4, targets=GPUS), (0,)),
    (_matmul("64 rows, 8 warps", "bf16", (64, 64), 8, 4, slices=4, targets=GPUS), (128,)),
    (_matmul("128 rows", "bf16", (128, 64), 8, 3, slices=4, targets=GPUS), (0,)),
    (_matmul("64 rows", "fp32", (64, 16), 8, 2, slices=4, targets=GPUS), (0, 128)),
]
MORE = [
    _inner_adapter("all slices, odd K", "bf16", 128, slices=8, even=False),
    _inner_adapter("all slices", "fp32", 32, slices=8),
    _outer_adapter("fp32", "fp32", 1),
    _outer_adapter("bf16", "fp32", 1),
    _grouped("odd I, bias", "bf16", even=False, bias=True),
    _grouped("of pairs", "fp32", top_k=1, even=False),
    _matmul("64 rows, odd K", "bf16", (64, 64), 4, 4, even=False),
    _matmul("128 rows, odd K", "fp16", (128, 64), 8, 3, even=False),
    _matmul("64 rows", "fp32", (64, 16), 8, 2, slices=4),
    _matmul("64 rows, odd K", "fp32", (64, 16), 8, 2, even=False),
    _skinny("16 rows", 16, 32, bias=True),
    _skinny("16 rows, narrow, odd K", 16, 16, even=False, out="fp32"),
    _skinny("16 rows, gated, bias", 16, 16, gated=True, bias=True),
    _skinny("8 rows, narrow", 8, 16, targets=(80, 90)),
    _skinny("8 rows, normed", 8, 32, targets=GPUS),
    _skinny("8 rows, narrow, normed", 8, 16, targets=GPUS),
    _skinny("8 rows, gated, normed", 8, 32, gated=True, targets=GPUS),
    _skinny("8 rows, narrow, gated, normed, odd", 8, 16, even=False, gated=True),
    *(_plan(block, GPUS) for block in (16, 4096)),
    *(
        _grouped(f"of tokens, {rows} rows{label}", "bf16", rows=rows, codes=codes, targets=GPUS)
        for rows in (64, 128)
        for label, codes in {"": None, ", codes, rows": 0, ", codes, groups": 128}.items()
    ),
    _grouped("of pairs, codes, rows", "bf16", codes=0, targets=GPUS),
    _grouped("of tokens, codes, groups", "bf16", codes=128, targets=GPUS),
    *(_codes(spec, group) for spec, groups in CODES for group in groups),
    early(_codes(_skinny("8 rows", 8, 32), 128)),
]
