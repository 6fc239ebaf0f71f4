"""The C ABI's structures of mixtures of experts, mirrored in Python from `experts_abi.h`.

The header is in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_float, c_int32, c_void_p

from quire.kernels.cpu.abi import fields


class RouterLayer(ctypes.Structure):
    """See experts_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_experts", "top_k", "scoring", "renormalizes", "num_groups"),
        *fields(c_int32, "top_groups", "sums_best", "rounds"),
        ("scale", c_float),
        ("reserved", c_int32),
        *fields(c_void_p, "bias", "scales"),
    )


class ExpertsLayer(ctypes.Structure):
    """See experts_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_experts", "top_k", "is_plain", "activation"),
        *fields(c_float, "limit", "factor", "up_offset"),
        ("reserved", c_int32),
        *fields(c_void_p, "gate_up", "down"),
    )


class LinearsByHead(ctypes.Structure):
    """See experts_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_heads", "reserved"),
        ("linears", c_void_p),
    )
