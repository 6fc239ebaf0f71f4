"""The native kernels, as tests of layers have them."""

from tests.layers.conftest import kernels

__all__ = ["kernels"]
