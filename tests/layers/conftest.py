"""The native kernels for tests of layers that use them, skipped where they weren't built."""

import pytest

from quire.kernels.cpu.library import NativeKernels, NativeUnavailableError, load_library


@pytest.fixture(scope="session")
def kernels() -> NativeKernels:
    """The best of this processor, with two threads."""
    try:
        return NativeKernels(load_library(), num_threads=2)
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
