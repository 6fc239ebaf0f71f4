"""Attention over the paged KV cache by Triton kernels.

The kernels read keys and values from their blocks. A layer's page is [2, Hkv, B, D], K then V, in
the KV dtype, so a KV head's K or V in a block is one contiguous range. `run` launches two kernels.
The first norms and rotates q and k, and writes K and V. The second computes attention for the items
of the step's work list, and merges the partial results of tokens whose keys were divided among
several programs. Layers that see the same keys with heads of the same shape share a step's work
list.

A step that is captured as a CUDA graph launches fixed grids, whose programs take items of a list
whose length the device reads. If all sequences decode, the device makes that list, too. The list of
a mixed step is made by the host, in words that are sent with the step's numbers (`write_plan`).

In mixed steps, sequences that decode have a list and a launch of their own, with the tiles of steps
that only decode. So the bits of their attention depend only on their own context, while their parts
fit `triton_plan.MAX_PART_BYTES`. With
`batch_invariant` this holds for all rows of all steps, however prompts are split into chunks, since
one kernel of one shape serves all rows (`uniform` in
`kernels/triton/attention/paged_attention.py`).

A latent layer's page is [B, D]. One kernel of one shape serves all steps of such a layer, so latent
layers are always batch-invariant (`latent_attention.py`). Their partial results are merged by a
third kernel.

Shapes as in `interface.py`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BackendRequest,
    KVPageFormat,
    LayerKV,
    MixedSize,
    PlanVariant,
    page_format_of,
)
from quire.attention.kv_format import KVFormat
from quire.attention.triton_plan import (
    DeviceLimits,
    chunk_rule,
    decode_shape,
    host_work,
    latent_shape,
    mixed_shapes,
    num_resident,
    padding_items,
    uniform_shape,
)
from quire.attention.triton_plan_words import ListBounds, PlanLayout, PlannedList, in_turns
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.transfers import DeviceLink
from quire.kernels.triton.attention.decode_work import ChunkRule, decode_work
from quire.kernels.triton.attention.latent_attention import latent_attention
from quire.kernels.triton.attention.latent_write import latent_write
from quire.kernels.triton.attention.merge_parts import merge_parts
from quire.kernels.triton.attention.paged_attention import AttendShape, AttendWork, paged_attention
from quire.kernels.triton.attention.quantized_kv import CODE_DTYPES, KVPages
from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write

KV_FORMATS = ("float32", "bfloat16", "float16", *CODE_DTYPES)

MAX_HEAD_DIM = 256
"""The largest head size for which tiles of queries, outputs, K and V fit a program."""

MAX_VALUE_DIM, MAX_LATENT_REST = 512, 64
"""Maximum elements of a latent layer's value, and of the rest of its key after the value."""

MERGING_PROGRAMS = 32
"""The number of programs of one warp that a processor runs at a time."""


@dataclass(frozen=True, slots=True)
class _BoundLayer:
    """A layer with its pages and the tile shapes of its kernels."""

    spec: AttentionSpec
    group: int
    pages: KVPages
    #: The shape for steps in which all sequences decode.
    decode: AttendShape
    #: The shapes for other steps, ordered by the number of rows of their tiles.
    mixed: tuple[AttendShape, ...]

    @property
    def key(self) -> "_WorkKey":
        spec = self.spec
        return _WorkKey(
            (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim),
            spec.window,
            spec.causal,
            spec.sees_ahead,
            self.pages.numbers.dtype,
        )

    @property
    def splits_steps(self) -> bool:
        """Whether decoding sequences of mixed steps have another shape than the others."""
        return self.decode not in self.mixed

    def launches(self, rows: int) -> tuple[int | None, ...]:
        """`_StepWork.rows` of each launch of a mixed step whose other sequences have tiles of
        `rows` rows."""
        return (None, rows) if self.splits_steps else (rows,)

    def mixed_shape(self, longest: int) -> AttendShape:
        """The shape for a mixed step in which a sequence computes up to `longest` tokens."""
        wanted = longest * (self.spec.num_heads // self.spec.num_kv_heads)
        return next((shape for shape in self.mixed if shape.rows >= wanted), self.mixed[-1])

    def shape_of(self, rows: int | None) -> AttendShape:
        """The shape for mixed steps with tiles of `rows` rows; None: the shape for decoding."""
        return self.decode if rows is None else next(s for s in self.mixed if s.rows == rows)


@dataclass(frozen=True, slots=True)
class _WorkKey:
    """The properties on which a work list depends. Layers with an equal `_WorkKey` share one."""

    heads: tuple[int, int, int, int | None]
    window: int | None
    causal: bool
    sees_ahead: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _StepWork:
    """A work list of a step, and how it is launched."""

    #: The number of rows of the tile shape to use; None means the shape for decoding.
    rows: int | None
    work: AttendWork
    #: The number of tokens in `work.merges` that are set, [1] int32; None if all are.
    num_merges: torch.Tensor | None = None
    #: The number of programs for each head that merge, if `num_merges` is not None.
    num_merging: int | None = None


class TritonPagedAttention(AttentionBackend):
    """Attention by Triton. The batch must not change between `plan` and the step's last `run`."""

    serves_graphs = True
    serves_sight_ahead = True
    serves_mixed_graphs = True

    def __init__(self, *, batch_invariant: bool = False) -> None:
        #: Whether the uniform kernel attends all rows.
        self.is_batch_invariant = batch_invariant
        self._layers: tuple[_BoundLayer, ...] = ()
        #: A layer of each kind. Layers of a kind share their work lists.
        self._kinds: dict[_WorkKey, _BoundLayer] = {}
        self._layouts: dict[MixedSize, PlanLayout] = {}
        #: The launches of each kind of layers in this step.
        self._work: dict[_WorkKey, tuple[_StepWork, ...]] = {}
        self._batch: AttentionBatch | None = None
        self._link = DeviceLink(torch.device("cpu"))
        self._limits = DeviceLimits.of(torch.device("cpu"))

    @classmethod
    def create(cls, request: BackendRequest) -> AttentionBackend:
        return cls(batch_invariant=request.batch_invariant)

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, kv_format: KVFormat) -> KVPageFormat:
        if spec.value_dim is not None:
            _check_latent(spec, spec.value_dim, kv_format)
        elif spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
            raise ConfigurationError(
                f"head_dim={spec.head_dim} can't be served by the Triton kernels, which need a "
                f"multiple of 8 up to {MAX_HEAD_DIM}; device='cpu' with kernels='auto' computes it"
            )
        return page_format_of(spec, block_size, kv_format, KV_FORMATS)

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        device = layers[0].pages.device
        self._link, self._limits = DeviceLink(device), DeviceLimits.of(device)
        self._layers = tuple(map(self._bound, specs, layers))
        self._kinds = {bound.key: bound for bound in self._layers}
        self._work, self._layouts = {}, {}

    def _bound(self, spec: AttentionSpec, layer: LayerKV) -> _BoundLayer:
        block_size, dtype = layer.format.block_size, layer.format.dtype
        pages = kv_pages(spec, layer)
        if self.is_batch_invariant or spec.value_dim is not None:
            choose = uniform_shape if spec.value_dim is None else latent_shape
            shape = choose(spec, block_size, dtype, self._limits)
            return _BoundLayer(spec, layer.group, pages, shape, (shape,))
        decode = decode_shape(spec, block_size, dtype, self._limits)
        mixed = mixed_shapes(spec, block_size, dtype, self._limits)
        return _BoundLayer(spec, layer.group, pages, decode, mixed)

    def plan(self, batch: AttentionBatch) -> None:
        """Make the step's work lists.

        If all sequences decode, or the host has planned the step, this only launches kernels, so
        that it can be captured.
        """
        self._batch = batch
        self._work = {}  # the work of the previous step is freed first
        if batch.mixed is not None:
            layout = self._layout(batch.mixed.size)
            lists = layout.open(batch.mixed.words, torch.int32)
            found = zip(lists, layout.bounds, strict=True)
            for (key, bound), rows in zip(self._kinds.items(), batch.mixed.variant, strict=True):
                launches = bound.launches(rows)
                given = [next(found) for _ in launches]
                self._work[key] = self._planned(bound, batch.mixed.size, launches, given)
            return
        is_decode = batch.num_decodes == len(batch.query_lens_list)
        plan = self._plan_decode if is_decode else self._plan_mixed
        for key, bound in self._kinds.items():
            self._work[key] = plan(bound, batch)

    def most_plan_variants(self, specs: Iterable[AttentionSpec]) -> int:
        if self.is_batch_invariant:
            return 1
        # A kind has at most two shapes, and `mixed_shape` chooses one by this ratio.
        ratios = {spec.num_heads // spec.num_kv_heads for spec in specs if spec.value_dim is None}
        return 1 + len(ratios)

    def num_plan_words(self, size: MixedSize) -> int:
        return self._layout(size).num_words

    def write_plan(
        self, batch: AttentionBatch, size: MixedSize, words: npt.NDArray[np.int64]
    ) -> tuple[PlanVariant, int]:
        lists, variant = [], []
        num_tokens = sum(batch.query_lens_list)
        for bound in self._kinds.values():
            parts = _parts_of_step(bound, batch)
            for shape, sequences in parts:
                work = host_work(batch, shape, chunk_rule(shape, size.max_context), sequences)
                items = work.items
                if shape is parts[-1][0]:
                    padding = padding_items(shape, num_tokens, size.num_tokens)
                    items = np.concatenate((items, padding))
                per_round = max(1, self._num_resident(bound, shape) // shape.num_head_tiles)
                lists.append(replace(work, items=in_turns(items, per_round)))
            variant.append(parts[-1][0].rows)
        return tuple(variant), self._layout(size).write(lists, num_tokens, words)

    def _layout(self, size: MixedSize) -> PlanLayout:
        if size not in self._layouts:
            bounds: list[ListBounds] = []
            for bound in self._kinds.values():
                if bound.splits_steps:
                    bounds.append(ListBounds.of_decodes(bound.decode, size))
                bounds.append(ListBounds.of(bound.mixed, size))
            self._layouts[size] = PlanLayout(tuple(bounds))
        return self._layouts[size]

    def _planned(
        self,
        bound: _BoundLayer,
        size: MixedSize,
        launches: tuple[int | None, ...],
        given: list[tuple[PlannedList[torch.Tensor], ListBounds]],
    ) -> tuple[_StepWork, ...]:
        """The work that the host has planned for a kind of layers, with the list and the bounds of
        each launch."""
        memory: tuple[torch.Tensor, torch.Tensor] | None = None
        works: list[_StepWork] = []
        for rows, (lists, bounds) in zip(launches, given, strict=True):
            shape = bound.shape_of(rows)
            rule = chunk_rule(shape, size.max_context)
            most = lists.items.shape[0] * shape.num_head_tiles
            num_programs = min(most, self._num_resident(bound, shape))
            if memory is None:  # one launch follows the other, so both write the same memory
                num_parts = max(bounds.num_parts for _, bounds in given)
                memory = _parts(shape, num_parts, num_programs, lists.items.device)
            items = lists.items, lists.num_items, lists.merges
            num_slots = bounds.num_parts // rule.parts_per_token
            work = _attend_work(shape, rule, items, num_programs, num_slots, memory)
            most_merging = self._limits.num_processors * MERGING_PROGRAMS // shape.num_heads
            num_merging = max(1, min(lists.merges.shape[0], most_merging))
            works.append(_StepWork(rows, work, lists.num_merges, num_merging))
        return tuple(works)

    def _num_resident(self, bound: _BoundLayer, shape: AttendShape) -> int:
        return num_resident(shape, bound.pages.numbers.dtype, self._limits)

    def _plan_decode(self, bound: _BoundLayer, batch: AttentionBatch) -> tuple[_StepWork, ...]:
        shape = bound.decode
        rule = chunk_rule(shape, self._max_context(bound, batch))
        lists = decode_work(batch.query_start, batch.context_lens, batch.rows, rule)
        num_items = lists[0].shape[0]
        num_programs = min(num_items * shape.num_head_tiles, self._num_resident(bound, shape))
        memory = _parts(shape, num_items, num_programs, lists[0].device)
        num_slots = num_items // rule.parts_per_token
        work = _attend_work(shape, rule, lists, num_programs, num_slots, memory)
        return (_StepWork(None, work),)

    def _plan_mixed(self, bound: _BoundLayer, batch: AttentionBatch) -> tuple[_StepWork, ...]:
        works: list[_StepWork] = []
        for shape, sequences in _parts_of_step(bound, batch):
            if not batch.query_lens_list[sequences]:
                continue
            is_decode = bound.splits_steps and shape is bound.decode
            sees_ahead = bound.spec.sees_ahead and not is_decode
            rule = chunk_rule(shape, self._max_context(bound, batch))
            host = host_work(batch, shape, rule, sequences, sees_ahead=sees_ahead)
            items, merges = self._link.upload(host.items), self._link.upload(host.merges)
            num_items = items.shape[0]
            count = torch.full((1,), num_items, dtype=torch.int32, device=items.device)
            num_programs = num_items * shape.num_head_tiles
            if shape.value_dim is not None:  # each program has memory for its own partial results
                num_programs = min(num_programs, self._num_resident(bound, shape))
            memory = _parts(shape, host.num_parts, num_programs, items.device)
            num_slots = host.num_parts // rule.parts_per_token
            lists = items, count, merges
            work = _attend_work(shape, rule, lists, num_programs, num_slots, memory)
            if sees_ahead:
                work = replace(work, visible_ends=batch.visible_ends)
            works.append(_StepWork(None if is_decode else shape.rows, work))
        return tuple(works)

    def _max_context(self, bound: _BoundLayer, batch: AttentionBatch) -> int:
        return batch.groups[bound.group].block_tables.shape[1] * bound.decode.block_size

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        bound, batch = self._layers[layer], self._batch
        q, k, v, sinks, rotation = inputs
        assert batch is not None, "a step is planned before it is run"
        assert (sinks is not None) == bound.spec.has_sinks
        group = batch.groups[bound.group]
        assert q.shape[0] == group.slot_mapping.shape[0], "run serves the planned step"
        pages, dtype = bound.pages, q.dtype
        slots, is_latent = group.slot_mapping, bound.spec.value_dim is not None
        if is_latent:
            assert rotation is None, "models of latent layers turn q and k themselves"
            if k is not None:
                latent_write(k, pages.numbers, slots)
        else:
            v = None if v is None else bound.spec.with_zeros(v)
            q = rotate_and_write(q, k, v, rotation, pages, slots, out=_narrow(q, pages))
        if q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty((*q.shape[:2], bound.decode.output_dim), dtype=dtype, device=q.device)
        for step in self._work[bound.key]:
            shape, work = bound.shape_of(step.rows), step.work
            if not is_latent:
                paged_attention(q, pages, group.block_tables, work, sinks, out, None, shape)
                continue
            latent_attention(q, pages.numbers, group.block_tables, work, sinks, out, shape)
            if len(work.merges):
                parts, scales = _by_head(work.parts, shape), _by_head(work.scales, shape)
                counts = step.num_merges, step.num_merging
                merge_parts(work.merges, parts, scales, sinks, out, None, *counts)
        return out[..., : bound.spec.output_dim]


def _narrow(q: torch.Tensor, pages: KVPages) -> torch.Tensor | None:
    """A bf16 buffer for fp32 queries if the pages store int8 or fp8 codes; else None."""
    if pages.scales is None or q.dtype != torch.float32:
        return None
    return torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)


def _parts_of_step(bound: _BoundLayer, batch: AttentionBatch) -> list[tuple[AttendShape, slice]]:
    """The shapes of a mixed step, with the sequences that each attends; the last attends those that
    don't decode."""
    mixed = bound.mixed_shape(max(batch.query_lens_list))
    if not bound.splits_steps:
        return [(mixed, slice(None))]
    count = batch.num_decodes
    return [(bound.decode, slice(count)), (mixed, slice(count, None))]


def _attend_work(
    shape: AttendShape,
    rule: ChunkRule,
    lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_programs: int,
    num_slots: int,
    memory: tuple[torch.Tensor, torch.Tensor],
) -> AttendWork:
    """The work of a launch. `lists` are the items, the number of items that are set, [1], and the
    tokens to merge, of which num_slots may have parts. `memory` is that of `_parts`."""
    items, count, merges = lists
    counters = None
    if shape.value_dim is None:
        counters = merges.new_zeros((num_slots, shape.num_head_tiles))
    return AttendWork(
        items,
        count,
        num_programs,
        *memory,
        merges,
        counters,
        rule.parts_per_token,
        rule.chunk_tokens,
    )


def _parts(
    shape: AttendShape, num_parts: int, num_programs: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for partial outputs and their scales.

    It has a row for each part and head. For latent layers, scratch rows of the programs follow.
    """
    num_rows = num_parts * shape.num_heads
    if shape.value_dim is not None:
        num_rows += 2 * num_programs * shape.rows
    parts = torch.empty((num_rows, shape.output_dim), dtype=torch.float32, device=device)
    return parts, torch.empty((num_rows, 2), dtype=torch.float32, device=device)


def _by_head(rows: torch.Tensor, shape: AttendShape) -> torch.Tensor:
    """Memory of `_parts`, [rows, D] -> [parts, Hq, D], without the scratch rows at its end."""
    count = len(rows) // shape.num_heads
    return rows[: count * shape.num_heads].view(count, shape.num_heads, rows.shape[1])


def _check_latent(spec: AttentionSpec, value_dim: int, kv_format: KVFormat) -> None:
    """Raises ConfigurationError if the Triton kernels can't serve a latent layer."""
    if kv_format.name in CODE_DTYPES:
        raise ConfigurationError(
            f"the Triton kernels have no pages of {kv_format.name} for latent layers; choose"
            " kv_cache_dtype='auto'"
        )
    rest = spec.head_dim - value_dim
    if value_dim > MAX_VALUE_DIM or rest > MAX_LATENT_REST or spec.head_dim % 8:
        raise ConfigurationError(
            f"head_dim={spec.head_dim} with value_dim={value_dim} can't be served by the Triton"
            f" kernels; latent layers need a head_dim that is a multiple of 8, value_dim <="
            f" {MAX_VALUE_DIM}, and at most {MAX_LATENT_REST} elements behind the value;"
            " device='cpu' with kernels='auto' computes them"
        )


def kv_pages(spec: AttentionSpec, layer: LayerKV) -> KVPages:
    """Views of a layer's bytes: K and V, the scales of int8 or fp8 codes, or latent vectors."""
    block_size, kv_format = layer.format.block_size, layer.format.kv_format
    dtype = CODE_DTYPES.get(kv_format.name, layer.format.dtype)
    if spec.value_dim is not None:
        return KVPages(layer.pages.view(dtype).view(-1, block_size, spec.head_dim))
    page = (2, spec.num_kv_heads, block_size, spec.head_dim)
    if kv_format.name not in CODE_DTYPES:
        return KVPages(layer.pages.view(dtype).view(-1, *page))
    num_codes = math.prod(page)
    codes = layer.pages[:, :num_codes].view(dtype).view(-1, *page)
    scales = layer.pages[:, num_codes:].view(torch.int32)
    scales = scales.view(-1, spec.num_kv_heads, block_size)
    return KVPages(codes, scales, kv_format.rotates_keys)
