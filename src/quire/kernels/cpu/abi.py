"""The C ABI's structures, mirrored in Python from `abi.h` and `program.h`.

Both headers are in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum

import torch

ABI_VERSION = 19


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


class CodeFormat(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("width", c_int32),
        ("zero", c_int32),
        ("block", c_int32),
        ("has_bf16", c_int32),
        ("has_zeros", c_int32),
        ("has_offsets", c_int32),
        ("row_dtype", c_int32),
        ("reserved", c_int32),
        ("table", c_void_p),
        ("input_order", c_void_p),
    )


class CodeRows(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("seconds", c_void_p),
        ("factors", c_void_p),
    )


class Weights(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("format", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("group_size", c_int32),
        ("interleave", c_int32),
        ("num_wide", c_int32),
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("wide_inputs", c_void_p),
        ("bias", c_void_p),
        ("code_format", c_void_p),
    )


class AttentionLayer(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("group", c_int32),
        ("window", c_int32),
        ("causal", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("pages", c_void_p),
        ("page_stride", c_int64),
        ("value_dim", c_int32),
        ("kv_format", c_int32),
        ("v_head_dim", c_int32),
        ("reserved", c_int32),
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
        ("group", c_int32),
        ("num_sequences", c_int32),
        ("first_tile", c_int32),
        ("end_tile", c_int32),
        ("sequences", c_void_p),
    )


class Step(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_decodes", c_int32),
        ("num_groups", c_int32),
        ("num_shared_runs", c_int32),
        ("reserved", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("rows", c_void_p),
        ("groups", c_void_p),
        ("shared_runs", c_void_p),
    )


class Rotary(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("table", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("norm_eps", c_float),
        ("rotary_dim", c_int32),
        ("offsets_norm", c_int32),
        ("norm_offset", c_float),
    )


class Op(ctypes.Structure):
    """See program.h."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("by_position", c_int32),
        ("num_heads", c_int32),
        ("eps", c_float),
        ("factor", c_float),
        ("limit", c_float),
        ("up_offset", c_float),
        ("gates_first", c_int32),
        ("size", c_int64),
        ("second_size", c_int64),
        ("in_stride", c_int64),
        ("in_head_stride", c_int64),
        ("second_stride", c_int64),
        ("second_head_stride", c_int64),
        ("third_stride", c_int64),
        ("third_head_stride", c_int64),
        ("out_stride", c_int64),
        ("out_head_stride", c_int64),
        ("input", c_void_p),
        ("second", c_void_p),
        ("third", c_void_p),
        ("out", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("linear", c_void_p),
        ("layer", c_void_p),
        ("rotary", c_void_p),
        ("experts", c_void_p),
        ("states", c_void_p),
        ("adapter", c_void_p),
    )


class StateCall(ctypes.Structure):
    """See program.h."""

    _fields_ = (
        ("layer", c_void_p),
        ("step", c_void_p),
        ("call", c_void_p),
        ("second_offset", c_int64),
        ("third_offset", c_int64),
    )


class SampleRow(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("stream", c_uint64),
        ("position", c_int64),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("temperature", c_float),
        ("log_min_p", c_float),
    )


class LogprobRow(ctypes.Structure):
    """See abi.h."""

    _fields_ = (
        ("line", c_int64),
        ("token_id", c_int64),
        ("num_top", c_int64),
    )
