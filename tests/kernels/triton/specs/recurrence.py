"""How the kernels of recurrent layers are launched: Qwen3-Next, Falcon-H1 and Mamba-2."""

from dataclasses import replace
from typing import Any

from tests.kernels.triton.compiling import KernelSpec

from quire.kernels.triton.recurrence.causal_conv import causal_conv_kernel
from quire.kernels.triton.recurrence.gated_delta_rule import gated_delta_rule_kernel
from quire.kernels.triton.recurrence.mamba2_scan import mamba2_scan_kernel
from quire.kernels.triton.recurrence.units import program_columns
from quire.kernels.triton.support import next_power_of_two

STATES = {
    "pages_ptr": "*fp32",
    "table_ptr": "*i32",
    "query_start_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "rows_ptr": "*i64",
    "page_stride": "i64:16",
    "table_stride": "i32",
    "first_unit": "i32",
    "units_per_page": "i32",
}
UNFUSED = {"enable_fp_fusion": False}


def _with_drafts(spec: KernelSpec) -> KernelSpec:
    """The same launch of a step with drafts."""
    arguments = {**spec.arguments, "num_drafts_ptr": "*i32"}
    constants = {name: spec.constants[name] for name in spec.constants if name != "num_drafts_ptr"}
    label = f"{spec.label}, with drafts"
    return replace(spec, label=label, arguments=arguments, constants=constants)


def _delta(
    dtype: str, heads: tuple[int, int], sizes: tuple[int, int], *, is_prompt: bool = False
) -> KernelSpec:
    """Of a step of 16 sequences, or of a prompt."""
    (num_k_heads, num_v_heads), (key_dim, value_dim) = heads, sizes
    columns = program_columns(key_dim, num_v_heads * value_dim, num_prompts=int(is_prompt))
    arguments = {f"{name}_ptr": f"*{dtype}" for name in ("q", "k", "v", "out")}
    arguments |= {"g_ptr": "*fp32", "beta_ptr": "*fp32"}
    arguments |= {f"{name}_stride": "i32:16" for name in ("q", "k", "v", "g", "beta")}
    constants: dict[str, Any] = {"num_drafts_ptr": None, "EPS": 1e-6, "HK": num_k_heads}
    constants |= {"HV": num_v_heads, "DK": key_dim, "DV": value_dim}
    constants |= {"BLOCK_K": next_power_of_two(key_dim), "COLUMNS": columns}
    is_full = constants["BLOCK_K"] * columns > 1024
    constants |= {"IS_WIDE": is_full or not is_prompt}
    return KernelSpec(
        gated_delta_rule_kernel,
        f"{dtype} {num_k_heads}/{num_v_heads} heads of {key_dim}/{value_dim}, {columns} columns"
        + ", a prompt" * is_prompt,
        {**arguments, **STATES},
        constants,
        num_warps=1,
        options=UNFUSED,
    )


def _scan(
    dtype: str, num_heads: int, sizes: tuple[int, int], *, is_prompt: bool = False
) -> KernelSpec:
    """sizes: P and N."""
    head_dim, state_size = sizes
    columns = program_columns(state_size, num_heads * head_dim, num_prompts=int(is_prompt))
    arguments = {f"{name}_ptr": f"*{dtype}" for name in ("x", "b", "c", "out", "dt", "bias")}
    arguments |= {"a_ptr": "*fp32", "d_ptr": f"*{dtype}"}
    arguments |= {f"{name}_stride": "i32:16" for name in ("x", "b", "c", "dt")}
    constants: dict[str, Any] = {"num_drafts_ptr": None, "MIN_STEP": 0.0, "MAX_STEP": float("inf")}
    constants |= {"H": num_heads, "P": head_dim, "G": 1}
    constants |= {"N": state_size, "BLOCK_N": next_power_of_two(state_size), "COLUMNS": columns}
    return KernelSpec(
        mamba2_scan_kernel,
        f"{dtype} {num_heads} heads of {head_dim}, {state_size} inside, {columns} columns",
        {**arguments, **STATES},
        constants,
        num_warps=1,
        options=UNFUSED,
    )


def _conv(dtype: str, num_channels: int, width: int, num_tokens: int) -> KernelSpec:
    arguments = {f"{name}_ptr": f"*{dtype}" for name in ("x", "weight", "bias", "out")}
    counts = ("num_sequences", "num_prompts", "num_tiles")
    arguments |= {"x_stride": "i32:16", **dict.fromkeys(counts, "i32")}
    constants: dict[str, Any] = {"num_drafts_ptr": None, "channel_stride": width, "tap_stride": 1}
    constants |= {"C": num_channels, "WIDTH": width}
    constants |= {"HAS_SILU": True, "BLOCK_T": num_tokens, "BLOCK_C": 128}
    return KernelSpec(
        causal_conv_kernel,
        f"{dtype} {num_channels} channels, {width} wide, {num_tokens} tokens",
        {**arguments, **STATES},
        constants,
        num_warps=2,
        options=UNFUSED,
    )


SPECS = [
    _delta("bf16", (16, 32), (128, 128)),
    _delta("bf16", (16, 32), (128, 128), is_prompt=True),
    _scan("bf16", 32, (128, 256)),
    _conv("bf16", 8192, 4, 1),
    _conv("bf16", 8192, 4, 16),
    _with_drafts(_delta("bf16", (16, 32), (128, 128), is_prompt=True)),
    _with_drafts(_scan("bf16", 32, (128, 256), is_prompt=True)),
    _with_drafts(_conv("bf16", 8192, 4, 16)),
]
MORE = [
    *(_delta(dtype, (16, 32), (128, 128), is_prompt=True) for dtype in ("fp16", "fp32")),
    _delta("fp32", (16, 32), (128, 128)),
    *(
        _delta("bf16", (4, num_heads), (size, size), is_prompt=is_prompt)
        for num_heads in (8, 64)
        for size in (64, 96, 192, 256)
        for is_prompt in (False, True)
    ),
    *(
        _scan(dtype, num_heads, sizes, is_prompt=is_prompt)
        for dtype in ("bf16", "fp32")
        for num_heads, sizes in ((24, (64, 128)), (32, (128, 256)), (128, (64, 256)), (8, (64, 16)))
        for is_prompt in (False, True)
    ),
    *(
        _conv(dtype, num_channels, width, num_tokens)
        for dtype in ("fp32", "fp16")
        for num_channels, width in ((2048, 3), (2568, 4), (640, 2))
        for num_tokens in (1, 16)
    ),
]
