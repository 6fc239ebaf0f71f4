"""The C ABI's structures of recurrent layers, mirrored in Python from `state_abi.h`.

The header is in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class StateLayer(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        ("group", c_int32),
        ("first_unit", c_int32),
        ("units_per_page", c_int32),
        ("num_units", c_int32),
        ("unit_bytes", c_int64),
        ("pages", c_void_p),
        ("page_stride", c_int64),
    )


class StateTable(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (("blocks", c_void_p), ("stride", c_int64))


class StateStep(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        ("num_sequences", c_int64),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("rows", c_void_p),
        ("tables", c_void_p),
    )


class GatedDelta(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim")),
        *(("normalizes", c_int32), ("dtype", c_int32)),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
    )


class Mamba2(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "head_dim", "state_size", "num_groups")),
        *(("dtype", c_int32), ("min_step", c_float), ("max_step", c_float), ("reserved", c_int32)),
        *((name, c_void_p) for name in ("x", "b", "c", "dt", "a", "d", "dt_bias", "out")),
        *((name, c_int64) for name in ("x_stride", "b_stride", "c_stride")),
    )


class ShortConv(ctypes.Structure):
    """See state_abi.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_channels", "width", "has_silu", "dtype")),
        *(("weight_dtype", c_int32), ("reserved", c_int32)),
        *((name, c_void_p) for name in ("x", "weight", "bias", "out")),
        ("x_stride", c_int64),
    )
