"""Reads and checks disk records in one call of the native library, without the GIL."""

import os

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.library import NativeLibrary
from quire.tiers.disk.files import Files, RecordRun, Targets

MIN_BYTES = 241
"""Minimum payload bytes for the native library. Runs with a shorter record are read and checked by
Python."""


class NativeFiles(Files):
    """Like `Files`, but reads and checks records in one call without the GIL."""

    def __init__(self, library: NativeLibrary) -> None:
        self._read, self._isa = library.read_records, library.best_isa

    def read_records(
        self, descriptor: int, records: RecordRun, targets: Targets
    ) -> NDArray[np.bool_]:
        offsets, sizes, digests, indexes = records
        if sizes.min() < MIN_BYTES:
            return super().read_records(descriptor, records, targets)
        count = len(offsets)
        places = np.empty((count, 3), np.int64)
        places[:, 0], places[:, 1] = offsets, sizes
        np.add(targets.begins[indexes], targets.address, out=places[:, 2])
        are_sound = np.zeros(count, np.bool_)
        error = self._read(
            *(self._isa, descriptor, count),
            *(places.ctypes.data, digests.tobytes(), are_sound.ctypes.data),
        )
        if error:
            raise OSError(error, os.strerror(error))
        return are_sound
