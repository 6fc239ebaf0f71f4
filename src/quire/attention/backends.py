"""The registry of attention backends, and the options that select one.

A backend is imported when it is chosen. Importing this module takes milliseconds and does not
import torch, so the command line can read the names and options. To add a backend, add its file and
a line in `BACKENDS`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.attention.kv_registry import AUTO, KV_FORMATS
from quire.errors import ConfigurationError
from quire.option_fields import Flag, OneOf, Options, in_words, option
from quire.registry import Registry, imported

if TYPE_CHECKING:  # these import torch
    from quire.attention.interface import AttentionBackend
    from quire.kernels.cpu.library import NativeKernels

_CPU, _GPU = frozenset({"cpu"}), frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """The import path of a backend's class, and the devices that it serves."""

    #: "module:Class" of an `AttentionBackend`.
    path: str
    #: One line for help texts.
    description: str
    #: torch's names of the device types that the backend serves.
    device_types: frozenset[str]
    #: The device types for which the backend may be chosen if the user names none.
    default_for: frozenset[str] = frozenset()
    #: Whether the backend calls the engine's native CPU kernels.
    needs_kernels: bool = False
    #: "module:function" of a check that is called with the device type before the class is
    #: imported. It returns the reason why the backend can't run, or None if it can. Without a
    #: check, the backend always can.
    why_not: str | None = None
    #: Names of KV formats that the backend reads, in addition to the formats whose entries in
    #: `KV_FORMATS` name the backend.
    kv_formats: frozenset[str] = frozenset()

    def load(self, name: str, device_type: str) -> "type[AttentionBackend]":
        """The backend's class. Raises ConfigurationError if `why_not` gives a reason."""
        reason = None if self.why_not is None else imported(self.why_not)(device_type)
        if reason is not None:
            raise ConfigurationError(f"attention backend {name!r} can't run: {reason}")
        backend: type[AttentionBackend] = imported(self.path)
        return backend


BACKENDS: Registry[BackendEntry] = Registry(
    "attention backend",
    {
        "native": BackendEntry(
            "quire.attention.cpu_paged:CpuPagedAttention", "the C++ kernels", _CPU, _CPU, True
        ),
        "triton": BackendEntry(
            "quire.attention.triton_paged:TritonPagedAttention",
            "Triton kernels",
            _CPU | _GPU,
            _GPU,
            why_not="quire.kernels.triton.support:why_not",
        ),
        "flashinfer": BackendEntry(
            "quire.attention.flashinfer_paged:FlashInferAttention", "the package FlashInfer", _GPU
        ),
        "flash_attn3": BackendEntry(
            "quire.attention.flash_attn3_paged:FlashAttention3", "FlashAttention-3", _GPU
        ),
        "torch": BackendEntry(
            "quire.attention.torch_paged:TorchPagedAttention", "torch's operators", _CPU, _CPU
        ),
    },
)
"""Backends by name. If no name is given, the first that is a default for the device is chosen.
Triton is not the default on the CPU, where its interpreter only serves for checks."""


def default_backends(device_type: str) -> list[str]:
    """The default backends for the device type, in order. If the user names no backend, the first
    that can serve is chosen."""
    return [name for name, entry in BACKENDS.items() if device_type in entry.default_for]


def is_read(kv_format: str, backend: str) -> bool:
    """Whether the backend reads the KV format. All plain formats share the entry of AUTO."""
    readers = KV_FORMATS.get(kv_format if kv_format in KV_FORMATS else AUTO).backends
    return readers is None or backend in readers or kv_format in BACKENDS.get(backend).kv_formats


@dataclass(frozen=True)
class AttentionOptions(Options):
    """The attention backend, and the stored format of K and V."""

    attention_backend: str | None = option(
        None,
        OneOf(BACKENDS),
        group="computation",
        help="{names}",
        doc=in_words([f'"{name}" ({entry.description})' for name, entry in BACKENDS.items()])
        + "; None: the best for the kernels.",
        flag=Flag(shown="the best for the kernels"),
    )
    kv_cache_dtype: str = option(
        AUTO,
        OneOf(KV_FORMATS),
        group="model",
        help="how K and V are stored: {names}",
        doc='how K and V are stored. "auto": in the model\'s dtype. "int8", "fp8" (e4m3, on a GPU):'
        " a byte an element and a scale for each token and head. The engine warns when it starts if"
        " rounding the model's keys distorts attention.",
    )


def select(
    device: str,
    name: str | None = None,
    kernels: "NativeKernels | None" = None,
    *,
    kv_format: str = AUTO,
    batch_invariant: bool = False,
) -> "AttentionBackend":
    """A new backend for `device`, such as "cpu" or "cuda:1".

    If `name` is None, the device's first default that reads the KV format is chosen. `kernels` are
    the engine's native kernels, or None if torch computes. With `batch_invariant`, no result may
    depend on the batch. Raises ConfigurationError if the name is unknown or doesn't serve the
    device, or if the backend can't run, can't be batch-invariant or doesn't read the KV format.
    """
    from quire.attention.interface import BackendRequest  # imports torch

    # First, find the backends that serve the device.
    device_type = device.partition(":")[0]
    serving = {
        n: e
        for n, e in BACKENDS.items()
        if device_type in e.device_types and (kernels is not None or not e.needs_kernels)
    }
    named = None if name is None else BACKENDS.get(name)
    if named is not None and name not in serving and device_type in named.device_types:
        raise ConfigurationError(
            f"attention backend {name!r} needs the native kernels, which this engine does not use;"
            " leave out the option attention_backend or the option kernels"
        )
    if not serving or (name is not None and name not in serving):
        wanted = "no attention backend" if name is None else f"attention backend {name!r} does not"
        raise ConfigurationError(
            f"{wanted} serve{'s' if name is None else ''} device {device!r}; "
            f"backends for it: {', '.join(serving) or 'none'}"
        )
    # Then choose a backend that reads the KV format.
    defaults = [n for n in default_backends(device_type) if n in serving]
    chosen = name or next((n for n in defaults if is_read(kv_format, n)), defaults[0])
    if not is_read(kv_format, chosen):
        read = in_words([n for n in KV_FORMATS if is_read(n, chosen)])
        raise ConfigurationError(
            f"kv_cache_dtype is {kv_format!r}, but attention backend {chosen!r} reads {read}"
            f"{KV_FORMATS.get(kv_format).advice}"
        )
    request = BackendRequest(device_type, kernels, batch_invariant)
    return serving[chosen].load(chosen, device_type).create(request)
