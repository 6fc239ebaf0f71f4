"""Attention backends by name. Called by `engine/build.py`; knows no backend's inside.

To add one: its file, and a line in `_BACKENDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.attention.interface import AttentionBackend
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class _Entry:
    build: Callable[[], AttentionBackend]
    device_types: frozenset[str]


_BACKENDS = {
    "torch": _Entry(TorchPagedAttention, frozenset({"cpu"})),
}
"""By name; where none is named, the first that serves the device is taken."""


def backend_names() -> tuple[str, ...]:
    """All names that `select` knows."""
    return tuple(_BACKENDS)


def select(device: str, name: str | None = None) -> AttentionBackend:
    """A new backend for `device` ("cpu", "cuda:1"); None: the best one for it.

    Raises ConfigurationError for a name that is unknown or does not serve the device.
    """
    device_type = device.partition(":")[0]
    serving = {n: e for n, e in _BACKENDS.items() if device_type in e.device_types}
    if name is not None and name not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ConfigurationError(f"attention backend {name!r} is unknown; there is: {known}")
    if not serving or (name is not None and name not in serving):
        wanted = "no attention backend" if name is None else f"attention backend {name!r} does not"
        raise ConfigurationError(
            f"{wanted} serve{'s' if name is None else ''} device {device!r}; "
            f"for it there is: {', '.join(serving) or 'none'}"
        )
    return serving[name or next(iter(serving))].build()
