"""Attention by FlashAttention-3 (arXiv:2407.08608), an optional package for NVIDIA's Hopper GPUs.

It is chosen by name only: attention_backend="flash_attn3". A kernel of quire norms and rotates q
and k and writes K and V. Then one call of `flash_attn_with_kvcache` attends decoding rows and
chunks of prompts together. A page is [2, Hkv, B, D]; the package gets views [N, B, Hkv, D] of K and
of V in all pages, which need not be contiguous.

The package reads keys before a window, and masks them. So `plan` makes page tables of the step's
sequences without the blocks before the window, which may be freed; positions count only from a
sequence's end. If all sequences decode, `plan` and `run` read only tensors, so these steps can be
captured. Mixed steps are launched kernel by kernel.

`page_format` refuses fp32, int8 and fp8 pages, sinks, latent layers, V heads of another size than K
heads, and head sizes above 256. The package splits long contexts differently in different batches,
so batch_invariant is refused, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs

MAX_HEAD_DIM = 256
_NAME, _MODULE = "flash_attn3", "flash_attn_interface"
_ADVICE = "build it from the folder hopper of github.com/Dao-AILab/flash-attention"


@dataclass(frozen=True, slots=True)
class _TableKey:
    """Layers with equal keys share a step's page table."""

    group: int
    block_size: int
    #: As in `AttentionSpec`.
    window: int | None


@dataclass(frozen=True, slots=True)
class _PagedLayer:
    """A layer and its pages."""

    spec: AttentionSpec
    key: _TableKey
    #: [N, 2, Hkv, B, D], any distance from page to page.
    pages: torch.Tensor


class FlashAttention3(AttentionBackend):
    """Attention by FlashAttention-3. The batch must not change from `plan` to the last `run`."""

    serves_graphs = True
    package = "flash_attn_3"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """Raises ConfigurationError if the package is missing, or for batch_invariant."""
        check_package(_NAME, _MODULE, _ADVICE, batch_invariant=batch_invariant)
        # Imported here because the package is slow to load, and optional.
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend: Callable[..., torch.Tensor] = flash_attn_with_kvcache
        self._layers: tuple[_PagedLayer, ...] = ()
        #: The page tables and the numbers of stored tokens that they have.
        self._tables: dict[_TableKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batch: AttentionBatch | None = None

    @classmethod
    def create(cls, request: BackendRequest) -> AttentionBackend:
        return cls(batch_invariant=request.batch_invariant)

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, kv_format: KVFormat) -> KVPageFormat:
        is_served = spec.head_dim <= MAX_HEAD_DIM and spec.head_dim % 8 == 0
        lacking = f"heads of {spec.head_dim} (multiples of 8 up to {MAX_HEAD_DIM} it has)"
        check_layer(_NAME, spec, None if is_served else lacking)
        return page_format_of(spec, block_size, kv_format, KV_FORMATS)

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        _check_device(layers[0].pages.device)
        bound = []
        for spec, layer in zip(specs, layers, strict=True):
            form = layer.format
            shape = (-1, 2, spec.num_kv_heads, form.block_size, spec.head_dim)
            pages = layer.pages.view(form.dtype).view(shape)
            key = _TableKey(layer.group, form.block_size, spec.window)
            bound.append(_PagedLayer(spec, key, pages))
        self._layers, self._tables = tuple(bound), {}

    def plan(self, batch: AttentionBatch) -> None:
        """Make the step's page tables by launches alone, which can be captured."""
        self._batch = batch
        keys = dict.fromkeys(bound.key for bound in self._layers)
        self._tables = {key: _page_table(batch, key) for key in keys}

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        bound, batch = self._layers[layer], self._batch
        assert batch is not None, "a step is planned before it is run"
        slots = batch.groups[bound.key.group].slot_mapping
        assert inputs.q.shape[0] == slots.shape[0], "run serves the step that was planned"
        q = rotate_into_pages(inputs, bound.pages, slots)
        # [N, Hkv, B, D] each -> [N, B, Hkv, D].
        keys, values = (pages.transpose(1, 2) for pages in bound.pages.unbind(1))
        spec, (table, lens) = bound.spec, self._tables[bound.key]
        before = -1 if spec.window is None else spec.window - 1
        return self._attend(
            q,
            keys,
            values,
            cache_seqlens=lens,
            page_table=table,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=max(batch.query_lens_list, default=1),  # a step of padding has none
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size=(before, 0 if spec.causal and before >= 0 else before),
            softcap=spec.soft_cap or 0.0,
        )


def _page_table(batch: AttentionBatch, key: _TableKey) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of the step's sequences from the first that a query sees, [S, most blocks] int32,
    and the numbers of tokens stored in them, [S] int32.

    Entries after a sequence's last block repeat it. Padding has block 0 and no tokens.
    """
    lens = batch.context_lens
    end = (lens + (key.block_size - 1)) // key.block_size
    first = torch.zeros_like(end)
    if key.window is not None:
        first_query = lens - batch.query_start.diff()
        first = (first_query - (key.window - 1)).clamp(min=0) // key.block_size
    tables = batch.groups[key.group].block_tables
    places = first[:, None] + torch.arange(tables.shape[1], device=tables.device)
    places = torch.minimum(places, end[:, None] - 1).clamp(min=0)
    table = tables[batch.rows[:, None], places].masked_fill(end[:, None] == 0, 0)
    return table, lens - first * key.block_size


def _check_device(device: torch.device) -> None:
    """Raises ConfigurationError if the package has no kernels for the GPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (8, 9):
        raise ConfigurationError(
            f"attention_backend='flash_attn3' serves GPUs of sm_80 to sm_90, but {device} is of"
            f" sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}; choose"
            " attention_backend='triton'"
        )
