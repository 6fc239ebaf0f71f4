"""Captures steps as CUDA graphs and replays them.

There is one graph for each of a few sizes; replaying it takes one launch instead of hundreds. If
every sequence decodes, all steps of a size launch the same kernels, which read lengths, tables and
slots from tensors. The same holds for mixed steps (`MixedSize`) whose attention the host has
planned into a tensor. So `device_rows` builds a step in fixed tensors, padded to one of these
sizes. The first step of a size captures the whole forward pass over them, including the gathering
of token ids and the attention's planning of decode steps. Steps that are not static, and all steps
with `enforce_eager`, are launched kernel by kernel.

Logits and sampling are not in the graph. A graph's outputs keep their memory for good, and the
logits of all sizes together would take gigabytes (256 rows x 150,000 tokens x 4 bytes = 154 MB for
the largest size). Without the graph, logits cost only two of hundreds of launches, and are computed
only for rows that sample. Hidden states of mixed steps are large as well (2,048 tokens x 4,096 x 2
bytes = 16 MB, in 35 sizes), so all their graphs copy them to one buffer.

All graphs share one memory pool, so the temporary memory of one graph is free for the next. That is
safe because only one runs at a time, and its outputs are read, in the order of the stream, before
the next replay. The largest size is captured first, so the pool grows no further: that of decode
steps by `capture_all`, that of mixed steps by the steps of `profile_run.py`.

Called by `model_runner.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

import torch

from quire.attention.interface import PlanVariant
from quire.observability.log import get_logger
from quire.runtime.batch import StepBatch
from quire.runtime.device_rows import NO_SLOT
from quire.runtime.forward import Forward

logger = get_logger(__name__)

_Key = tuple[int, PlanVariant | None]
"""The static size of a step, and the variant of a mixed step's plan; None if all rows decode."""

Computation = Callable[[], torch.Tensor]
"""Queues work on the device that reads fixed tensors. Returns the tensor for the result."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The static sizes of decode steps for up to `max_num_seqs` sequences, smallest first.

    They are 1, 2 and 4, then multiples of 8 up to 64, of 16 up to 256, and of 32 beyond. A padding
    row costs time only in the linears, since attention and sampling skip it. While reading the
    weights takes longer than multiplying, up to about 200 rows on an H200, it costs nothing. For
    larger steps, at most 31 rows of 257 are padding. Below 8 the sizes are close together because
    small numbers of rows use special kernels.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def mixed_graph_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """The static sizes of mixed steps of up to `max_num_tokens` tokens, smallest first.

    They are 4, 8 and 16, then multiples of 32 up to 512, of 64 up to 1,024, of 128 up to 2,048, and
    so on: 35 sizes up to 2,048. Large products are computed in tiles of 64 to 256 rows, so padding
    to these sizes seldom adds a tile. Up to 16 rows use special kernels.
    """
    sizes, size = [4, 8, 16], 32
    while size < max_num_tokens:
        sizes.append(size)
        size += max(32, (1 << size.bit_length() - 1) // 8)
    return (*(size for size in sizes if size < max_num_tokens), max_num_tokens)


class GraphCapture(Protocol):
    """Captures computations: on a GPU or, for tests, without one."""

    #: The bytes of device memory that all captured computations hold together.
    num_bytes: int

    def capture(self, computation: Computation) -> Computation:
        """Run `computation` once. Returns a call that runs it again on the same tensors."""
        ...

    def drop(self) -> None:
        """Forget all captured computations. The caller has dropped the calls that replay them, so
        their memory is free."""
        ...


class CudaGraphCapture:
    """Captures CUDA graphs on one device, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # All captures use one stream, since a matrix library keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, computation: Computation) -> Computation:
        # First run normally: kernels are compiled, and libraries allocate memory outside the graph.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                computation()
        finally:  # work queued before memory ran out still uses the step's tensors
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        free_bytes = self._free_bytes()
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        # thread_local: the capture must not fail because other threads use the device.
        with torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = computation()
        self._graphs.append(graph)
        self.num_bytes += max(0, free_bytes - self._free_bytes())

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def drop(self) -> None:
        """See `GraphCapture`. Torch frees a graph, and at last their pool, with its object."""
        self._graphs.clear()
        self.num_bytes = 0

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class RepeatedCalls:
    """A `GraphCapture` without a GPU that calls the computation itself again.

    As with graphs, the computation must be valid for all steps of its size: each call reads the
    tensors again, but values that Python read at the capture stay the same.
    """

    num_bytes = 0

    def capture(self, computation: Computation) -> Computation:
        computation()
        return computation

    def drop(self) -> None:
        """See `GraphCapture`; there is nothing to forget."""


class GraphForward:
    """Replays steps of a static size and calls `eager` for others. See `forward.Forward`."""

    def __init__(
        self, eager: Forward, capture: GraphCapture, build_padding: Callable[[int], StepBatch]
    ) -> None:
        """`build_padding` builds a step of a static size in which no sequence computes."""
        #: The time in seconds that all captures took together.
        self.capture_s = 0.0
        self.logits = eager.logits
        self._eager = eager
        self._capture = capture
        self._build_padding = build_padding
        self._replays: dict[_Key, Computation] = {}
        #: The static sizes of decode steps whose graphs were dropped, for `capture_anew`.
        self._dropped: set[int] = set()
        #: The hidden states of all captured mixed steps, [T of the largest, H].
        self._hidden: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory that the captured graphs hold."""
        return self._capture.num_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured static sizes of decode steps, ascending."""
        return tuple(sorted(size for size, variant in self._replays if variant is None))

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The captured static sizes of mixed steps, ascending."""
        return tuple(sorted({size for size, variant in self._replays if variant is not None}))

    def capture_all(self, sizes: Iterable[int]) -> None:
        """Capture these static sizes of decode steps, the largest first. Raises the device's
        errors."""
        for size in sorted(sizes, reverse=True):
            if (size, None) not in self._replays:
                self._replays[size, None] = self._captured(self._build_padding(size))

    def drop(self) -> None:
        """Free the memory of all graphs, since the tensors that they read will be freed. No step
        may run before `capture_anew`."""
        self._dropped.update(self.sizes)
        self._replays.clear()
        self._hidden = None
        self._capture.drop()

    def capture_anew(self) -> None:
        """Capture what was dropped again: decode steps now, mixed steps when the next one of their
        size is run. Raises the device's errors."""
        self.capture_all(self._dropped)
        self._dropped.clear()

    def plan(self, step: StepBatch) -> None:
        if not step.static_size:
            self._eager.plan(step)  # for a static size, it is part of the graph

    def __call__(self, step: StepBatch) -> torch.Tensor:
        """See `Forward`. For a static size the result includes the padding rows at the end."""
        if not step.static_size:
            return self._eager(step)
        mixed = step.attention.mixed
        key = step.static_size, None if mixed is None else mixed.variant
        replay = self._replays.get(key)
        if replay is None:
            replay = self._replays[key] = self._capture_or_not(step)
        return replay()

    def _capture_or_not(self, step: StepBatch) -> Computation:
        """Capture the step. If memory runs out, steps of its size are from now on launched kernel
        by kernel.

        Requests are being served, so running out of memory must not end the engine.
        """
        try:
            return self._captured(step)
        except torch.OutOfMemoryError as error:
            logger.warning(
                "no memory to capture the %s, which will be slower without; lower"
                " gpu_memory_utilization or max_num_seqs, or set enforce_eager: %s",
                _name(step),
                error,
            )
            return self._computation(step)

    def _captured(self, step: StepBatch) -> Computation:
        """Capture the step.

        Both the capture and the first replay run the step, but each token may update recurrent
        states only once. So a decode step is all padding during the capture. A mixed step has no
        states, and writes the same K and V twice.
        """
        started_s, num_bytes = perf_counter(), self.num_bytes
        with _as_padding(step) if step.attention.mixed is None else nullcontext():
            replay = self._capture.capture(self._computation(step))
        self.capture_s += perf_counter() - started_s
        logger.debug(
            "captured the %s in %.2f s, %.1f MiB",
            _name(step),
            perf_counter() - started_s,
            (self.num_bytes - num_bytes) / 2**20,
        )
        return replay

    def _computation(self, step: StepBatch) -> Computation:
        def compute() -> torch.Tensor:
            if step.gather is not None:
                step.gather()
            self._eager.plan(step)
            hidden = self._eager(step)
            return hidden if step.attention.mixed is None else self._copied(hidden)

        return compute

    def _copied(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy of a mixed step's hidden states, in the buffer that all mixed steps share."""
        if self._hidden is None or len(self._hidden) < len(hidden):
            # A computation runs before it is captured, so this memory is not in the graphs' pool.
            self._hidden = torch.empty_like(hidden)
        return self._hidden[: len(hidden)].copy_(hidden)


def _name(step: StepBatch) -> str:
    if step.attention.mixed is None:
        return f"decode step of {step.static_size} sequences"
    return f"mixed step of {step.static_size} tokens"


@contextmanager
def _as_padding(step: StepBatch) -> Iterator[None]:
    """Turn all sequences of the step into padding until the end of the `with`."""
    context_lens = step.attention.context_lens
    slots = [group.slot_mapping for group in step.attention.groups]
    kept = [tensor.clone() for tensor in (context_lens, *slots)]
    context_lens.zero_()
    for slot_mapping in slots:
        slot_mapping.fill_(NO_SLOT)
    try:
        yield
    finally:
        for tensor, values in zip((context_lens, *slots), kept, strict=True):
            tensor.copy_(values)
