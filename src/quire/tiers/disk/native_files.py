"""Reads records by one call of the native library, which needs no Python while it reads."""

import ctypes
import os
from array import array

import numpy as np

from quire.kernels.cpu.library import NativeLibrary
from quire.tiers.disk.files import Files, RecordRun, Targets

MIN_BYTES = 241
"""Of a record that the library checks; shorter ones are left to Python."""


class NativeFiles(Files):
    """As `Files`, but records are read and checked by one call, without the GIL."""

    def __init__(self, library: NativeLibrary) -> None:
        self._read, self._isa = library.read_records, next(iter(library.isas().values()))

    def read_records(self, descriptor: int, records: RecordRun, targets: Targets) -> list[bool]:
        offsets, sizes, digests, indexes = records
        if min(sizes) < MIN_BYTES:
            return super().read_records(descriptor, records, targets)
        begins, count = targets.begins, len(offsets)
        places = np.empty((count, 3), np.int64)
        places[:, 0] = array("q", offsets)
        places[:, 1] = array("q", sizes)
        places[:, 2] = array("q", [begins[index] for index in indexes])
        places[:, 2] += targets.address
        are_sound = (ctypes.c_bool * count)()
        error = self._read(
            *(self._isa, descriptor, count, places.ctypes.data, b"".join(digests), are_sound)
        )
        if error:
            raise OSError(error, os.strerror(error))
        return list(are_sound)
