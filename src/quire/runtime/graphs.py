"""Captures decode steps as CUDA graphs and replays them.

There is one graph for each of a few batch sizes: one launch instead of hundreds. A step in which
every sequence decodes does the same work whatever the values: its kernels read lengths, tables and
slots from tensors. So `device_rows` builds it in tensors that stay where they are, padded up to one
of a few sizes, and the whole forward pass over them is captured, from the look-up of the token ids
and the attention's planning on, when the first step of that size comes. Mixed steps, and all steps
with `enforce_eager`, are launched kernel by kernel.

Not in the graph: the logits and the sampling. A graph's outputs keep their memory for good, and the
logits of all sizes together would be gigabytes (256 rows x 150,000 words x 4 bytes = 154 MB for
the largest alone); as launches they are two of the hundreds, for just the rows that sample.

All graphs share one pool of memory: what one needs between its kernels is free for the next. Only
one runs at a time, and its outputs have been read, in the order of the stream, before the
next one is replayed. So the largest size is captured first: the pool is then as large as it gets.

Called by `model_runner.py`. Knows no rows and no sampling.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

import torch

from quire.observability.log import get_logger
from quire.runtime.batch import StepBatch
from quire.runtime.device_rows import NO_SLOT
from quire.runtime.forward import Forward

logger = get_logger(__name__)

Computation = Callable[[], torch.Tensor]
"""Puts work into the device's queue, from tensors that stay; returns where the result will be."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The static sizes of decode steps for up to so many sequences, smallest first.

    1, 2, 4, then steps of 8 up to 64, of 16 up to 256, of 32 beyond. A row of padding costs what it
    adds to the linears (attention and sampling skip it): nothing while reading the weights takes
    longer than multiplying by them, which on an H200 is up to some 200 rows; beyond, 31 rows of 257
    at the very most. Below 8 sizes lie close because a few rows get kernels of their own.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphCapture(Protocol):
    """How a computation is captured: on a GPU, or for tests without one.

    num_bytes: device memory that all captured ones hold together.
    """

    num_bytes: int

    def capture(self, computation: Computation) -> Computation:
        """What runs `computation` again on the same tensors; it has run once when this returns."""
        ...


class CudaGraphCapture:
    """Captures CUDA graphs on one device, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # One stream for all: a matrix library keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, computation: Computation) -> Computation:
        # Once as usual: kernels are compiled and libraries allocate what no graph may hold.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                computation()
        finally:  # what was queued before memory ran out still uses the step's tensors
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        free_bytes = self._free_bytes()
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        # thread_local: what other threads of the process do on the device is none of our business.
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

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class RepeatedCalls:
    """Stands for graphs where there is no GPU: calls the computation itself again.

    What it is given must be right for all steps of its size then, as with graphs: the tensors are
    read anew, and numbers that Python saw at the capture are those of the capture.
    """

    num_bytes = 0

    def capture(self, computation: Computation) -> Computation:
        computation()
        return computation


class GraphForward:
    """Replays steps of a static size and leaves others to `eager`. See `forward.Forward`.

    num_bytes: device memory of what is captured. capture_s: seconds that capturing took.
    """

    def __init__(
        self, eager: Forward, capture: GraphCapture, build_padding: Callable[[int], StepBatch]
    ) -> None:
        """build_padding: a step of a static size in which no sequence computes."""
        self.capture_s = 0.0
        self.logits = eager.logits
        self._eager = eager
        self._capture = capture
        self._build_padding = build_padding
        self._replays: dict[int, Computation] = {}

    @property
    def num_bytes(self) -> int:
        return self._capture.num_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those that are captured."""
        return tuple(sorted(self._replays))

    def capture_all(self, sizes: Iterable[int]) -> None:
        """Capture these static sizes, the largest first. Raises what the device raises."""
        for size in sorted(sizes, reverse=True):
            if size not in self._replays:
                self._replays[size] = self._captured(self._build_padding(size))

    def capture_anew(self) -> None:
        """Capture again what was captured: tensors that the steps read lie elsewhere now."""
        sizes = self.sizes
        self._replays.clear()
        self.capture_all(sizes)

    def plan(self, step: StepBatch) -> None:
        if not step.static_size:
            self._eager.plan(step)  # else it is part of what is replayed

    def __call__(self, step: StepBatch) -> torch.Tensor:
        """As `Forward`, but of a step of a static size with the lines of padding at the end."""
        if not step.static_size:
            return self._eager(step)
        replay = self._replays.get(step.static_size)
        if replay is None:
            replay = self._replays[step.static_size] = self._capture_or_not(step)
        return replay()

    def _capture_or_not(self, step: StepBatch) -> Computation:
        """While requests are served, a step that doesn't fit into memory twice is launched kernel
        by kernel instead."""
        try:
            return self._captured(step)
        except torch.OutOfMemoryError as error:
            logger.warning(
                "no memory to capture the decode step of %d sequences, which will be slower"
                " without; lower gpu_memory_utilization or max_num_seqs, or set enforce_eager: %s",
                step.static_size,
                error,
            )
            return self._computation(step)

    def _captured(self, step: StepBatch) -> Computation:
        """A capture runs the step, and so will its first replay, but recurrent states may be moved
        by a token only once: meanwhile all of the step is padding."""
        started_s, num_bytes = perf_counter(), self.num_bytes
        with _as_padding(step):
            replay = self._capture.capture(self._computation(step))
        self.capture_s += perf_counter() - started_s
        logger.debug(
            "captured the decode step of %d sequences in %.2f s, %.1f MiB",
            step.static_size,
            perf_counter() - started_s,
            (self.num_bytes - num_bytes) / 2**20,
        )
        return replay

    def _computation(self, step: StepBatch) -> Computation:
        def compute() -> torch.Tensor:
            if step.gather is not None:
                step.gather()
            self._eager.plan(step)
            return self._eager(step)

        return compute


@contextmanager
def _as_padding(step: StepBatch) -> Iterator[None]:
    """No sequence of the step computes until the end of the `with`."""
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
