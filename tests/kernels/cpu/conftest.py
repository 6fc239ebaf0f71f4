"""The native library and its kernels of each instruction set, for the tests of the kernels."""

import pytest

from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.options import NATIVE_KERNELS


@pytest.fixture(scope="session")
def library(native_library: NativeLibrary) -> NativeLibrary:
    return native_library


@pytest.fixture(scope="session", params=NATIVE_KERNELS)
def kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> NativeKernels:
    """The kernels of each instruction set that this processor has, with two threads."""
    if request.param not in library.isas():
        pytest.skip(f"this processor has no {request.param}")
    return NativeKernels(library, request.param, num_threads=2)
