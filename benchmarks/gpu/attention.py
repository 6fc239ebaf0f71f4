"""Attention on the device: right for random steps of many shapes, and how fast.

Decode reads K and V of every context once: its floor is their bytes at the copy's bandwidth.
Prefill multiplies: its floor is 2 * heads * head size * pairs operations, for q k^T and again for
the values, at the rate of a large matrix product. Decoding latent layers reads little and
multiplies much: its floor is the larger of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.harness import Bench
from quire.attention.backends import select
from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    GroupBatch,
    LayerKV,
)
from quire.attention.kv_format import KVFormat
from quire.attention.quantized_kv import FP8, INT8
from quire.attention.reference import attend_sequences
from quire.attention.triton_paged import kv_pages
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.triton.attention.latent_write import latent_write
from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write

# ||out - reference|| / ||reference||: the kernels accumulate in fp32 and round once, to the dtype.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

CODED = (INT8, FP8)
DECODE_GOAL, PREFILL_GOAL, PREFILL_AIM = 0.85, 0.40, 0.55


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences, with the numbers of tokens written before and of queries in the step.

    kv_format: of the pages, if not the model's dtype.
    """

    name: str
    spec: AttentionSpec
    dtype: torch.dtype
    block_size: int
    befores: tuple[int, ...]
    queries: tuple[int, ...]
    kv_format: KVFormat | None = None

    @property
    def kv(self) -> KVFormat:
        """The format in which K and V are stored."""
        return self.kv_format or KVFormat.plain(self.dtype)


def heads(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)


def latents(num_heads: int, head_dim: int = 576, value_dim: int = 512) -> AttentionSpec:
    """The spec of a latent layer, by default that of DeepSeek-V2 and V3."""
    return AttentionSpec(num_heads, 1, head_dim, scale=head_dim**-0.5, value_dim=value_dim)


class PagedSequences:
    """One layer's pool on the device with random K and V in it, and the steps of its sequences.

    Blocks lie in random order; what nobody wrote is NaN.
    """

    def __init__(
        self, bench: Bench, case: Case, *, backend: str = "triton", batch_invariant: bool = False
    ) -> None:
        self.case = case
        self._device = bench.device
        self.backend: AttentionBackend = select(
            bench.device.type, backend, batch_invariant=batch_invariant
        )
        spec, size = case.spec, case.block_size
        form = self.backend.page_format(spec, size, case.kv)
        counts = [
            -(-(before + count) // size)
            for before, count in zip(case.befores, case.queries, strict=True)
        ]
        num_blocks = sum(counts) + 1
        storage = torch.full(
            (num_blocks, form.bytes_per_layer), 255, dtype=torch.uint8, device=self._device
        )
        self.storage = storage
        self.layer = LayerKV(storage, 0, form)
        self.backend.bind((spec,), (self.layer,))
        ids = torch.randperm(num_blocks)[: sum(counts)].to(torch.int32)
        self._tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
        for row, own in enumerate(ids.split(counts)):
            self._tables[row, : len(own)] = own
        self._device_tables = self._tables.to(self._device)

    def batch(self, befores: Sequence[int], queries: Sequence[int]) -> AttentionBatch:
        """The step in which each sequence computes `queries` tokens after `befores`."""
        size = self.case.block_size
        places = [
            torch.arange(before, before + count)
            for before, count in zip(befores, queries, strict=True)
        ]
        slots = [
            self._tables[row, place // size].long() * size + place % size
            for row, place in enumerate(places)
        ]
        contexts = [before + count for before, count in zip(befores, queries, strict=True)]
        starts = torch.tensor([0, *queries]).cumsum(0)
        decodes = [count == 1 for count in queries]
        num_decodes = decodes.index(False) if False in decodes else len(decodes)
        device = self._device
        return AttentionBatch(
            query_start=starts.to(device, torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            rows=torch.arange(len(contexts), device=device),
            query_lens_list=list(queries),
            context_lens_list=contexts,
            rows_list=list(range(len(contexts))),
            num_decodes=num_decodes,
            groups=(GroupBatch(self._device_tables, torch.cat(slots).to(device)),),
        )

    def qkv(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random, as three views of one fused projection."""
        spec = self.case.spec
        widths = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        shape = (num_tokens, sum(widths), spec.head_dim)
        q, k, v = torch.randn(shape, device=self._device).to(self.case.dtype).split(widths, dim=1)
        return q, k, v

    def run(
        self, befores: Sequence[int], queries: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """One step; its output, and copies of its q, k and v."""
        inputs = self.qkv(sum(queries))
        kept = tuple(part.clone() for part in inputs)
        self.backend.plan(self.batch(befores, queries))
        out = self.backend.run(0, AttentionInputs(*inputs))
        return out, (kept[0], kept[1], kept[2])


def attention_error(bench: Bench, case: Case) -> float:
    """The error of two steps on the device against the float64 oracle: one that writes the context,
    and one after it. Returns the larger error."""
    paged = PagedSequences(bench, case)
    no_tokens = [0] * len(case.befores)
    steps = [(no_tokens, case.befores), (case.befores, case.queries)]
    if not all(case.befores):
        steps = steps[1:]
    written: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in case.befores]
    worst = 0.0
    for befores, queries in steps:
        out, (q, k, v) = paged.run(befores, queries)
        parts = zip(written, k.split(list(queries)), v.split(list(queries)), strict=True)
        for own, keys, values in parts:
            own.append((case.kv.rounded_keys(keys), case.kv.values.rounded(values)))
        is_latent = case.spec.value_dim is not None
        expected, _ = attend_sequences(
            case.spec,
            q.split(list(queries)),
            [torch.cat([keys for keys, _ in own]) for own in written],
            [None if is_latent else torch.cat([values for _, values in own]) for own in written],
        )
        worst = max(worst, relative_error(out, expected))
    return worst


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where either has one."""
    expected = expected.double()
    scale = expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((found.double() - expected).norm() / scale)


def cases(bench: Bench) -> list[Case]:
    """Dtypes, block sizes, head sizes, groups, windows, caps; lengths that are no round numbers."""
    if bench.small:
        plain, fp32 = heads(4, 2, 16), torch.float32
        capped = replace(plain, window=7, soft_cap=5.0)
        return [
            Case("decode, 4/2 heads of 16, fp32", plain, fp32, 8, (11, 3), (1, 1)),
            Case("mixed, window 7, cap 5, fp32", capped, fp32, 8, (11, 5), (1, 3)),
            Case("mixed, latents, fp32", latents(3, 40, 32), fp32, 8, (11, 5), (1, 3)),
        ]
    befores, mixed = (1000, 17, 512, 333, 2050), (1, 1, 130, 7, 64)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    specs = {
        "32/8 heads of 128": heads(32, 8, 128),
        "16/8 heads of 128": heads(16, 8, 128),
        "14/2 heads of 80": heads(14, 2, 80),
        "6/1 heads of 96": heads(6, 1, 96),
        "8/8 heads of 64": heads(8, 8, 64),
        "8/4 heads of 256": heads(8, 4, 256),
        "16/4 heads of 128, window 100": replace(heads(16, 4, 128), window=100),
        "16/4 heads of 128, cap 20": replace(heads(16, 4, 128), soft_cap=20.0),
        "16 heads of latents": latents(16),
        "128 heads of latents": latents(128),
    }
    found = []
    for name, spec in specs.items():
        for dtype, block_size in ((bf16, 16), (fp32, 32)):
            label = f"{name}, {str(dtype)[6:]}, blocks of {block_size}"
            decode = (1,) * len(befores)
            found.append(Case(f"decode, {label}", spec, dtype, block_size, befores, decode))
            found.append(Case(f"mixed, {label}", spec, dtype, block_size, befores, mixed))
    plain = specs["32/8 heads of 128"]
    for block_size in (8, 64, 256, 2048):
        label = f"mixed, blocks of {block_size}"
        found.append(Case(label, plain, bf16, block_size, befores, mixed))
    found.append(Case("decode, fp16", plain, fp16, 16, befores, (1,) * len(befores)))
    for name, spec in specs.items():
        for kv in CODED if spec.value_dim is None else ():
            label = f"{name}, {kv.name} pages"
            decode = (1,) * len(befores)
            found.append(Case(f"decode, {label}", spec, bf16, 16, befores, decode, kv))
            found.append(Case(f"mixed, {label}", spec, bf16, 64, befores, mixed, kv))
    return found


class Worst:
    """The largest error of the cases of each pair of dtypes, of model and pages."""

    def __init__(self) -> None:
        self._found: dict[tuple[torch.dtype, str], tuple[float, str]] = {}

    def add(self, case: Case, error: float) -> None:
        kind = (case.dtype, case.kv.name)
        if not error <= self._found.get(kind, (-1.0, ""))[0]:
            self._found[kind] = (error, case.name)

    def report(self, bench: Bench) -> None:
        for (dtype, kv), (error, name) in self._found.items():
            pages = "" if kv == str(dtype)[6:] else f", {kv} pages"
            label = f"attention against float64, {str(dtype)[6:]}{pages}"
            bench.at_most(label, error, BOUNDS[dtype], note=f"worst: {name}", is_time=False)


def measure_attention(bench: Bench) -> None:
    """The two goals, and the same for a few other shapes."""
    roofline = bench.roofline()
    bench.add(
        "copy bandwidth", roofline.read_bytes_s / 1e9, "GB/s", note="reads and writes counted"
    )
    bench.add("matrix product", roofline.ops_s["bf16"] / 1e12, "TFLOP/s", note="bf16, 8192 cubed")
    num, context = (2, 12) if bench.small else (64, 8192)
    shapes = [heads(4, 2, 16)] if bench.small else [heads(32, 8, 128), heads(16, 8, 128)]
    for index, spec in enumerate(shapes):
        for block_size in (16, 64)[: 1 if index else 2]:
            _measure_decode(bench, spec, num, context, block_size, is_goal=index == 0)
        _measure_prefill(bench, spec, context, is_goal=index == 0)
    for spec in [latents(3, 40, 32)] if bench.small else [latents(16), latents(128)]:
        for count in (num,) if bench.small else (1, 16, num):
            _measure_latents(bench, spec, count, context)
    for kv in CODED:
        for spec in shapes[:1] if bench.small else (shapes[0], heads(64, 8, 64)):
            _measure_decode(bench, spec, num, context, 16, is_goal=False, kv=kv)
        _measure_prefill(bench, shapes[0], context, is_goal=False, kv=kv)
    if not bench.small:
        _measure_decode(bench, shapes[0], 1, 32_768, 16, is_goal=False, kv=INT8)
        _measure_decode(bench, shapes[0], 1, 32_768, 16, is_goal=False)
        _measure_decode(bench, shapes[0], 256, 600, 16, is_goal=False)


def _label(spec: AttentionSpec) -> str:
    return f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"


def _measure_decode(
    bench: Bench,
    spec: AttentionSpec,
    num: int,
    context: int,
    block_size: int,
    *,
    is_goal: bool,
    kv: KVFormat | None = None,
) -> None:
    befores, queries = (context - 1,) * num, (1,) * num
    paged = PagedSequences(bench, Case("", spec, bench.dtype, block_size, befores, queries, kv))
    _fill(paged, befores)
    q, k, v = paged.qkv(num)
    paged.backend.plan(paged.batch(befores, queries))
    seconds = bench.time_graph_s(lambda: paged.backend.run(0, AttentionInputs(q, k, v)))
    # Scales included: a block has as many bytes for each of its tokens.
    num_bytes = num * context * paged.layer.format.bytes_per_layer // block_size
    share = num_bytes / seconds / bench.roofline().read_bytes_s
    name = (
        f"decode attention, {num} x {context}, {_label(spec)}, blocks of {block_size}{_pages(kv)}"
    )
    note = f"{seconds * 1e6:.0f} us, {num_bytes / seconds / 1e9:.0f} GB/s"
    if is_goal and block_size == 16:
        bench.at_least(name, share, DECODE_GOAL, "of copy bandwidth", note)
    else:
        bench.add(name, share, "of copy bandwidth", note=note)


def _measure_latents(bench: Bench, spec: AttentionSpec, num: int, context: int) -> None:
    """One decoding step."""
    befores, queries = (context - 1,) * num, (1,) * num
    paged = PagedSequences(bench, Case("", spec, bench.dtype, 16, befores, queries))
    _fill(paged, befores)
    q, k, v = paged.qkv(num)
    paged.backend.plan(paged.batch(befores, queries))
    seconds = bench.time_graph_s(lambda: paged.backend.run(0, AttentionInputs(q, k, v)))
    num_bytes = num * context * paged.layer.format.bytes_per_layer // 16
    ops = 2 * num * context * spec.num_heads * (spec.head_dim + spec.output_dim)
    roofline = bench.roofline()
    floor_s = max(num_bytes / roofline.read_bytes_s, ops / roofline.ops_s["bf16"])
    name = f"decode attention, {num} x {context}, {spec.num_heads} heads of latents"
    note = (
        f"{seconds * 1e6:.0f} us, {num_bytes / seconds / 1e9:.0f} GB/s,"
        f" {ops / seconds / 1e12:.0f} TFLOP/s"
    )
    bench.add(name, floor_s / seconds, "of its floor", note=note)


def _fill(paged: PagedSequences, befores: Sequence[int]) -> None:
    """Write the contexts, a few tokens of each sequence at a time."""
    spec = paged.case.spec
    pages = kv_pages(spec, paged.layer)
    size = max(1, 65_536 // len(befores))
    for first in range(0, befores[0], size):
        count = min(size, befores[0] - first)
        _, k, v = paged.qkv(count * len(befores))
        batch = paged.batch([first] * len(befores), [count] * len(befores))
        slots = batch.groups[0].slot_mapping
        if spec.value_dim is not None:
            latent_write(k, pages.numbers, slots)
            continue
        q = k.new_empty((len(k), spec.num_heads, spec.head_dim))
        rotate_and_write(q, k, v, None, pages, slots)


def _pages(kv: KVFormat | None) -> str:
    return "" if kv is None else f", {kv.name} pages"


def _measure_prefill(
    bench: Bench,
    spec: AttentionSpec,
    num_tokens: int,
    *,
    is_goal: bool,
    kv: KVFormat | None = None,
) -> None:
    paged = PagedSequences(bench, Case("", spec, bench.dtype, 16, (0,), (num_tokens,), kv))
    q, k, v = paged.qkv(num_tokens)
    paged.backend.plan(paged.batch((0,), (num_tokens,)))
    seconds = bench.time_s(lambda: paged.backend.run(0, AttentionInputs(q, k, v)))
    ops = 4 * spec.num_heads * spec.head_dim * num_tokens * (num_tokens + 1) / 2
    rate = ops / seconds
    share = rate / bench.roofline().ops_s["bf16"]
    name = f"prefill attention, {num_tokens} tokens, {_label(spec)}{_pages(kv)}"
    note = f"{seconds * 1e6:.0f} us, {rate / 1e12:.0f} TFLOP/s; aim {PREFILL_AIM:.0%}"
    if is_goal:
        bench.at_least(name, share, PREFILL_GOAL, "of the matrix rate", note)
    else:
        bench.add(name, share, "of the matrix rate", note=note)
