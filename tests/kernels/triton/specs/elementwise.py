"""How norms, gates, rotations and copies are launched."""

from tests.kernels.triton.compiling import KernelSpec, early

from quire.kernels.triton.activations import activate_kernel, gate_kernel, gated_kernel
from quire.kernels.triton.attention.copy_blocks import copy_blocks_kernel
from quire.kernels.triton.attention.rotary_kv_write import MOST_REGISTERS, rotary_kv_write_kernel
from quire.kernels.triton.layer_norm import layer_norm_kernel
from quire.kernels.triton.rms_norm import rms_norm_kernel
from quire.kernels.triton.support import next_power_of_two


def _rms_norm(
    dtype: str, size: int, block: int, num_warps: int, with_residual: bool, **constant: float
) -> KernelSpec:
    pointers = {name: f"*{dtype}" for name in ("x_ptr", "weight_ptr", "out_ptr")}
    constants: dict[str, object] = {"D": size, "BLOCK_D": block, "OFFSET": None, "FACTOR": 1.0}
    constants |= {"BLOCK_R": max(1, 1024 // block), **constant}
    if with_residual:
        pointers["residual_ptr"] = f"*{dtype}"
    else:
        constants["residual_ptr"] = None
    return KernelSpec(
        rms_norm_kernel,
        f"{dtype} D{size}" + " with residual" * with_residual + "".join(f" {k}" for k in constant),
        {**pointers, "num_rows": "i32", "x_stride": "i32:16", "eps": "fp32"},
        constants,
        num_warps=num_warps,
    )


def _layer_norm(dtype: str, size: int, num_warps: int, *, has_bias: bool) -> KernelSpec:
    names = ("x_ptr", "weight_ptr", "out_ptr", *(("bias_ptr",) if has_bias else ()))
    constants: dict[str, object] = {"D": size, "BLOCK_D": next_power_of_two(size)}
    return KernelSpec(
        layer_norm_kernel,
        f"{dtype} D{size}" + " with bias" * has_bias,
        {**{name: f"*{dtype}" for name in names}, "x_stride": "i32:16", "eps": "fp32"},
        constants | ({} if has_bias else {"bias_ptr": None}),
        num_warps=num_warps,
    )


def _gated(dtype: str, size: int, activation: str, limit: float | None = None) -> KernelSpec:
    constants = {"F": size, "BLOCK_F": 1024, "ACTIVATION": activation, "LIMIT": limit}
    is_limited = limit is not None
    return KernelSpec(
        gated_kernel,
        f"{dtype} F{size} {activation}" + " limited" * is_limited,
        {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "gate_up_stride": "i32:16"},
        constants | {"ALPHA": 1.702 if is_limited else 1.0, "UP_OFFSET": float(is_limited)},
        options={"enable_fp_fusion": False},
    )


def _activate(dtype: str, size: int, function: str) -> KernelSpec:
    arguments = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_stride": "i32:16", "cap": "fp32"}
    constants = {"D": size, "FUNCTION": function, "BLOCK_D": 1024}
    return KernelSpec(activate_kernel, f"{dtype} D{size} {function}", arguments, constants)


def _gate(dtype: str, heads: tuple[int, int], *, by_one: bool = False) -> KernelSpec:
    num_heads, size = heads
    arguments = {name: f"*{dtype}" for name in ("x_ptr", "by_ptr", "out_ptr")}
    for name in ("x", "by"):
        arguments |= {f"{name}_{stride}_stride": "i32:16" for stride in ("token", "head")}
    constants = {"H": num_heads, "D": size, "BY_ONE": by_one, "ACTIVATION": "sigmoid"}
    block = min(next_power_of_two(size), 1024)
    name = f"{dtype} {num_heads} of {size}" + " by one" * by_one
    return KernelSpec(gate_kernel, name, arguments, constants | {"BLOCK_D": block})


def _rotary(
    dtype: str, heads: tuple[int, int], size: int, *, normed: bool = False, codes: str = ""
) -> KernelSpec:
    """Of a fused qkv projection. codes: of the pages; none: they are of the same dtype."""
    num_heads, num_kv_heads = heads
    half = next_power_of_two(size // 2)
    tile = 1024 // (2 * half)
    arguments = {name: f"*{dtype}" for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")}
    arguments |= {"kv_ptr": f"*{codes or dtype}", "scale_stride": "i64:16"}
    scales = {"kv_scales_ptr": "*i32"}
    arguments |= {"slots_ptr": "*i64", "positions_ptr": "*i64", "table_ptr": "*fp32", "eps": "fp32"}
    for tensor in ("q", "k", "v", "out"):
        arguments |= {f"{tensor}_{stride}_stride": "i32:16" for stride in ("token", "head")}
    norms = {"q_norm_ptr": f"*{dtype}", "k_norm_ptr": f"*{dtype}"}
    constants = {
        "HQ": num_heads,
        "HKV": num_kv_heads,
        "D": size,
        "R": size,
        "B": 16,
        "NUM_Q_TILES": -(-num_heads // tile),
        "BLOCK_H": tile,
        "BLOCK_HALF": half,
        "SPREAD": size & -size if codes == "i8" else 1,
        "OFFSET": None,
    }
    return KernelSpec(
        rotary_kv_write_kernel,
        f"{dtype}{codes} {num_heads}/{num_kv_heads} heads of {size}" + " normed" * normed,
        {**arguments, "page_stride": "i64:16"}
        | (norms if normed else {})
        | (scales if codes else {}),
        constants
        | ({} if normed else dict.fromkeys(norms))
        | ({} if codes else dict.fromkeys(scales)),
        num_warps=2,
        options={"enable_fp_fusion": False} | ({"maxnreg": MOST_REGISTERS} if codes else {}),
    )


SPECS = [
    early(_rms_norm("bf16", 4096, 4096, 16, with_residual=True)),
    early(_rotary("bf16", (16, 8), 128, normed=True)),
    _rms_norm("fp32", 80, 128, 4, with_residual=False),
    _gated("bf16", 14336, "silu"),
    _layer_norm("bf16", 768, 4, has_bias=True),
    _gated("bf16", 9216, "gelu_tanh"),
    _gated("bf16", 2880, "silu", 7.0),
    _activate("fp32", 151936, "soft_cap"),
    _activate("bf16", 3072, "gelu"),
    _gate("bf16", (16, 256)),
    _gate("bf16", (1, 2048), by_one=True),
    _rotary("bf16", (32, 8), 128),
    _rotary("fp32", (14, 2), 80, normed=True),
    _rotary("bf16", (32, 8), 128, codes="i8"),
    _rotary("bf16", (32, 8), 128, codes="u8"),
    KernelSpec(
        copy_blocks_kernel,
        "",
        {
            **{"source_ptr": "*i32", "target_ptr": "*i32", "pairs_ptr": "*i64"},
            **{"source_stride": "i32:16", "target_stride": "i32:16"},
            **{"num_words": "i32:16", "num_pieces": "i32"},
        },
        {"PIECE": 4096},
        num_warps=8,
    ),
]
MORE = [
    _rms_norm("bf16", 128, 128, 4, with_residual=False),
    _rms_norm("bf16", 4096, 4096, 16, with_residual=True),
    _rms_norm("fp16", 5120, 8192, 32, with_residual=True),
    _rms_norm("bf16", 4096, 4096, 16, with_residual=True, FACTOR=0.22),
    _rms_norm("bf16", 4096, 4096, 16, with_residual=False, OFFSET=1.0),
    _rms_norm("fp32", 16384, 16384, 32, with_residual=True),
    _layer_norm("fp32", 4096, 16, has_bias=False),
    _gated("fp32", 1013, "gelu"),
    _gated("fp16", 4096, "relu_squared"),
    _gated("fp32", 3072, "silu"),
    _gated("fp16", 1013, "silu"),
    _rotary("bf16", (16, 8), 128, normed=True),
    _rotary("fp16", (32, 32), 80),
    _rotary("fp32", (32, 8), 256),
    *(
        _rotary(dtype, heads, size, normed=True, codes=codes)
        for dtype in ("bf16", "fp16", "fp32")
        for heads, size in (((64, 8), 64), ((32, 8), 128), ((8, 4), 256), ((32, 32), 80))
        for codes in ("i8", "u8")
    ),
]
