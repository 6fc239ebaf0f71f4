"""Random paged pools and steps for the attention tests.

A `PagedStep` builds what the runtime builds: one block-major storage in which a block is one row of
bytes, the layers of its KV group side by side; block tables of blocks that lie anywhere, their rows
shuffled in a larger table; a step of decode rows and chunks. Everything that no sequence of the
step wrote is NaN, and table entries that may not be read are `POISON`.
"""

import random
from dataclasses import dataclass, field

import torch

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
from quire.kernels.attention_inputs import AttentionInputs

POISON = 10**9
"""A block id far outside every pool: gathering it raises."""

NUM_SPARE_ROWS = 3


def scatter_rows(tables, seed=0):
    """(rows, block_tables): the lists of block ids in distinct rows, out of order, of a table that
    has more rows and columns, all other entries `POISON`.
    """
    num_rows = len(tables) + NUM_SPARE_ROWS
    rows = random.Random(seed).sample(range(num_rows), len(tables))
    width = max(map(len, tables)) + 2
    block_tables = torch.full((num_rows, width), POISON, dtype=torch.int32)
    for row, ids in zip(rows, tables, strict=True):
        block_tables[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return rows, block_tables


def make_spec(num_heads=4, num_kv_heads=2, head_dim=64, **options):
    options.setdefault("scale", head_dim**-0.5)
    return AttentionSpec(num_heads, num_kv_heads, head_dim, **options)


def kv_of(dtype):
    """The KV format whose elements or codes have this dtype; a format is itself."""
    if isinstance(dtype, KVFormat):
        return dtype
    return next((f for f in (INT8, FP8) if f.keys.dtype == dtype), KVFormat.plain(dtype))


def make_layers(backend, specs, groups, num_blocks, block_size, dtype, padding_bytes=0):
    """(storage [N, page bytes], LayerKV for each spec). Groups share the storage as they share a
    pool: a block belongs to one group at a time. All bytes are 0xff, which is NaN in every dtype.
    """
    formats = [backend.page_format(spec, block_size, kv_of(dtype)) for spec in specs]
    offsets, used = [], {}
    for group, page_format in zip(groups, formats, strict=True):
        offsets.append(used.get(group, 0))
        used[group] = used.get(group, 0) + page_format.bytes_per_layer
    storage = torch.full((num_blocks, max(used.values()) + padding_bytes), 255, dtype=torch.uint8)
    layers = tuple(
        LayerKV(storage[:, offset : offset + f.bytes_per_layer], group, f)
        for offset, group, f in zip(offsets, groups, formats, strict=True)
    )
    return storage, layers


@dataclass
class PagedStep:
    """Sequences in a bound backend: dense K and V per layer, and block tables per group.

    `run(layer, query_lens)` computes the last query_lens[i] tokens of the first contexts[i].
    """

    backend: AttentionBackend
    specs: tuple[AttentionSpec, ...]
    contexts: list[int]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    groups: tuple[int, ...] = ()
    padding_bytes: int = 0
    seed: int = 0
    q_dtype: torch.dtype = torch.float32
    #: Positions [first, end) in any sequence whose queries see all of them.
    contents: tuple[range, ...] = ()
    storage: torch.Tensor = field(init=False)
    tables: list[list[list[int]]] = field(init=False)

    def __post_init__(self):
        self.groups = self.groups or (0,) * len(self.specs)
        num_groups = max(self.groups) + 1
        per_sequence = [-(-context // self.block_size) for context in self.contexts]
        ids = list(range(1, num_groups * sum(per_sequence) + 3))
        random.Random(self.seed).shuffle(ids)
        self.tables = [
            [[ids.pop() for _ in range(n)] for n in per_sequence] for _ in range(num_groups)
        ]
        num_blocks = num_groups * sum(per_sequence) + 3
        self.storage, self.layers = make_layers(
            self.backend, self.specs, self.groups, num_blocks, self.block_size, self.dtype,
            self.padding_bytes,
        )  # fmt: skip
        self.backend.bind(self.specs, self.layers)
        generator = torch.Generator().manual_seed(self.seed)
        self.q, self.k, self.v, self.sinks = [], [], [], []
        for spec in self.specs:
            q, kv = (spec.num_heads, spec.head_dim), (2, spec.num_kv_heads, spec.head_dim)
            self.q.append([self._random(generator, c, *q) for c in self.contexts])
            pairs = [self._random(generator, c, *kv) for c in self.contexts]
            self.k.append([p[:, 0] for p in pairs])
            size = spec.v_head_dim or spec.head_dim
            self.v.append([None if spec.value_dim else p[:, 1, :, :size] for p in pairs])
            sinks = torch.randn(spec.num_heads, generator=generator)
            self.sinks.append(sinks if spec.has_sinks else None)

    def share(self, sequences, num_tokens, in_blocks=True):
        """Let `sequences` begin with the same num_tokens stored tokens: those of their first; in
        the same blocks, or in copies of their own. num_tokens are whole blocks.
        """
        first, *others = sequences
        for i in others:
            for stored in (*self.k, *self.v):
                if stored[i] is not None:
                    stored[i][:num_tokens] = stored[first][:num_tokens]
            for tables in self.tables if in_blocks else ():
                num_blocks = num_tokens // self.block_size
                tables[i][:num_blocks] = tables[first][:num_blocks]

    def _random(self, generator, *shape):
        """Values that the KV dtype and the query dtype both represent."""
        values = torch.randn(*shape, generator=generator)
        return values.to(self.dtype).to(self.q_dtype)

    def batch(self, query_lens, contexts=None, order=None):
        """The AttentionBatch: rows of one token first must be the caller's order."""
        contexts = contexts or self.contexts
        order = order if order is not None else range(len(contexts))
        lens = [query_lens[i] for i in order]
        num_decodes = next((i for i, n in enumerate(lens) if n != 1), len(lens))
        starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        context_list = [contexts[i] for i in order]
        groups = [self._group(g, query_lens, contexts, order) for g in range(len(self.tables))]
        rows = groups[0][0]
        ends = None
        if self.contents:
            ends = torch.cat([self.ends(query_lens[i], contexts[i]) for i in order])
        return AttentionBatch(
            query_start=starts,
            context_lens=torch.tensor(context_list, dtype=torch.int32),
            rows=torch.tensor(rows),
            query_lens_list=lens,
            context_lens_list=context_list,
            rows_list=rows,
            num_decodes=num_decodes,
            groups=tuple(group for _, group in groups),
            visible_ends=ends,
            visible_ends_list=None if ends is None else ends.tolist(),
        )

    def ends(self, num_queries, context):
        """[num_queries] int32, the position behind what each of the last queries sees."""
        positions = range(context - num_queries, context)
        stops = [next((c.stop for c in self.contents if p in c), p + 1) for p in positions]
        assert max(stops) == context, "contents are computed whole"
        return torch.tensor(stops, dtype=torch.int32)

    def _group(self, group, query_lens, contexts, order):
        """(rows, GroupBatch); the rows are the same for every group."""
        size = self.block_size
        tables = [self.tables[group][i][: -(-contexts[i] // size)] for i in order]
        slots = [
            table[position // size] * size + position % size
            for table, i in zip(tables, order, strict=True)
            for position in range(contexts[i] - query_lens[i], contexts[i])
        ]
        rows, block_tables = scatter_rows(tables, self.seed)
        return rows, GroupBatch(block_tables, torch.tensor(slots))

    def inputs(self, layer, query_lens, contexts=None, order=None):
        """The inputs of a layer in the step, without a rotation."""
        contexts = contexts or self.contexts
        order = order if order is not None else range(len(contexts))
        spans = [(i, slice(contexts[i] - query_lens[i], contexts[i])) for i in order]
        q, k = (torch.cat([x[layer][i][s] for i, s in spans]) for x in (self.q, self.k))
        is_latent = self.specs[layer].value_dim is not None
        v = None if is_latent else torch.cat([self.v[layer][i][s] for i, s in spans])
        return AttentionInputs(q, k, v, self.sinks[layer])

    def fill(self, contexts):
        """Store the first contexts[i] tokens of each sequence, by the documented page layout."""
        for layer, spec, k, v in zip(self.layers, self.specs, self.k, self.v, strict=True):
            num_parts = 1 if spec.value_dim else 2
            shape = (num_parts, self.block_size, spec.num_kv_heads, spec.head_dim)
            for i, context in enumerate(contexts):
                for number in range(-(-context // self.block_size)):
                    block = self.tables[layer.group][i][number]
                    page = layer.pages[block].view(self.dtype).view(shape)
                    first = number * self.block_size
                    count = min(self.block_size, context - first)
                    page[0, :count] = k[i][first : first + count]
                    if v[i] is not None:
                        page[1, :count] = spec.with_zeros(v[i][first : first + count])

    def run_all(self, query_lens, contexts=None, order=None):
        """Plan once and run every layer: the list of their outputs."""
        self.backend.plan(self.batch(query_lens, contexts, order))
        return [
            self.backend.run(layer, self.inputs(layer, query_lens, contexts, order))
            for layer in range(len(self.specs))
        ]

    def expected(self, layer, query_lens, contexts=None):
        """What the oracle computes, float64."""
        contexts = contexts or self.contexts
        rows = range(len(contexts))
        return attend_sequences(
            self.specs[layer],
            [self.q[layer][i][contexts[i] - query_lens[i] : contexts[i]] for i in rows],
            [self.k[layer][i][: contexts[i]] for i in rows],
            [v if v is None else v[: contexts[i]] for i, v in enumerate(self.v[layer])],
            self.sinks[layer],
            [self.ends(query_lens[i], contexts[i]) for i in rows],
        )[0]

    def check(self, query_lens, tolerance=2e-6):
        """Fill all but the step's tokens, run the step, compare every layer with the oracle."""
        self.fill([c - n for c, n in zip(self.contexts, query_lens, strict=True)])
        results = self.run_all(query_lens)
        for layer, out in enumerate(results):
            expected = self.expected(layer, query_lens)
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        return results
