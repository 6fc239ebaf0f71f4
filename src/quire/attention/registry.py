"""Attention backends by name. Called by `assembly/build.py`; knows no backend's inside.

To add one: its file, and a line in `_BACKENDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.flashinfer_paged import FlashInferAttention
from quire.attention.interface import AttentionBackend
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a backend is built for. kernels: the engine's native ones, if it computes with them."""

    device_type: str
    kernels: NativeKernels | None
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """device_types: that it serves. default_for: where it may be taken unless another is named.
    needs_kernels: only an engine with native kernels has it.
    """

    build: Callable[[BackendRequest], AttentionBackend]
    device_types: frozenset[str]
    default_for: frozenset[str] = frozenset()
    needs_kernels: bool = False


def _native(request: BackendRequest) -> AttentionBackend:
    assert request.kernels is not None
    return CpuPagedAttention(request.kernels)


def _torch(request: BackendRequest) -> AttentionBackend:
    if request.batch_invariant:
        raise ConfigurationError(
            "attention backend 'torch' can't obey batch_invariant=True: how torch sums up a prompt "
            "depends on its chunks; choose 'native' on a CPU and 'triton' on a GPU"
        )
    return TorchPagedAttention()


def _triton(request: BackendRequest) -> AttentionBackend:
    # Brings Triton, where it is installed, which takes a while to load.
    from quire.kernels.triton.support import why_not

    reason = why_not(request.device_type)
    if reason is not None:
        raise ConfigurationError(f"attention backend 'triton' can't run: {reason}")
    # And this needs it.
    from quire.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention(batch_invariant=request.batch_invariant)


def _flashinfer(request: BackendRequest) -> AttentionBackend:
    return FlashInferAttention(batch_invariant=request.batch_invariant)


_CPU, _GPU = frozenset({"cpu"}), frozenset({"cuda"})

_BACKENDS = {
    "native": _Entry(_native, _CPU, default_for=_CPU, needs_kernels=True),
    "triton": _Entry(_triton, _CPU | _GPU, default_for=_GPU),
    "flashinfer": _Entry(_flashinfer, _GPU),
    "torch": _Entry(_torch, _CPU, default_for=_CPU),
}
"""By name; where none is named, the first that may be taken for the device is. On the CPU Triton
has an interpreter only, which is a check and no way to serve."""


def backend_names() -> tuple[str, ...]:
    """All names that `select` knows."""
    return tuple(_BACKENDS)


def select(
    device: str,
    name: str | None = None,
    kernels: NativeKernels | None = None,
    *,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """A new backend for `device` ("cpu", "cuda:1"). name: None: the best one for it. kernels: those
    of the engine, where torch doesn't compute. batch_invariant: no result depends on the batch.

    Raises ConfigurationError for a name that is unknown or does not serve the device, and where the
    backend can't run or can't be batch-invariant.
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
    if name is not None and name not in serving and device_type in _BACKENDS[name].device_types:
        raise ConfigurationError(
            f"attention backend {name!r} needs the native kernels, which don't compute here;"
            " leave attention_backend out, or kernels"
        )
    if not serving or (name is not None and name not in serving):
        wanted = "no attention backend" if name is None else f"attention backend {name!r} does not"
        raise ConfigurationError(
            f"{wanted} serve{'s' if name is None else ''} device {device!r}; "
            f"for it there is: {', '.join(serving) or 'none'}"
        )
    chosen = name or next(n for n, e in serving.items() if device_type in e.default_for)
    return serving[chosen].build(BackendRequest(device_type, kernels, batch_invariant))
