"""Chooses the number of KV blocks on a GPU by measuring the largest steps.

    total = weights + the largest step + CUDA graphs + KV blocks + other uses + unused

The runner is made twice. The first has a tiny pool, runs the steps of `runtime.profile_run` and
measures their peak memory. The second has all the memory that gpu_memory_utilization leaves, and
runs the same steps, so that a lack of memory shows before the first request comes. If something
does not fit, an InsufficientMemoryError names the option to lower and the value that fits. Called
by `rank_build`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.assembly.host_memory_plan import MemoryPlan, blocks_for, fitting_tokens
from quire.assembly.vision_build import NO_VISION, VisionMemory
from quire.core.memory.memory_report import format_bytes
from quire.core.step import Runner
from quire.engine_client.device_ledger import DeviceLedger
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.formats.format_registry import weight_formats
from quire.kernels.options import ALL_LAYERS
from quire.observability.log import get_logger
from quire.options.engine_options import EngineOptions
from quire.runtime.calibration import RunnerShape
from quire.runtime.device_memory import CudaMemory, excess_of_kernel, is_out_of_memory
from quire.runtime.page_layout import KVCacheLayout
from quire.runtime.profile_run import ProfileRun

DEFAULT_UTILIZATION = 0.9

# The highest utilization that messages suggest. Above it, the driver or a larger step may fail.
MOST_UTILIZATION = 0.98

# Bytes of the CUDA graph of a decode step outside the shared pool: its nodes in the driver and its
# outputs. The graphs of mixed steps share a buffer for their outputs, so each takes only its nodes
# and the step's inputs.
GRAPH_BYTES = 12 << 20
MIXED_GRAPH_BYTES = 2 << 20

# Divisors of (max_num_batched_tokens, max_num_seqs) that are tried if steps of the full size do not
# fit.
SMALLER = ((2, 1), (4, 1), (4, 4), (16, 16))

R = TypeVar("R", bound=Runner)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """The model and options that must fit into a GPU's memory."""

    options: EngineOptions
    layout: KVCacheLayout
    #: The result of `host_memory_plan.wanted_model_len`.
    model_len: int
    vocab_size: int
    #: The most log-probabilities per token that a request may ask for.
    max_logprobs: int
    #: Bytes to reserve for CUDA graphs that are captured later. The measurement includes only the
    #: graphs of the largest steps.
    graph_bytes: int = 0
    #: The weight format; None if the weights have the model's dtype.
    quantization: str | None = None
    #: Whether the model predicts tokens.
    generates: bool = True
    #: Bytes of the adapter slots, which are allocated together with the weights.
    adapter_bytes: int = 0
    #: The memory of the encoder of images, whose weights are allocated together with the model's.
    vision: VisionMemory = NO_VISION
    #: Bytes that the largest image takes while it is encoded, between steps.
    encoding_bytes: int = 0
    #: Number of tokens by which a step with an image may exceed max_num_batched_tokens.
    num_extra_tokens: int = 0

    def profile_run(
        self, memory_plan: MemoryPlan, num_tokens_divisor: int = 1, num_rows_divisor: int = 1
    ) -> ProfileRun:
        """The largest steps of a runner with the sizes of `memory_plan`. The numbers of tokens and
        rows of a step are divided by the divisors."""
        num_rows = max(1, self.options.max_num_seqs // num_rows_divisor)
        num_tokens = max(num_rows, self.options.max_num_batched_tokens // num_tokens_divisor)
        num_tokens += self.num_extra_tokens
        shape = RunnerShape(
            num_rows=num_rows,
            max_num_tokens=num_tokens,
            max_model_len=memory_plan.max_model_len,
            groups=self.layout.groups,
            num_blocks=memory_plan.num_blocks,
            block_size=self.options.block_size,
            vocab_size=self.vocab_size,
        )
        return ProfileRun(shape, self.max_logprobs, self.generates)


@dataclass(frozen=True, slots=True)
class DevicePlan(Generic[R]):
    """A runner with the chosen sizes, and a breakdown of the GPU's memory by use."""

    #: The runner, which is ready to serve requests.
    runner: R
    memory_plan: MemoryPlan
    ledger: DeviceLedger


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measured uses of a GPU's memory, in bytes."""

    #: Memory of the device.
    total: int
    #: Memory held before a runner was made: weights and adapter slots.
    weights: int
    #: Memory that the largest steps, or the encoder between them, took in addition to the pool.
    worst: int
    #: Memory that is neither free nor held by this process's tensors.
    other: int


def check_weights_fit(
    weight_bytes: int, memory: CudaMemory, options: EngineOptions, *, has_experts: bool
) -> None:
    """Raises InsufficientMemoryError if the weights, which are not loaded yet, will not fit.
    `has_experts` says whether the model has experts, which the CPU may compute alone."""
    free = memory.free_bytes()
    if weight_bytes <= free:
        return
    others = memory.total_bytes - free - memory.held_bytes()
    offload = ""
    if options.host_part is None:
        offload = f" set {'cpu_experts' if has_experts else 'cpu_layers'}='auto',"
    raise InsufficientMemoryError(
        f"the weights take {format_bytes(weight_bytes)}, but the GPU has {format_bytes(free)} free"
        f" of {format_bytes(memory.total_bytes)} ({format_bytes(others)} are held by others);"
        f" free {format_bytes(weight_bytes - free)} or more,"
        f"{_quantize(weight_bytes, weight_bytes - free, options.quantization)}{offload} raise"
        " tensor_parallel_size, or choose a smaller model"
    )


def graph_reserve_bytes(num_decode_graphs: int, num_mixed_graphs: int) -> int:
    """Bytes to reserve for the graphs of decode steps and of mixed steps, except for the largest
    graph of each kind, which was measured already."""
    num_bytes = max(0, num_decode_graphs - 1) * GRAPH_BYTES
    return num_bytes + max(0, num_mixed_graphs - 1) * MIXED_GRAPH_BYTES


def plan_on_device(
    needs: DeviceNeeds,
    memory: CudaMemory,
    make_runner: Callable[[MemoryPlan], R],
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> DevicePlan[R]:
    """Make the runner with the largest KV cache that fits. The weights must be on the device.

    `make_runner` makes a runner of given sizes for the loaded model. It is called more than once,
    never while an earlier runner is in use. `agree` takes this rank's number of blocks and returns
    the least of all ranks, which call this function at the same time. Raises
    InsufficientMemoryError, and ConfigurationError if a kernel is too large for the GPU.
    """
    memory.release_and_reset_peak()
    measured = _measure(needs, memory, make_runner)
    if measured is None:
        raise InsufficientMemoryError(_too_large_a_step(needs, memory, make_runner))
    memory.release_and_reset_peak()
    memory_plan = _choose(needs, measured, agree)
    ledger = _ledger(needs, measured, memory_plan)
    runner = _final_runner(needs, memory_plan, make_runner)
    logger.info(
        "GPU memory: weights %s, adapters %s, largest step %s, KV cache %s (%d blocks), others %s,"
        " unused %s",
        *map(format_bytes, (ledger.weight_bytes, ledger.adapter_bytes, ledger.activation_bytes)),
        format_bytes(ledger.kv_cache_bytes),
        memory_plan.num_blocks,
        *map(format_bytes, (ledger.other_bytes, ledger.unused_bytes)),
    )
    return DevicePlan(runner, memory_plan, ledger)


def _measure(
    needs: DeviceNeeds,
    memory: CudaMemory,
    make_runner: Callable[[MemoryPlan], Runner],
    divisors: tuple[int, int] = (1, 1),
) -> _Measured | None:
    """Measure the largest steps, with their tokens and rows divided by `divisors`, on a tiny pool.
    None if memory ran out."""
    weights = memory.held_bytes()
    probe = needs.profile_run(MemoryPlan(0, needs.model_len), *divisors)
    try:
        runner = make_runner(MemoryPlan(probe.num_blocks, needs.model_len))
        probe.run(runner)
    except (RuntimeError, MemoryError, InsufficientMemoryError) as error:
        if not (isinstance(error, InsufficientMemoryError) or is_out_of_memory(error)):
            raise
        return None
    except Exception as error:  # Triton's; all others are raised again
        excess = excess_of_kernel(error)
        if excess is None:
            raise
        raise ConfigurationError(
            f"the layers of this model can't be computed on this GPU: {excess}; choose another GPU,"
            " dtype or quantization, or device='cpu'"
        ) from error
    pool = probe.num_blocks * needs.layout.bytes_per_block
    worst = max(needs.encoding_bytes, memory.peak_bytes() - weights - pool)
    other = memory.total_bytes - memory.free_bytes() - memory.held_bytes()
    return _Measured(memory.total_bytes, weights, worst, max(0, other))


def _too_large_a_step(
    needs: DeviceNeeds, memory: CudaMemory, make_runner: Callable[[MemoryPlan], Runner]
) -> str:
    options = needs.options
    text = (
        f"a step of max_num_batched_tokens={options.max_num_batched_tokens} tokens and"
        f" max_num_seqs={options.max_num_seqs} sampled rows, of up to max_model_len="
        f"{needs.model_len} tokens, does not fit into the GPU's"
        f" {format_bytes(memory.total_bytes)} beside {format_bytes(memory.held_bytes())} of weights"
    )
    for divisors in SMALLER:
        memory.release_and_reset_peak()
        if _measure(needs, memory, make_runner, divisors) is not None:
            shape = needs.profile_run(MemoryPlan(0, needs.model_len), *divisors).shape
            return (
                f"{text}; one of {shape.max_num_tokens} tokens and {shape.num_rows} rows does:"
                " lower max_num_batched_tokens and max_num_seqs to these or less"
            )
    return f"{text}; lower max_model_len, choose a quantization or a smaller model, or free memory"


def _choose(needs: DeviceNeeds, measured: _Measured, agree: Callable[[int], int]) -> MemoryPlan:
    num_blocks = agree(_num_blocks(needs, measured))
    fitting_len = fitting_tokens(num_blocks, needs.model_len, needs.options, needs.layout)
    if fitting_len >= needs.model_len:
        return MemoryPlan(num_blocks, needs.model_len)
    if needs.options.max_model_len is not None or fitting_len < 2:
        raise InsufficientMemoryError(_too_small_a_pool(needs, measured, num_blocks, fitting_len))
    logger.warning(
        "%d KV blocks hold %d tokens of one sequence, so max_model_len is set to that, not to %d",
        num_blocks,
        fitting_len,
        needs.model_len,
    )
    return MemoryPlan(num_blocks, fitting_len)


def _num_blocks(needs: DeviceNeeds, measured: _Measured) -> int:
    """The number of blocks that the options ask for, or else the most that the utilization allows.

    Raises InsufficientMemoryError if the device has no room for the blocks that the options ask
    for.
    """
    options, page = needs.options, needs.layout.bytes_per_block
    taken = measured.weights + measured.worst + measured.other + needs.graph_bytes
    taken += needs.vision.embedding_bytes
    if options.num_blocks is not None:
        num_blocks, source = options.num_blocks, f"num_blocks={options.num_blocks}"
    elif options.kv_cache_bytes is not None:
        num_blocks = options.kv_cache_bytes // page
        source = f"kv_cache_memory={options.kv_cache_bytes}"
    else:
        return max(0, int(measured.total * _utilization(options)) - taken) // page
    if num_blocks * page + taken > measured.total:
        most = max(0, measured.total - taken) // page
        raise InsufficientMemoryError(
            f"{source} asks for {format_bytes(num_blocks * page)} of KV cache, but"
            f" {_shares(needs, measured)} of the GPU's {format_bytes(measured.total)}; lower it to"
            f" at most {most} blocks ({most * page} bytes)"
        )
    return num_blocks


def _too_small_a_pool(
    needs: DeviceNeeds, measured: _Measured, num_blocks: int, fitting_len: int
) -> str:
    options, page = needs.options, needs.layout.bytes_per_block
    wanted_len = needs.model_len if options.max_model_len is not None else options.block_size
    wanted = blocks_for(wanted_len, options, needs.layout) * page
    missing = wanted - num_blocks * page
    if options.num_blocks is None and options.kv_cache_memory is None:
        limit = f"gpu_memory_utilization={_utilization(options):g} of the GPU's"
        there = f"within {limit} {format_bytes(measured.total)}, {_shares(needs, measured)}, and"
    else:
        there = "the KV cache that was asked for,"
    remedies = [*_remedies(needs, measured, missing, fitting_len)]
    return (
        f"{there} {format_bytes(num_blocks * page)} for KV blocks hold {fitting_len} tokens of one"
        f" sequence, but max_model_len is {needs.model_len}; {wanted_len} tokens need"
        f" {format_bytes(wanted)}, {format_bytes(missing)} more: {', or '.join(remedies)}"
    )


def _remedies(
    needs: DeviceNeeds, measured: _Measured, missing: int, fitting_len: int
) -> Iterator[str]:
    """Yield changes of options, with the needed values. Each change alone suffices."""
    options, page = needs.options, needs.layout.bytes_per_block
    if fitting_len >= 2:
        yield f"lower max_model_len to {fitting_len}"
    if options.num_blocks is not None or options.kv_cache_memory is not None:
        needed = blocks_for(needs.model_len, options, needs.layout)
        yield f"raise kv_cache_memory to {needed * page} bytes (num_blocks to {needed})"
        return
    utilization = _utilization(options) + (missing + page) / measured.total
    if utilization <= MOST_UTILIZATION:
        yield f"raise gpu_memory_utilization to {utilization + 0.0005:.3f}"
    kept = 1 - missing / measured.worst if measured.worst else 0.0
    most_tokens = min(options.max_num_batched_tokens, options.max_num_seqs * needs.model_len)
    num_tokens = int(most_tokens * kept)
    if num_tokens >= max(options.max_num_seqs, most_tokens // 8):
        yield f"lower max_num_batched_tokens to about {num_tokens}"
    if quantized := _quantize(measured.weights, missing, needs.quantization):
        yield quantized.strip(" ,")
    if options.cpu_layers is not None:
        yield "leave more layers to the CPU (cpu_layers)"
    elif options.cpu_experts not in (None, ALL_LAYERS):
        yield "leave the experts of more layers to the CPU (cpu_experts)"
    yield (
        f"free {format_bytes(missing)} on the GPU (a smaller model, fewer other programs, a"
        " larger tensor_parallel_size)"
    )


def _quantize(weight_bytes: int, missing: int, quantization: str | None) -> str:
    """Advice to quantize the weights, if a weight format saves the missing bytes; otherwise "".

    Embeddings are not quantized, so the saving is less than the bits suggest.
    """
    for name, entry in weight_formats().items():
        if quantization is None and weight_bytes * entry.saved_share >= missing:
            return f" choose quantization={name!r} (about {entry.saved_share:.0%} less),"
    return ""


def _final_runner(
    needs: DeviceNeeds, memory_plan: MemoryPlan, make_runner: Callable[[MemoryPlan], R]
) -> R:
    """Make the runner and run the largest steps on it, to prove that they fit."""
    try:
        runner = make_runner(memory_plan)
        needs.profile_run(memory_plan).run(runner)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(
            f"with {memory_plan.num_blocks} KV blocks of {needs.layout.bytes_per_block} bytes the"
            " largest step does not fit any more, though it did without them: another program took"
            " memory meanwhile, or the GPU's is fragmented; lower gpu_memory_utilization (to"
            f" {_utilization(needs.options) - 0.05:.2f}), kv_cache_memory or num_blocks"
        ) from error
    return runner


def _utilization(options: EngineOptions) -> float:
    return options.gpu_memory_utilization or DEFAULT_UTILIZATION


def _shares(needs: DeviceNeeds, measured: _Measured) -> str:
    """A phrase for messages that lists the uses of memory except KV blocks."""
    options = needs.options
    return (
        f"weights take {format_bytes(measured.weights)}, the largest step"
        f" {format_bytes(measured.worst)} (max_num_batched_tokens="
        f"{options.max_num_batched_tokens}, max_num_seqs={options.max_num_seqs}), CUDA graphs"
        f" {format_bytes(needs.graph_bytes)}, embeddings of images"
        f" {format_bytes(needs.vision.embedding_bytes)} and others {format_bytes(measured.other)}"
    )


def _ledger(needs: DeviceNeeds, measured: _Measured, memory_plan: MemoryPlan) -> DeviceLedger:
    parts = {
        "weight_bytes": measured.weights - needs.adapter_bytes - needs.vision.weight_bytes,
        "vision_weight_bytes": needs.vision.weight_bytes,
        "encoder_cache_bytes": needs.vision.embedding_bytes,
        "adapter_bytes": needs.adapter_bytes,
        "activation_bytes": measured.worst,
        "graph_bytes": needs.graph_bytes,
        "kv_cache_bytes": memory_plan.num_blocks * needs.layout.bytes_per_block,
        "other_bytes": measured.other,
    }
    return DeviceLedger(**parts, unused_bytes=measured.total - sum(parts.values()))
