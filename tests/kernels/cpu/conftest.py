"""The native library and its kernels of each instruction set, for the tests of the kernels."""

import pytest
from tests.native_library import require_isa

from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.options import NATIVE_KERNELS


@pytest.fixture(scope="session")
def library(native_library: NativeLibrary) -> NativeLibrary:
    return native_library


@pytest.fixture(scope="session", params=NATIVE_KERNELS)
def kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> NativeKernels:
    """The kernels of each instruction set that can be used here, with two threads."""
    require_isa(library, request.param)
    return NativeKernels(library, request.param, num_threads=2)
