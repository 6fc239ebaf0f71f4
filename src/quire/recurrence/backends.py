"""The registry of recurrent backends. A backend is imported when it is chosen.

To add a backend, add its file and a line in `BACKENDS`.
"""

from dataclasses import dataclass

from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels
from quire.recurrence.state_backend import StateBackend
from quire.registry import Registry, imported


@dataclass(frozen=True, slots=True)
class RecurrentEntry:
    """Where a backend's class is, and which engines may use the backend."""

    #: The "module:Class" of a `state_backend.StateBackend`, which is imported when first needed.
    path: str
    #: Torch's names of the device types that the backend supports.
    device_types: frozenset[str]
    #: Whether the backend computes with the native CPU kernels.
    needs_kernels: bool = False
    #: Whether the backend serves only engines that use the Triton kernels.
    needs_triton: bool = False


BACKENDS: Registry[RecurrentEntry] = Registry(
    "recurrent backend",
    {
        "torch": RecurrentEntry(
            "quire.recurrence.torch_states:TorchStates", frozenset({"cpu", "cuda"})
        ),
        "triton": RecurrentEntry(
            "quire.recurrence.triton_states:TritonStates",
            frozenset({"cpu", "cuda"}),
            needs_triton=True,
        ),
        "cpu": RecurrentEntry(
            "quire.recurrence.cpu_states:CpuStates", frozenset({"cpu"}), needs_kernels=True
        ),
    },
)
"""Backends by name. The last suitable one is chosen, so one from outside comes before quire's."""


def select(
    device_type: str, kernels: NativeKernels | None, *, is_triton: bool = False
) -> StateBackend:
    """Create the last registered backend that supports the device.

    `is_triton` says whether the engine uses the Triton kernels (on a CPU, in Triton's interpreter).
    Raises ConfigurationError if no backend is suitable.
    """
    for _, entry in reversed(BACKENDS.items()):
        is_served = device_type in entry.device_types
        has_needed = (kernels is not None or not entry.needs_kernels) and (
            is_triton or not entry.needs_triton
        )
        if is_served and has_needed:
            backend: StateBackend = imported(entry.path).create(kernels)
            return backend
    raise ConfigurationError(
        "the model has layers with recurrent states, which no backend supports on device"
        f" {device_type!r}{'' if kernels is None else ' with native kernels'}; the backends are:"
        f" {', '.join(BACKENDS) or 'none'}"
    )
