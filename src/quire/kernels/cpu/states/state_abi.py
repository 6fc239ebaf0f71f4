"""The C ABI's structures of recurrent layers, mirrored in Python from `state_abi.h`.

The header is in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from quire.kernels.cpu.abi import fields


class StateLayer(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *fields(c_int32, "group", "first_unit", "units_per_page", "num_units"),
        ("unit_bytes", c_int64),
        ("pages", c_void_p),
        ("page_stride", c_int64),
    )


class StateTable(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        ("blocks", c_void_p),
        ("stride", c_int64),
    )


class StateStep(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        ("num_sequences", c_int64),
        *fields(c_void_p, "query_start", "context_lens", "rows", "num_drafts", "tables"),
    )


class GatedDelta(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_k_heads", "num_v_heads", "key_dim", "value_dim", "normalizes"),
        ("dtype", c_int32),
        *fields(c_void_p, "q", "k", "v", "g", "beta", "out"),
        *fields(c_int64, "q_stride", "k_stride", "v_stride"),
    )


class Mamba2(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_heads", "head_dim", "state_size", "num_groups", "dtype"),
        *fields(c_float, "min_step", "max_step"),
        ("reserved", c_int32),
        *fields(c_void_p, "x", "b", "c", "dt", "a", "d", "dt_bias", "out"),
        *fields(c_int64, "x_stride", "b_stride", "c_stride"),
    )


class ShortConv(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_channels", "width", "has_silu", "dtype", "weight_dtype", "reserved"),
        *fields(c_void_p, "x", "weight", "bias", "out"),
        ("x_stride", c_int64),
    )
