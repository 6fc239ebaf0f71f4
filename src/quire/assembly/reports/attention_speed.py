"""Measures the speed of attention over KV blocks of several sizes, without a model.

Times the model's first causal layer without a window, over blocks in random order: once for
decoding rows, and once for a chunk of a prompt. All block sizes are measured in turns. Called by
`planning`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.assembly.device_setup import DeviceSetup, choose_device, choose_setup
from quire.assembly.model_kind import ModelKind
from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    GroupBatch,
    LayerKV,
)
from quire.kernels.attention_inputs import AttentionInputs
from quire.options.engine_options import EngineOptions

NUM_ROWS, CONTEXT, NUM_QUERIES = 4, 2048, 64
NUM_ROUNDS = 25


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """Seconds of one layer's attention for decoding rows, and for a chunk of a prompt."""

    decode_s: float
    chunk_s: float


def measure_attention(
    options: EngineOptions, kind: ModelKind, sizes: Sequence[int]
) -> dict[int, AttentionSpeed]:
    """The shortest times of several rounds, by block size. (Disturbances only lengthen a round.)

    Empty if the model has no causal layer without a window.
    """
    setup = choose_setup(options, kind.config, choose_device(options.device), options.num_threads)
    specs = [spec for spec in kind.config.attention_specs if spec.window is None and spec.causal]
    if not specs:
        return {}
    runs = {size: _Runs(setup, specs[0], size) for size in sizes}
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for _ in range(NUM_ROUNDS + 1):
        for size, each in runs.items():
            times[size].append((_timed(each.decode), _timed(each.chunk)))
    return {
        size: AttentionSpeed(*(min(column) for column in zip(*rows[1:], strict=True)))
        for size, rows in times.items()
    }


def _timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


class _Runs:
    """Runs one layer's attention over blocks of one size. Each row has CONTEXT tokens, and rows
    share no blocks."""

    def __init__(self, setup: DeviceSetup, spec: AttentionSpec, block_size: int) -> None:
        self._spec, self._device, self._dtype = spec, setup.device, setup.dtype
        self._backend: AttentionBackend = setup.new_backend()
        form = self._backend.page_format(spec, block_size, setup.kv_format)
        num_blocks = -(-CONTEXT // block_size)
        pages = torch.zeros(
            NUM_ROWS * num_blocks, form.bytes_per_layer, dtype=torch.uint8, device=setup.device
        )
        pages.fill_(1)  # commits the memory; the values are small and finite
        self._backend.bind((spec,), (LayerKV(pages, 0, form),))
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(1))
        self._tables = order.to(torch.int32).view(NUM_ROWS, num_blocks).to(setup.device)
        self._decode = self._batch([1] * NUM_ROWS, block_size)
        self._chunk = self._batch([NUM_QUERIES], block_size)

    def decode(self) -> None:
        """Attend with one query token per row."""
        self._run(self._decode, NUM_ROWS)

    def chunk(self) -> None:
        """Attend with the last NUM_QUERIES tokens of the first row as queries."""
        self._run(self._chunk, NUM_QUERIES)

    def _run(self, batch: AttentionBatch, num_tokens: int) -> None:
        spec = self._spec

        def heads(number: int, size: int) -> torch.Tensor:
            return torch.ones(num_tokens, number, size, dtype=self._dtype, device=self._device)

        self._backend.plan(batch)
        values = None if spec.value_dim else heads(spec.num_kv_heads, spec.output_dim)
        sinks = torch.zeros(spec.num_heads, device=self._device) if spec.has_sinks else None
        queries, keys = (
            heads(spec.num_heads, spec.head_dim),
            heads(spec.num_kv_heads, spec.head_dim),
        )
        self._backend.run(0, AttentionInputs(queries, keys, values, sinks))

    def _batch(self, lengths: list[int], block_size: int) -> AttentionBatch:
        device, rows = self._device, list(range(len(lengths)))
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        slots = [
            int(self._tables[row, place // block_size]) * block_size + place % block_size
            for row, length in enumerate(lengths)
            for place in range(CONTEXT - length, CONTEXT)
        ]
        return AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.full((len(rows),), CONTEXT, dtype=torch.int32, device=device),
            rows=torch.tensor(rows, dtype=torch.int64, device=device),
            query_lens_list=lengths,
            context_lens_list=[CONTEXT] * len(rows),
            rows_list=rows,
            num_decodes=len(rows) if lengths[0] == 1 else 0,
            groups=(
                GroupBatch(self._tables, torch.tensor(slots, dtype=torch.int64, device=device)),
            ),
        )
