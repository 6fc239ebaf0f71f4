"""Lets a kernel begin while the previous one ends: programmatic dependent launch, from sm_90 on.

Kernels of one stream run one after the other. Between two of them a device idles for about a
microsecond, which is as long as a small kernel of a decode step takes. A kernel launched with
`launch_options` may begin earlier: when each program of the previous kernel has called
`await_inputs` or ended. Before its own `await_inputs`, it may only read memory that is never
written, such as weights. `await_inputs` returns when the previous kernel has ended and its writes
are visible. Every program calls it, so a kernel ends after all kernels before it.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". A kernel
with an ordinary launch, such as torch's, waits for the end of these kernels as for any other.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: The number of bytes in a cache line, which `prefetch` loads.
LINE_BYTES = tl.constexpr(128)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: IS_EARLY, and Triton's option if the device can launch
    early."""
    if device.type == "cuda" and _can_begin_early(device):
        return {"IS_EARLY": True, "launch_pdl": True}
    return {"IS_EARLY": False}


@cache
def _can_begin_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def await_inputs(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel begin, and wait for the end of the previous one. Without IS_EARLY, the
    previous kernel has ended already."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(places):  # type: ignore[no-untyped-def]
    """Start loading the cache lines at these pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], tl.int32, False, 1
    )
