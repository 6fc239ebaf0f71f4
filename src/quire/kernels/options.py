"""The options that choose the kernels of an engine and their threads.

This module does not import torch, so that the command line can check the options quickly.
`assembly` applies them with `cpu/selection.py`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from quire.errors import ConfigurationError
from quire.option_fields import Flag, Kind, OneOf, Options, Whole, option

NATIVE_KERNELS = (
    *("avx512_bf16", "avx512_amx", "avx512", "avx_vnni", "avx2"),
    *("neon_bf16", "neon_i8mm", "neon_dotprod", "neon"),
    "portable",
)
"""Instruction sets for which the native library is built, in the order in which "auto" chooses:
sets of x86-64, sets of ARM64, and a set for any other processor and for every x86-64."""

KERNELS = ("auto", "torch", "triton", *NATIVE_KERNELS)
MAX_NUM_THREADS = 1024

ALL_LAYERS, FITTING_LAYERS = "all", "auto"
"""Words for numbers of layers: every layer, and as few as make the rest fit on the device."""


class LayerCount(Kind):
    """A number of layers, ALL_LAYERS or FITTING_LAYERS."""

    metavar: ClassVar[str | None] = "N"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int | str:
        if value in (ALL_LAYERS, FITTING_LAYERS):
            return str(value)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"{name} is {value!r:.80}, but must be a number of layers of at least 1,"
                f" {ALL_LAYERS!r} or {FITTING_LAYERS!r}"
            )
        return value


@dataclass(frozen=True)
class KernelOptions(Options):
    """The kernels of an engine, and their threads on the CPU."""

    kernels: str = option(
        "auto",
        OneOf(KERNELS),
        group="computation",
        help=f"{', '.join(NATIVE_KERNELS)}; triton on a GPU; or torch",
        doc='on the CPU, "auto" takes the native kernels for the best instruction set of this'
        " processor, or torch if they were not built or don't support the dtype (the log says so)."
        ' "' + '", "'.join(NATIVE_KERNELS) + '" and "torch" take exactly these. "avx512_amx"'
        " multiplies int8 weights with many rows by the matrix unit (AMX) of Intel's processors. It"
        ' has run in an emulator only, so "auto" does not take it. On a GPU,'
        ' "auto" and "triton" are the Triton kernels. "triton" on the CPU runs them in Triton\'s'
        " interpreter (TRITON_INTERPRET=1), thousands of times slower, as a check.",
    )
    num_threads: int | None = option(
        None,
        Whole(1, MAX_NUM_THREADS),
        group="computation",
        help="computing threads",
        doc="computing threads; None: one per processor that this process may use, or torch's own"
        ' number with kernels="torch".',
        flag=Flag(shown="one per processor"),
    )
    cpu_experts: int | str | None = option(
        None,
        LayerCount(),
        group="computation",
        help="layers of a mixture of experts whose experts stay in the machine's memory and are"
        " computed by the CPU, for models larger than the GPU: a number, all or auto",
        doc="for models larger than the GPU: the experts of this many layers, the last ones, stay"
        " in the machine's memory, and the CPU's kernels compute them with num_threads threads."
        ' "all": those of every layer; "auto": of as few layers as let the rest fit on the GPU.'
        " Steps are then launched without CUDA graphs. See docs/gpu.md.",
        flag=Flag(shown="none"),
    )
    cpu_layers: int | str | None = option(
        None,
        LayerCount(),
        group="computation",
        help="layers, the last ones, that the CPU computes, with their KV cache, for models larger"
        " than the GPU: a number or auto",
        doc="for models larger than the GPU: this many layers, the last ones, and their part of the"
        " KV cache stay in the machine's memory, and the CPU computes them with num_threads"
        ' threads. "auto": as few as let the rest fit on the GPU. Steps are then launched without'
        " CUDA graphs. See docs/gpu.md.",
        flag=Flag(shown="none"),
    )

    @property
    def host_part(self) -> tuple[str, int | str] | None:
        """The option that leaves a part of the model to the CPU, and its value; None if neither is
        given."""
        if self.cpu_layers is not None:
            return "cpu_layers", self.cpu_layers
        return None if self.cpu_experts is None else ("cpu_experts", self.cpu_experts)

    def _check_together(self) -> None:
        super()._check_together()
        if self.cpu_layers is not None and self.cpu_experts is not None:
            raise ConfigurationError(
                f"cpu_layers is {self.cpu_layers!r}, but cpu_experts is {self.cpu_experts!r}; give"
                " one of them"
            )
