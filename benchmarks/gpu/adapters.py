"""Adapters of a linear by Triton kernels, beside torch's on the CPU: numbers, bits, and a graph."""

import torch

from benchmarks.gpu.attention import relative_error
from benchmarks.gpu.harness import Bench
from quire.adapters.adapter import LoRAWeights
from quire.adapters.linear_slots import AdapterKernels, SlotLimits, TorchAdapterKernels
from quire.adapters.triton_slots import TritonAdapterKernels
from quire.formats.dense import DenseMethod
from quire.layers.linear import Linear, LinearKind

LIMITS = SlotLimits(max_loras=8, max_rank=64)
RANKS = (16, 1, 64, 8, 17, 32, 3, 48)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check_adapters(bench: Bench, dtype: torch.dtype) -> None:
    """Rows of eight adapters and of none, of a step of decodes and of a prompt."""
    sizes = (64, (48, 16, 16)) if bench.small else (4096, (4096, 1024, 1024))
    most = 20 if bench.small else 700
    label = str(dtype)[6:]
    triton = TritonAdapterKernels(bench.device, most, captures=True)
    torchs = TorchAdapterKernels(torch.device("cpu"))
    found = _linear(triton, sizes, dtype, bench.device)
    reference = _linear(torchs, sizes, dtype, torch.device("cpu"))
    worst, are_equal, base_kept = 0.0, True, True
    for num_rows in (3, most) if bench.small else (1, 16, 200, most):
        x = torch.randn(num_rows, sizes[0], device=bench.device).to(dtype)
        slots = torch.arange(num_rows, dtype=torch.int32) * 5 % 9 - 1
        triton.set_rows(torch.full_like(slots, -1))
        plain = found(x)
        triton.set_rows(slots)
        crowd = found(x)
        torchs.set_rows(slots)
        worst = max(worst, relative_error(crowd.cpu(), reference(x.cpu())))
        base = (slots < 0).to(bench.device)
        base_kept &= torch.equal(crowd[base], plain[base])
        are_equal &= _equal_alone(triton, found, x, crowd, slots)
    bench.at_most(f"adapters, {label}", worst, BOUNDS[dtype], is_time=False)
    bench.check(f"rows without an adapter keep their bits: {label}", base_kept)
    bench.check(f"what an adapter adds is the same alone: {label}", are_equal)
    if bench.device.type == "cuda":
        bench.check(f"a captured step serves other rows: {label}", _replays(triton, found, sizes))


def _linear(
    kernels: AdapterKernels,
    sizes: tuple[int, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """A linear with the same random weights and adapters for the same sizes. Slot 7 has no adapter
    for one part, and held another adapter before."""
    num_inputs, parts = sizes
    linear = Linear(num_inputs, parts, LinearKind.COLUMN, bias=False, dtype=dtype, device=device)
    linear.use(DenseMethod(), dtype, device)
    generator = torch.Generator().manual_seed(11)
    for slot in linear.slots().values():
        slot.load(0, torch.randn(slot.shape, generator=generator) * num_inputs**-0.5)
    linear.finish()
    slots = kernels.attach(linear, LIMITS, dtype)
    for index, rank in [(7, 64), *enumerate(RANKS)]:
        given: list[LoRAWeights | None] = [
            LoRAWeights(
                torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5,
                torch.randn(size, rank, generator=generator) * rank**-0.5,
                0.5 + part,
            )
            for part, size in enumerate(parts)
        ]
        if rank == RANKS[7]:
            given[1] = None
        slots.load(index, tuple(given))
    return linear


def _equal_alone(
    kernels: TritonAdapterKernels,
    linear: Linear,
    x: torch.Tensor,
    crowd: torch.Tensor,
    slots: torch.Tensor,
) -> bool:
    """Whether rows get the same adapter results alone as in the batch. Results are added to zeros,
    since the linear's own sums may depend on the batch."""
    assert linear.adapter is not None
    kernels.set_rows(slots)
    whole = linear.adapter(x, torch.zeros_like(crowd))
    for row in range(0, len(x), max(1, len(x) // 20)):
        kernels.set_rows(slots[row : row + 1])
        alone = linear.adapter(x[row : row + 1], torch.zeros_like(crowd[:1]))
        if not torch.equal(alone[0], whole[row]):
            return False
    return True


def _replays(
    kernels: TritonAdapterKernels, linear: Linear, sizes: tuple[int, tuple[int, ...]]
) -> bool:
    """A graph that is captured without adapters computes those of the rows set before a replay."""
    weight = linear.weight
    x = torch.randn(8, sizes[0], device=weight.device).to(weight.dtype)
    slots = torch.tensor([3, -1, 0, 7, 7, -1, 2, 5], dtype=torch.int32)
    kernels.set_rows(torch.full_like(slots, -1))
    linear(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = linear(x)
    kernels.set_rows(slots)
    expected = linear(x).clone()
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(result, expected)
