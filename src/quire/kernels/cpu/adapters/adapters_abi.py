"""The C ABI's structures of adapters, mirrored in Python from `adapters_abi.h`.

The header is in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_int32, c_void_p


class AdapterGroup(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        ("slot", c_int32),
        ("first", c_int32),
        ("count", c_int32),
        ("reserved", c_int32),
    )


class AdapterRows(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_groups", c_int32),
        ("num_rows", c_int32),
        ("reserved", c_int32),
        ("slots", c_void_p),
        ("order", c_void_p),
        ("groups", c_void_p),
    )


class AdapterPart(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        ("rank", c_int32),
        ("column", c_int32),
        ("b", c_void_p),
    )


class AdapterSlot(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        ("num_columns", c_int32),
        ("reserved", c_int32),
        ("a", c_void_p),
        ("scales", c_void_p),
        ("parts", c_void_p),
    )


class AdapterLinear(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        ("num_parts", c_int32),
        ("max_columns", c_int32),
        ("starts", c_void_p),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("next", c_void_p),
        ("num_inputs", c_int32),
        ("reserved", c_int32),
    )
