"""Lets a kernel begin while the one before it ends: programmatic dependent launch, from sm_90 on.

Kernels of one stream run one after the other, and between two of them a device waits about a
microsecond: as long as a decode step's small kernels take. A kernel that is launched with
`launch_options` may begin earlier, when all programs of the kernel before have said by
`await_inputs` that they run, or have ended. So it must touch nothing that another kernel writes or
reads before its own `await_inputs`, which returns when the kernel before has ended and what it
wrote can be read. Every program calls it: the end of a kernel then means the end of all before it.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". A kernel
that is launched as usual, one of torch's for instance, waits for the end of these as for any other.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE_BYTES = tl.constexpr(128)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: IS_EARLY, a constant of the kernel, and what lets it begin early."""
    if device.type == "cuda" and _can_begin_early(device):
        return {"IS_EARLY": True, "launch_pdl": True}
    return {"IS_EARLY": False}


@cache
def _can_begin_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def await_inputs(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel begin; return when the kernel before has ended. Not early: it has."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(places):  # type: ignore[no-untyped-def]
    """Have the lines of memory at these pointers brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], tl.int32, False, 1
    )
