"""The C ABI's structures, mirrored in Python from `abi.h` and `program.h`.

Both headers are in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

import torch

ABI_VERSION = 20


class DType(IntEnum):
    """The dtype of stored numbers."""

    F32 = 0
    BF16 = 1


DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16}
"""The dtypes that the library computes with."""


class KVLayout(IntEnum):
    """The format of K and V in pages."""

    PLAIN = 0
    INT8 = 1


class WeightLayout(IntEnum):
    """The format of a linear's packed weights."""

    DENSE_F32 = 0
    DENSE_BF16 = 1
    INT8 = 2
    INT4 = 3
    BLOCK_QUANTIZED = 4
    FLOAT8 = 5


class Epilogue(IntEnum):
    """The last step of a linear: store the result, add it to the output, or silu(gate) * up."""

    STORE = 0
    ADD_RESIDUAL = 1
    SILU_MUL = 2


class OpKind(IntEnum):
    """The operations of a program."""

    EMBED = 0
    RMS_NORM = 1
    LINEAR = 2
    ROTATE_AND_WRITE_KV = 3
    ATTENTION = 4
    OFFSET_RMS_NORM = 5
    SCALE = 6
    GATED = 7
    ACTIVATE = 8
    GATE = 9
    SOFT_CAP = 10
    LAYER_NORM = 11
    ROUTE = 12
    EXPERTS = 13
    LINEARS_BY_HEAD = 14
    JOIN_TURNED = 15
    WRITE_LATENT = 16
    GATED_DELTA = 17
    MAMBA2 = 18
    SHORT_CONV = 19
    DELTA_DECAY = 20
    DELTA_STEP = 21
    WIDEN = 22
    GATED_RMS_NORM = 23
    SCALE_COLUMNS = 24


class ActivationKind(IntEnum):
    """The elementwise functions, as in `kernels.activations.ActivationFunction`."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4
    SIGMOID = 5
    IDENTITY = 6


def fields(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    """Adjacent fields of one type, for `_fields_`."""
    return tuple((name, kind) for name in names)


class CodeFormat(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        *fields(c_int32, "width", "zero", "block", "has_bf16", "has_zeros", "has_offsets"),
        *fields(c_int32, "row_dtype", "reserved"),
        *fields(c_void_p, "table", "input_order"),
    )


class CodeRows(ctypes.Structure):
    """See abi.h."""

    _fields_ = fields(c_void_p, "codes", "scales", "seconds", "factors")


class Weights(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        *fields(c_int32, "format", "num_outputs", "num_inputs", "group_size", "interleave"),
        ("num_wide", c_int32),
        *fields(c_void_p, "weights", "scales", "wide_inputs", "bias", "code_format"),
    )


class AttentionLayer(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        *fields(c_int32, "num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "group"),
        *fields(c_int32, "window", "causal"),
        *fields(c_float, "scale", "soft_cap"),
        *fields(c_void_p, "sinks", "pages"),
        ("page_stride", c_int64),
        *fields(c_int32, "value_dim", "kv_format", "v_head_dim", "sees_ahead"),
    )


class KVGroupStep(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("slot_mapping", c_void_p),
    )


class SharedRun(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        *fields(c_int32, "group", "num_sequences", "first_tile", "end_tile"),
        ("sequences", c_void_p),
    )


class Step(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        *fields(c_int32, "num_tokens", "num_sequences", "num_decodes", "num_groups"),
        *fields(c_int32, "num_shared_runs", "reserved"),
        *fields(c_void_p, "token_ids", "positions", "query_start", "context_lens", "rows"),
        *fields(c_void_p, "groups", "shared_runs", "visible_ends"),
    )


class Rotary(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        *fields(c_void_p, "table", "q_norm", "k_norm"),
        ("norm_eps", c_float),
        *fields(c_int32, "rotary_dim", "offsets_norm"),
        ("norm_offset", c_float),
    )


class Op(ctypes.Structure):
    """See program.h."""

    _fields_ = (
        *fields(c_int32, "kind", "dtype", "out_dtype", "epilogue", "activation", "by_position"),
        ("num_heads", c_int32),
        *fields(c_float, "eps", "factor", "limit", "up_offset"),
        ("gates_first", c_int32),
        *fields(c_int64, "size", "second_size", "in_stride", "in_head_stride", "second_stride"),
        *fields(c_int64, "second_head_stride", "third_stride", "third_head_stride", "out_stride"),
        ("out_head_stride", c_int64),
        *fields(c_void_p, "input", "second", "third", "out", "weight", "bias", "linear", "layer"),
        *fields(c_void_p, "rotary", "experts", "states", "adapter"),
    )


class StateCall(ctypes.Structure):
    """See program.h."""

    _fields_ = (
        *fields(c_void_p, "layer", "step", "call"),
        *fields(c_int64, "second_offset", "third_offset"),
    )


class SampleRow(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("stream", c_uint64),
        ("position", c_int64),
        ("top_p", c_double),
        ("top_k", c_int64),
        *fields(c_float, "temperature", "log_min_p"),
    )


class LogprobRow(ctypes.Structure):
    """See abi.h."""

    _fields_ = fields(c_int64, "line", "token_id", "num_top")
