"""Recurrent backends by name; each is imported when it is chosen.

To add one: its file, and a line in `_BACKENDS`; outside of this package, `register`.
"""

from dataclasses import dataclass
from importlib import import_module

from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels
from quire.recurrence.state_backend import StateBackend


@dataclass(frozen=True, slots=True)
class RecurrentEntry:
    """Where a backend is, and where it may be used.

    path: "module:Class", a `state_backend.StateBackend`; imported when it is first needed, and
    made by its class method `create`, which is given the engine's native kernels, or None.
    device_types: torch's names of the devices that it serves. needs_kernels: it computes with the
    native kernels. needs_triton: it is for engines whose kernels are Triton's.
    """

    path: str
    device_types: frozenset[str]
    needs_kernels: bool = False
    needs_triton: bool = False


_BACKENDS: dict[str, RecurrentEntry] = {
    "cpu": RecurrentEntry(
        "quire.recurrence.cpu_states:CpuStates", frozenset({"cpu"}), needs_kernels=True
    ),
    "triton": RecurrentEntry(
        "quire.recurrence.triton_states:TritonStates",
        frozenset({"cpu", "cuda"}),
        needs_triton=True,
    ),
    "torch": RecurrentEntry(
        "quire.recurrence.torch_states:TorchStates", frozenset({"cpu", "cuda"})
    ),
}
"""By name; the first that serves a device is chosen."""


def register(name: str, entry: RecurrentEntry) -> None:
    """Make another backend known under `name`, in this process, before all others.

    Raises ConfigurationError for a name that is taken.
    """
    if name in _BACKENDS:
        raise ConfigurationError(f"there is a recurrent backend {name!r} already; choose a name")
    others = dict(_BACKENDS)
    _BACKENDS.clear()
    _BACKENDS[name] = entry
    _BACKENDS.update(others)


def select(
    device_type: str, kernels: NativeKernels | None, *, is_triton: bool = False
) -> StateBackend:
    """A new backend for a device. is_triton: the engine's kernels are Triton's, on a CPU in its
    interpreter. Raises ConfigurationError where none serves it."""
    for entry in _BACKENDS.values():
        is_served = device_type in entry.device_types
        has_needed = (kernels is not None or not entry.needs_kernels) and (
            is_triton or not entry.needs_triton
        )
        if is_served and has_needed:
            module, _, name = entry.path.partition(":")
            backend: StateBackend = getattr(import_module(module), name).create(kernels)
            return backend
    raise ConfigurationError(
        f"the model has layers with recurrent states, which nothing here computes on device"
        f" {device_type!r}{'' if kernels is None else ' with native kernels'}; for these there is:"
        f" {', '.join(_BACKENDS) or 'none'}"
    )
