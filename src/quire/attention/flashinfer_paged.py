"""Attention by FlashInfer (arXiv:2501.01005), an optional package for NVIDIA GPUs.

It is chosen by name only: attention_backend="flashinfer". A kernel of quire norms and rotates q and
k and writes K and V. Then FlashInfer's wrapper for paged prefill computes attention. Decoding rows
are passed to the wrapper as prompts of one token; FlashInfer does the same for grouped heads. A
page is [2, Hkv, B, D], FlashInfer's layout HND, and pages need not be adjacent.

`page_format` refuses layers that FlashInfer can't compute: fp32, int8 and fp8 pages, sinks, latent
layers, V heads of another size than K heads, head sizes not in HEAD_DIMS, and windows that look
ahead. FlashInfer plans every step on the host, so steps can't be captured. It splits long contexts
differently in different batches, so batch_invariant is refused, too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.external import KV_FORMATS, check_layer, check_package, rotate_into_pages
from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BackendRequest,
    KVPageFormat,
    LayerKV,
    page_format_of,
)
from quire.attention.kv_format import KVFormat
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.transfers import DeviceLink

HEAD_DIMS = (64, 128, 256)

WORKSPACE_BYTES = 128 << 20
"""The bytes of memory for partial results of split contexts, as FlashInfer's documentation
recommends. All layers share the memory, since their launches run one after the other."""


@dataclass(frozen=True, slots=True)
class _PlanKey:
    """Layers with equal keys share a plan."""

    group: int
    spec: AttentionSpec
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _PageTable:
    """The blocks of a step's sequences, one sequence after the other."""

    #: [S + 1] int32 on the host, the index of each sequence's first block in `indices`.
    indptr: torch.Tensor
    #: The block ids, int32 on the device.
    indices: torch.Tensor
    #: [S] int32 on the host, the number of tokens in each sequence's last block.
    last_lens: torch.Tensor


class FlashInferAttention(AttentionBackend):
    """Attention by FlashInfer. The batch must not change between `plan` and the last `run`."""

    package = "flashinfer-python"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """Raises ConfigurationError if the package is missing, or for batch_invariant."""
        advice = "pip install flashinfer-python"
        check_package("flashinfer", "flashinfer", advice, batch_invariant=batch_invariant)
        self._layers: tuple[tuple[_PlanKey, torch.Tensor], ...] = ()
        self._wrappers: dict[_PlanKey, Any] = {}
        self._slots: list[torch.Tensor] = []
        self._link = DeviceLink(torch.device("cpu"))
        self._planned: torch.cuda.Event | None = None
        self._num_tokens = 0

    @classmethod
    def create(cls, request: BackendRequest) -> AttentionBackend:
        return cls(batch_invariant=request.batch_invariant)

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, kv_format: KVFormat) -> KVPageFormat:
        lacking = None
        if spec.head_dim not in HEAD_DIMS:
            lacking = f"heads of {spec.head_dim} (of {', '.join(map(str, HEAD_DIMS))} it has)"
        elif spec.window is not None and not spec.causal:
            lacking = "windows that look ahead"
        check_layer("flashinfer", spec, lacking)
        return page_format_of(spec, block_size, kv_format, KV_FORMATS)

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        # Imported here because the package is slow to load, and optional.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        device = layers[0].pages.device
        self._link = DeviceLink(device)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        bound = []
        for spec, layer in zip(specs, layers, strict=True):
            form = layer.format
            shape = (-1, 2, spec.num_kv_heads, form.block_size, spec.head_dim)
            pages = layer.pages.view(form.dtype).view(shape)
            bound.append((_PlanKey(layer.group, spec, form.block_size, form.dtype), pages))
        self._layers = tuple(bound)
        self._wrappers = {
            key: BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            for key in dict.fromkeys(key for key, _ in bound)
        }

    def plan(self, batch: AttentionBatch) -> None:
        """Waits until the previous step's plan is on the device, since the two plans use the same
        host buffers. The previous step's attention may still run."""
        if self._planned is not None:
            self._planned.synchronize()
        self._num_tokens = sum(batch.query_lens_list)
        self._slots = [group.slot_mapping for group in batch.groups]
        query_start = _starts(batch.query_lens_list)
        for key, wrapper in self._wrappers.items():
            table = self._page_table(batch, key)
            spec = key.spec
            wrapper.plan(
                query_start,
                table.indptr,
                table.indices,
                table.last_lens,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                key.block_size,
                causal=spec.causal,
                sm_scale=spec.scale,
                window_left=-1 if spec.window is None else spec.window - 1,
                logits_soft_cap=spec.soft_cap,
                q_data_type=key.dtype,
                kv_data_type=key.dtype,
            )
        if self._link.device.type == "cuda":
            self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._planned.record()

    def _page_table(self, batch: AttentionBatch, key: _PlanKey) -> _PageTable:
        """The blocks that the step's queries see. Blocks before all windows are left out because
        they may already be freed."""
        contexts = np.array(batch.context_lens_list, np.int64)
        first_block = np.zeros_like(contexts)
        if key.spec.window is not None:
            first_query = contexts - np.array(batch.query_lens_list, np.int64)
            first_block = np.maximum(first_query - key.spec.window + 1, 0) // key.block_size
        counts = -(-contexts // key.block_size) - first_block
        starts = _starts(counts)
        rows = np.array(batch.rows_list, np.int64)
        shifts = first_block - starts[:-1].numpy()
        row, shift, count = self._link.upload(np.stack((rows, shifts, counts))).unbind()
        total = int(starts[-1])
        sequence = torch.repeat_interleave(count, output_size=total)
        places = torch.arange(total, device=count.device) + shift[sequence]
        indices = batch.groups[key.group].block_tables[row[sequence], places]
        last_lens = ((contexts - 1) % key.block_size + 1).astype(np.int32)
        return _PageTable(starts, indices, torch.from_numpy(last_lens))

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        key, pages = self._layers[layer]
        assert inputs.q.shape[0] == self._num_tokens, "run serves the step that was planned"
        q = rotate_into_pages(inputs, pages, self._slots[key.group])
        out: torch.Tensor = self._wrappers[key].run(q, pages, out=torch.empty_like(q))
        return out


def _starts(counts: list[int] | npt.NDArray[np.int64]) -> torch.Tensor:
    """[len(counts) + 1] int32 on the host: 0 and the running sums."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)
