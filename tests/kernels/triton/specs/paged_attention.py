"""How the attention backend launches its kernels, for the GPUs that `LIMITS` stand for."""

from dataclasses import replace

import torch
from tests.attention.paged import make_spec
from tests.kernels.triton.compiling import KernelSpec, early

from quire.attention.triton_plan import (
    DeviceLimits,
    decode_shape,
    latent_shape,
    mixed_shapes,
    uniform_shape,
)
from quire.kernels.triton.attention.decode_work import ChunkRule, decode_work_kernel
from quire.kernels.triton.attention.latent_attention import latent_attention_kernel
from quire.kernels.triton.attention.latent_write import latent_write_kernel
from quire.kernels.triton.attention.merge_parts import merge_parts_kernel
from quire.kernels.triton.attention.paged_attention import (
    most_registers,
    paged_attention_kernel,
)

LIMITS = {
    90: DeviceLimits(132, 228 << 10, 227 << 10, is_wide=True),
    80: DeviceLimits(108, 164 << 10, 163 << 10, is_wide=False),
    86: DeviceLimits(84, 100 << 10, 99 << 10, is_wide=False),
    89: DeviceLimits(128, 100 << 10, 99 << 10, is_wide=False, num_narrow_warps=4),
    100: DeviceLimits(148, 228 << 10, 227 << 10, is_wide=False, num_narrow_warps=4),
    120: DeviceLimits(170, 100 << 10, 99 << 10, is_wide=False, num_narrow_warps=4),
}
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
CODES = {torch.int8: "*i8", torch.float8_e4m3fn: "*u8"}


def attend(shape, dtype, target, *, codes=None, with_all=False, sees_ahead=False):
    """dtype: of queries and outputs; over codes, queries of fp32 come in bf16. codes: of the pages,
    where they are of codes. with_all: sinks and log-sum-exps too. sees_ahead: with visible_ends."""
    kind = TYPES[dtype]
    pages = kind if codes is None else CODES[codes]
    arguments = {
        "q_ptr": kind if codes is None or dtype != torch.float32 else "*bf16",
        "pages_ptr": pages,
        "tables_ptr": "*i32",
        "items_ptr": "*i32",
        "num_items_ptr": "*i32",
        "out_ptr": kind,
        "parts_ptr": "*fp32",
        "scales_ptr": "*fp32",
        "merges_ptr": "*i32",
        "counters_ptr": "*i32",
        "q_stride": "i32:16",
        "page_stride": "i32:16",
        "table_stride": "i32",
        "parts_per_token": "i32",
        "chunk_tokens": "i32:16",
    }
    scales = {"kv_scales_ptr": "*i32", "kv_scale_stride": "i32:16"}
    others = {"sinks_ptr": kind, "lse_ptr": "*fp32"}
    ends = {"visible_ends_ptr": "*i32"}
    given = (scales if codes is not None else {}) | (others if with_all else {})
    given |= ends if sees_ahead else {}
    missing = dict.fromkeys({*others, *ends} - set(given))
    if codes is None:
        missing |= {"kv_scales_ptr": None}
        arguments |= {"kv_scale_stride": "i32:16"}
    name = "uniform" if shape.uniform else "attend"
    kinds = kind[1:] + ("" if codes is None else f" {pages[1:]}")
    return KernelSpec(
        paged_attention_kernel,
        f"{name} {kinds} {shape.rows}x{shape.tile} D{shape.head_dim} B{shape.block_size} "
        f"G{shape.group} W{shape.window}{' all' * with_all}{' ahead' * sees_ahead}",
        arguments=arguments | given,
        constants={"S": shape} | missing,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        targets=(target,),
        is_bound=True,
        options={"maxnreg": most_registers(shape, over_codes=codes is not None)},
        max_shared_bytes=LIMITS[target].program_shared_bytes,
    )


def latent(num_heads, dtype, target, *, max_stack_bytes=0):
    """576 elements a token, 512 of them the value. max_stack_bytes: of what is kept through the
    loop over keys, which itself doesn't spill."""
    kind, spec = TYPES[dtype], make_spec(num_heads, 1, 576, value_dim=512)
    shape = latent_shape(spec, 16, dtype, LIMITS[target])
    arguments = dict.fromkeys(("q_ptr", "pages_ptr", "out_ptr"), kind)
    arguments |= dict.fromkeys(("tables_ptr", "items_ptr", "num_items_ptr"), "*i32")
    arguments |= dict.fromkeys(("parts_ptr", "scales_ptr"), "*fp32")
    arguments |= dict.fromkeys(("q_stride", "page_stride", "chunk_tokens"), "i32:16")
    arguments |= dict.fromkeys(("table_stride", "parts_per_token", "scratch_row"), "i32")
    return KernelSpec(
        latent_attention_kernel,
        f"latent {kind[1:]} {shape.rows}x{shape.tile} H{num_heads}",
        arguments=arguments,
        constants={"S": shape, "sinks_ptr": None},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        targets=(target,),
        is_bound=True,
        max_shared_bytes=LIMITS[target].program_shared_bytes,
        max_stack_bytes=max_stack_bytes,
    )


def write_latents(dtype, target):
    kind = TYPES[dtype]
    return KernelSpec(
        latent_write_kernel,
        f"write latents {kind[1:]}",
        arguments={"k_ptr": kind, "pages_ptr": kind, "slots_ptr": "*i64"}
        | dict.fromkeys(("k_stride", "page_stride"), "i32:16"),
        constants={"D": 576, "B": 16, "BLOCK": 1024},
        num_warps=2,
        targets=(target,),
    )


def merge(dtype, head_dim, *, counted=False):
    """counted: only as many entries of the list as are set."""
    kind = TYPES[dtype]
    return KernelSpec(
        merge_parts_kernel,
        f"merge {kind[1:]} D{head_dim}" + (" counted" if counted else ""),
        arguments={
            "tokens_ptr": "*i32",
            **({"count_ptr": "*i32"} if counted else {}),
            "parts_ptr": "*fp32",
            "scales_ptr": "*fp32",
            "sinks_ptr": kind,
            "out_ptr": kind,
            "lse_ptr": "*fp32",
        },
        constants={"NUM_HEADS": 32, "HEAD_DIM": head_dim, "PADDED_DIM": 128, "UNROLL": 8}
        | ({} if counted else {"count_ptr": None}),
        num_warps=1,
    )


def work(block, rule):
    pointers = ("query_start_ptr", "context_lens_ptr", "items_ptr", "count_ptr", "merges_ptr")
    return KernelSpec(
        decode_work_kernel,
        f"work {block} {rule}",
        arguments=dict.fromkeys(pointers, "*i32") | {"rows_ptr": "*i64", "num_sequences": "i32"},
        constants={"rule": rule, "BLOCK_S": block},
        num_warps=4,
    )


def shapes(spec, block_size, dtype, target):
    """All that a layer may be attended with."""
    limits = LIMITS[target]
    yield decode_shape(spec, block_size, dtype, limits)
    yield from mixed_shapes(spec, block_size, dtype, limits)
    yield uniform_shape(spec, block_size, dtype, limits)


LLAMA = make_spec(32, 8, 128)
_GROUP_64 = make_spec(64, 1, 128)
_WIDE = make_spec(8, 4, 256, window=1024, soft_cap=50.0)
_GEMMA = make_spec(8, 4, 256, window=1024, sees_ahead=True)
_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
SPECS = [
    early(attend(decode_shape(LLAMA, 16, _BF16, LIMITS[90]), _BF16, 90)),
    early(attend(mixed_shapes(LLAMA, 16, _BF16, LIMITS[90])[-1], _BF16, 90)),
    attend(uniform_shape(LLAMA, 16, _BF16, LIMITS[90]), _BF16, 90),
    early(attend(decode_shape(LLAMA, 16, torch.int8, LIMITS[90]), _BF16, 90, codes=torch.int8)),
    attend(uniform_shape(LLAMA, 16, _E4M3, LIMITS[80]), _BF16, 80, codes=_E4M3),
    attend(uniform_shape(_GROUP_64, 16, torch.int8, LIMITS[80]), _BF16, 80, codes=torch.int8),
    attend(decode_shape(_GROUP_64, 16, _E4M3, LIMITS[80]), torch.float16, 80, codes=_E4M3),
    attend(mixed_shapes(_WIDE, 16, _E4M3, LIMITS[90])[-1], torch.float32, 90, codes=_E4M3),
    *(
        attend(mixed_shapes(_GEMMA, 16, _BF16, LIMITS[x])[0], _BF16, x, sees_ahead=True)
        for x in (80, 90)
    ),
    latent(16, _BF16, 90, max_stack_bytes=16),
    latent(128, _BF16, 80),
    latent(16, _BF16, 86),
    attend(mixed_shapes(LLAMA, 16, _BF16, LIMITS[100])[-1], _BF16, 100),
    attend(mixed_shapes(LLAMA, 256, _BF16, LIMITS[120])[-1], _BF16, 120),
    attend(decode_shape(LLAMA, 16, torch.int8, LIMITS[100]), _BF16, 100, codes=torch.int8),
    write_latents(_BF16, 90),
    early(merge(_BF16, 128)),
    early(merge(_BF16, 128, counted=True)),
    work(256, ChunkRule(17, 0, 64, 4096, 64)),
]

_MODELS = [
    (LLAMA, 256),
    (make_spec(28, 4, 128), 16),
    (_WIDE, 16),
    (make_spec(64, 8, 64, window=128, has_sinks=True), 16),
    (make_spec(32, 32, 80), 8),
    (make_spec(32, 32, 96), 16),
    (make_spec(32, 1, 128, causal=False, window=64), 2048),
    (_GROUP_64, 16),
]
_QUANTIZED_MODELS = [
    *_MODELS,
    (make_spec(48, 1, 128, window=100, soft_cap=9.0, has_sinks=True), 16),
    (make_spec(71, 1, 64), 16),
    (make_spec(128, 1, 112), 32),
    (make_spec(32, 1, 256), 16),
    (make_spec(10, 1, 192, window=2048), 64),
]
QUANTIZED = [
    attend(shape, dtype, target, codes=codes, with_all=spec.has_sinks)
    for target in LIMITS
    for codes in CODES
    for dtype in TYPES
    for spec, block_size in _QUANTIZED_MODELS
    for shape in shapes(spec, block_size, codes, target)
]
# Tiles of 64 rows of 256 elements spill 32 bytes on sm_90, and 48 with visible_ends.
AHEAD = [
    replace(attend(shape, dtype, target, codes=codes, sees_ahead=True), max_stack_bytes=48)
    for target in (80, 90)
    for dtype, codes in [*((dtype, None) for dtype in TYPES), *((_BF16, codes) for codes in CODES)]
    for shape in shapes(_GEMMA, 16, codes or dtype, target)
]
MORE = (
    QUANTIZED
    + AHEAD
    + [
        attend(shape, dtype, target, with_all=spec.has_sinks)
        for target in LIMITS
        for dtype in TYPES
        for spec, block_size in _MODELS
        for shape in shapes(spec, block_size, dtype, target)
    ]
    + [
        latent(
            num_heads,
            dtype,
            target,
            max_stack_bytes=48 if (target, dtype) == (100, torch.float32) else 16,
        )
        for num_heads in (16, 128)
        for dtype in TYPES
        for target in LIMITS
    ]
    + [merge(torch.float32, 80), merge(torch.float16, 128), work(1, ChunkRule(3, 1024, 32, None))]
)
