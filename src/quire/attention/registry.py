"""Attention backends by name. Called by `engine/build.py`; knows no backend's inside.

To add one: its file, and a line in `_BACKENDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.interface import AttentionBackend
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels


@dataclass(frozen=True, slots=True)
class _Entry:
    """build: from the native kernels, which only `needs_kernels` says it can't do without."""

    build: Callable[[NativeKernels | None], AttentionBackend]
    device_types: frozenset[str]
    needs_kernels: bool = False


def _native(kernels: NativeKernels | None) -> AttentionBackend:
    assert kernels is not None
    return CpuPagedAttention(kernels)


_BACKENDS = {
    "native": _Entry(_native, frozenset({"cpu"}), needs_kernels=True),
    "torch": _Entry(lambda _: TorchPagedAttention(), frozenset({"cpu"})),
}
"""By name; where none is named, the first that serves the device is taken."""


def backend_names() -> tuple[str, ...]:
    """All names that `select` knows."""
    return tuple(_BACKENDS)


def select(
    device: str, name: str | None = None, kernels: NativeKernels | None = None
) -> AttentionBackend:
    """A new backend for `device` ("cpu", "cuda:1"). name: None: the best one for it. kernels: those
    of the engine, where torch doesn't compute.

    Raises ConfigurationError for a name that is unknown or does not serve the device.
    """
    device_type = device.partition(":")[0]
    serving = {
        n: e
        for n, e in _BACKENDS.items()
        if device_type in e.device_types and (kernels is not None or not e.needs_kernels)
    }
    if name is not None and name not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ConfigurationError(f"attention backend {name!r} is unknown; there is: {known}")
    if not serving or (name is not None and name not in serving):
        wanted = "no attention backend" if name is None else f"attention backend {name!r} does not"
        raise ConfigurationError(
            f"{wanted} serve{'s' if name is None else ''} device {device!r}; "
            f"for it there is: {', '.join(serving) or 'none'}"
        )
    return serving[name or next(iter(serving))].build(kernels)
