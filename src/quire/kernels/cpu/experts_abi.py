"""The C ABI's structures of mixtures of experts, mirrored in Python from `experts_abi.h`.

The header is in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_float, c_int32, c_void_p


class RouterLayer(ctypes.Structure):
    """See experts_abi.h."""

    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("renormalizes", c_int32),
        ("num_groups", c_int32),
        ("top_groups", c_int32),
        ("sums_best", c_int32),
        ("rounds", c_int32),
        ("scale", c_float),
        ("reserved", c_int32),
        ("bias", c_void_p),
        ("scales", c_void_p),
    )


class ExpertsLayer(ctypes.Structure):
    """See experts_abi.h."""

    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("is_plain", c_int32),
        ("activation", c_int32),
        ("limit", c_float),
        ("factor", c_float),
        ("up_offset", c_float),
        ("reserved", c_int32),
        ("gate_up", c_void_p),
        ("down", c_void_p),
    )


class LinearsByHead(ctypes.Structure):
    """See experts_abi.h."""

    _fields_ = (
        ("num_heads", c_int32),
        ("reserved", c_int32),
        ("linears", c_void_p),
    )
