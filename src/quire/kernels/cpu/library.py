"""Loads the native library and calls its functions.

A `NativeKernels` is an instruction set and a thread pool.

`csrc/library/kernels.h` explains the calls and their shapes. The other files of this folder check
arguments; this file does not. Calls release the GIL, and a `NativeKernels` runs one call at a time.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError
from quire.kernels.cpu import abi, build, experts_abi
from quire.kernels.cpu.adapters import adapters_abi
from quire.kernels.cpu.states import state_abi
from quire.observability.log import get_logger
from quire.observability.machine_processors import usable_processors

logger = get_logger(__name__)

_LINEAR = POINTER(abi.Weights)
_LAYER, _STEP = POINTER(abi.AttentionLayer), POINTER(abi.Step)
_STATES = [c_void_p, POINTER(state_abi.StateLayer), POINTER(state_abi.StateStep)]

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "quire_abi_version": (c_int32, []),
    "quire_source_digest": (c_char_p, []),
    "quire_num_isas": (c_int32, []),
    "quire_isa_name": (c_char_p, [c_int32]),
    "quire_isa_supported": (c_int32, [c_int32]),
    "quire_isa_optimized": (c_int32, [c_int32]),
    "quire_create": (c_void_p, [c_int32, c_int32]),
    "quire_destroy": (None, [c_void_p]),
    "quire_run": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "quire_packed_bytes": (c_int64, [_LINEAR]),
    "quire_num_scales": (c_int64, [_LINEAR]),
    "quire_pack_rows": (
        None,
        [c_int32, _LINEAR, c_void_p, c_int32, c_int64, c_int64, c_int64],
    ),
    "quire_compensate_int8": (
        None,
        [c_int32, _LINEAR, c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p],
    ),
    "quire_pack_codes": (None, [_LINEAR, POINTER(abi.CodeRows), c_int64, c_int64]),
    "quire_pack_blocks": (c_int32, [_LINEAR, c_int32, c_void_p, c_int64, c_int64, c_int64]),
    "quire_pack_wide": (None, [_LINEAR]),
    "quire_unpack_words": (
        None,
        [c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_void_p],
    ),
    "quire_pack_int8": (None, [_LINEAR, c_void_p, c_void_p, c_int64, c_int64]),
    "quire_clear_padding": (None, [_LINEAR]),
    "quire_unpack_rows": (None, [_LINEAR, c_void_p, c_int64, c_void_p, c_int64]),
    "quire_linear": (
        None,
        [
            *(c_void_p, _LINEAR, c_int32, c_void_p, c_int64, c_int64),
            *(c_void_p, c_int32, c_int64, c_int32, POINTER(adapters_abi.AdapterLinear)),
        ],
    ),
    "quire_attention": (
        None,
        [c_void_p, _LAYER, _STEP, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    ),
    "quire_write_kv": (None, [c_void_p, _LAYER, _STEP, c_void_p, c_void_p, c_int64]),
    "quire_argmax": (
        None,
        [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p],
    ),
    "quire_sample": (
        None,
        [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p],
    ),
    "quire_sample_allowed": (
        None,
        [
            *(c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
            *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
        ],
    ),
    "quire_forbid": (
        None,
        [
            *(c_void_p, c_void_p, c_int64, c_int64, c_void_p),
            *(c_void_p, c_int64, c_int64),
        ],
    ),
    "quire_token_logprobs": (
        None,
        [
            *(c_void_p, c_void_p, c_int64, c_int64, c_void_p),
            *(c_int64, c_int64, c_void_p, c_void_p),
        ],
    ),
    "quire_gated_delta": (None, [*_STATES, POINTER(state_abi.GatedDelta)]),
    "quire_mamba2": (None, [*_STATES, POINTER(state_abi.Mamba2)]),
    "quire_short_conv": (None, [*_STATES, POINTER(state_abi.ShortConv)]),
    "quire_route": (
        None,
        [
            *(c_void_p, POINTER(experts_abi.RouterLayer), c_int32, c_void_p, c_int64),
            *(c_int64, c_void_p, c_int64),
        ],
    ),
    "quire_experts": (
        None,
        [
            *(c_void_p, POINTER(experts_abi.ExpertsLayer), c_int32, c_void_p, c_int64),
            *(c_void_p, c_int64, c_int64, c_void_p, c_int64),
        ],
    ),
    "quire_linears_by_head": (
        None,
        [
            *(c_void_p, POINTER(experts_abi.LinearsByHead), c_int32, c_void_p, c_int64),
            *(c_int64, c_int64, c_void_p, c_int64, c_int64),
        ],
    ),
    "quire_xxh3_128": (None, [c_int32, c_void_p, c_int64, c_void_p]),
    "quire_read_records": (
        c_int32,
        [c_int32, c_int32, c_int64, c_void_p, c_void_p, c_void_p],
    ),
}


class NativeUnavailableError(ConfigurationError):
    """There is no usable native library; the message has the reason and a remedy."""


class NativeLibrary:
    """A loaded library. Its C functions are attributes, named without the prefix `quire_`."""

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailableError if the file is missing or of another version."""
        how = "run `python -m quire.kernels.cpu.build` (it needs a C++ compiler)"
        if not path.exists():
            raise NativeUnavailableError(f"{path} was not built; {how}")
        try:
            loaded = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"{path} can't be loaded ({error}); {how}") from error
        if loaded.quire_abi_version() != abi.ABI_VERSION:
            raise NativeUnavailableError(f"{path} is of another version of quire; {how}")
        digest = loaded.quire_source_digest().decode()
        if build.SOURCES.is_dir() and digest != build.source_digest():
            raise NativeUnavailableError(f"{path} was built from other sources; {how}")
        self.path = path
        self._loaded = loaded
        if not self.isas():
            raise NativeUnavailableError(f"{path} was built for another processor only; {how}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Find a C function at its first use, and set it as an attribute for later uses."""
        function: Callable[..., Any] = getattr(self._loaded, f"quire_{name}")
        setattr(self, name, function)
        return function

    def isas(self) -> dict[str, int]:
        """The indices of the instruction sets that the library has and this processor supports, by
        name, best first; at least one."""
        names = {self.isa_name(i).decode(): i for i in range(self.num_isas())}
        return {name: i for name, i in names.items() if self.isa_supported(i)}

    def isas_for_tests(self) -> tuple[str, ...]:
        """The names from `isas` whose kernels `build.py --for-tests` has compiled without full
        optimization. They compute the same, but are slow."""
        return tuple(name for name, i in self.isas().items() if not self.isa_optimized(i))

    @cached_property
    def best_isa(self) -> int:
        """The index of the best instruction set, for functions with the same results in all
        sets."""
        return next(iter(self.isas().values()))


class NativeKernels:
    """The kernels of one instruction set, with their threads."""

    def __init__(
        self,
        library: NativeLibrary,
        isa: str | None = None,
        num_threads: int | None = None,
        *,
        takes_fewer: bool = False,
    ) -> None:
        """`isa` is a name from `NativeLibrary.isas`, by default the best. `num_threads` is by
        default the number of processors that this process may use.

        If the system can't start that many, `takes_fewer` allows fewer threads, at least the
        caller's. The attribute `num_threads` is the actual number. Raises NativeUnavailableError if
        the processor or the library lacks the instruction set, and ConfigurationError if threads
        can't be started.
        """
        known = library.isas()
        self.isa = isa or next(iter(known))
        if self.isa not in known:
            raise NativeUnavailableError(
                f"kernels {self.isa!r} do not run on this processor, or were not built; there is:"
                f" {', '.join(known)}; `python -m quire.kernels.cpu.build` builds all"
            )
        if self.isa in library.isas_for_tests():
            logger.warning(
                "kernels %s were compiled for tests, so they are slow; `python -m"
                " quire.kernels.cpu.build` compiles all for use",
                self.isa,
            )
        self.library = library
        self._pid = os.getpid()
        self.num_threads = num_threads or usable_processors()
        self.context: int | None = library.create(known[self.isa], self.num_threads)
        while self.context is None and takes_fewer and self.num_threads > 1:
            self.num_threads //= 2
            self.context = library.create(known[self.isa], self.num_threads)
        if self.context is None:
            # Not NativeUnavailableError: torch, which would be used instead, needs as many threads.
            raise ConfigurationError(
                f"num_threads is {self.num_threads}, but the system can't start that many threads"
                " (a limit of address space or of processes); give a lower num_threads"
            )

    def run(self, ops: Any, num_ops: int, step: abi.Step) -> None:
        """Run a program, which is an array of abi.Op."""
        self.library.run(self.context, ctypes.addressof(ops), num_ops, byref(step))

    def __del__(self) -> None:
        # In a forked process the threads don't exist, so waiting for them would never end.
        if getattr(self, "context", None) is not None and self._pid == os.getpid():
            self.library.destroy(self.context)


@cache
def load_library(path: Path = build.LIBRARY) -> NativeLibrary:
    """The library at `path`, loaded once. Raises NativeUnavailableError."""
    return NativeLibrary(path)
