"""The C ABI's structures of adapters, mirrored in Python from `adapters_abi.h`.

The header is in `csrc/library`; a test compares the fields. Pointers are plain addresses, so the
code that fills a structure must keep the memory alive.
"""

import ctypes
from ctypes import c_int32, c_void_p

from quire.kernels.cpu.abi import fields


class AdapterGroup(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = fields(c_int32, "slot", "first", "count", "reserved")


class AdapterRows(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_tokens", "num_groups", "num_rows", "reserved"),
        *fields(c_void_p, "slots", "order", "groups"),
    )


class AdapterPart(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        *fields(c_int32, "rank", "column"),
        ("b", c_void_p),
    )


class AdapterSlot(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_columns", "reserved"),
        *fields(c_void_p, "a", "scales", "parts"),
    )


class AdapterLinear(ctypes.Structure):
    """See adapters_abi.h."""

    _fields_ = (
        *fields(c_int32, "num_parts", "max_columns"),
        *fields(c_void_p, "starts", "rows", "slots", "next"),
        *fields(c_int32, "num_inputs", "reserved"),
    )
