"""The native kernels for tests of layers that use them."""

import pytest

from quire.kernels.cpu.library import NativeKernels, NativeLibrary


@pytest.fixture(scope="session")
def kernels(native_library: NativeLibrary) -> NativeKernels:
    """The best of this processor, with two threads."""
    return NativeKernels(native_library, num_threads=2)
