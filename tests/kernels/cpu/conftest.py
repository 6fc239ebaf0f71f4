"""The native library for the tests of its kernels, which are skipped where it wasn't built."""

import pytest

from quire.kernels.cpu.library import (
    NativeKernels,
    NativeLibrary,
    NativeUnavailableError,
    load_library,
)
from quire.kernels.options import NATIVE_KERNELS


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    try:
        return load_library()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.fixture(scope="session", params=NATIVE_KERNELS)
def kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> NativeKernels:
    """The kernels of each instruction set that this processor has, with two threads."""
    if request.param not in library.isas():
        pytest.skip(f"this processor has no {request.param}")
    return NativeKernels(library, request.param, num_threads=2)
