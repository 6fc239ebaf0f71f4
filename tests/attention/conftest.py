"""The native kernels, for the backend that is made of them."""

import pytest
from tests.kernels.cpu.conftest import kernels, library  # noqa: F401 (fixtures)

from quire.kernels.cpu.library import NativeKernels, NativeLibrary


@pytest.fixture(scope="session")
def best(library: NativeLibrary) -> NativeKernels:  # noqa: F811
    """The instruction set that would be chosen."""
    return NativeKernels(library, num_threads=2)
