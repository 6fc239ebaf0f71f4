"""Measures a machine's peak memory bandwidth and peak arithmetic rate before an engine takes steps.

`engine.utilization` compares steps with these peaks. The bandwidth is measured with a plain copy
(on a CPU, with reads), the arithmetic rate with a large matrix product whose weights have the
model's format. Each peak is the best of a few repetitions, since noise only lowers a rate. A
process measures once for each device and kind of weights, in about a tenth of a second.
"""

import time
from collections.abc import Callable

import torch

from quire.assembly.device_setup import DeviceSetup
from quire.engine.step_work import MachineRates
from quire.formats.weight_format import LinearModule
from quire.observability.log import get_logger
from quire.observability.machine_memory import available_memory_bytes
from quire.observability.memory_speed import measure_reads
from quire.runtime.device_memory import is_out_of_memory

logger = get_logger(__name__)

READ_S = 0.03
NUM_REPS = 3

CPU_SHAPE = (256, 1024, 1024)
"""(rows, inputs, outputs) of the product on a CPU: about 0.5e9 operations."""
GPU_SHAPE = (4096, 4096, 4096)
"""(rows, inputs, outputs) of the product on a GPU: 1.4e11 operations, which take 0.2 ms or more."""

CALLS_AT_ONCE = 10
"""Calls per measurement on a GPU, enough that launching and waiting take little of the time."""

COPY_BYTES = 128 << 20
"""The size of a copy on a GPU, which exceeds its caches."""

_measured: dict[tuple[object, ...], MachineRates | None] = {}


def measure_rates(setup: DeviceSetup, quantization: str | None) -> MachineRates | None:
    """The rates of one rank's device, with weights in the format of the option `quantization`.

    None with Triton's interpreter, since its rates are meaningless, and None on a GPU without
    enough free memory.
    """
    chosen = (setup.device, setup.dtype, setup.name, setup.num_threads)
    key = (*chosen, quantization, setup.batch_invariant)
    if key not in _measured:
        _measured[key] = _measure(setup)
    return _measured[key]


def _measure(setup: DeviceSetup) -> MachineRates | None:
    is_on_gpu = setup.device.type == "cuda"
    if setup.is_triton and not is_on_gpu:
        return None
    began_s = time.perf_counter()
    try:
        with torch.inference_mode():
            if is_on_gpu:
                bytes_per_s = _copy_rate(setup.device)
            else:
                bytes_per_s = measure_reads(setup.num_threads, available_memory_bytes(), READ_S)
            rates = MachineRates(bytes_per_s, _product_rate(setup))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.info("no memory was left to measure the machine's rates: utilization is not known")
        return None
    finally:
        if is_on_gpu:
            torch.cuda.empty_cache()
    logger.info(
        "this machine %s %.3g GB/s and multiplies at %.3g Tflop/s (measured in %.2f s)",
        "copies" if is_on_gpu else "reads",
        rates.bytes_per_s / 1e9,
        rates.operations_per_s / 1e12,
        time.perf_counter() - began_s,
    )
    return rates


def _copy_rate(device: torch.device) -> float:
    """The copy rate in bytes/s, counting both reads and writes."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best_s(lambda: target.copy_(source), device)


def _product_rate(setup: DeviceSetup) -> float:
    device, dtype, method = setup.device, setup.dtype, setup.methods.method
    num_rows, num_inputs, num_outputs = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    linear = LinearModule(num_inputs, (num_outputs,), has_bias=False)
    method.create(linear, False, dtype, device)
    # Random numbers, because products of zeros take less power and may run at a higher clock.
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    method.load_part(linear, "weight", 0, 0, weight)
    method.finish(linear)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype).to(device)
    seconds = _best_s(lambda: method.apply(linear, x), device)
    return 2 * num_rows * num_inputs * num_outputs / seconds


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    """The shortest time of a call in seconds, after a call to warm up."""
    is_on_gpu = device.type == "cuda"
    num_calls = CALLS_AT_ONCE if is_on_gpu else 1
    found: list[float] = []
    call()
    for _ in range(NUM_REPS):
        if is_on_gpu:
            torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        if is_on_gpu:
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - began_s) / num_calls)
    return min(found)
