"""Windows, sinks, soft caps, grouped heads and holes together: every backend against float64.

A sequence is computed in chunks and then token by token, beside another that only decodes; K and V
are written by the backend itself. Before each step all table entries that no query's window
reaches are filled with ids that can't be read: holes (-1), and 2^30.

Tolerances: fp32, as in the backends' own tests: 2e-6 for outputs that are means of normals, 5e-6
where exponentials are powers of two (Triton).
"""

import itertools
import random

import pytest
import torch
from tests.attention.native import NativeStep
from tests.attention.paged import PagedStep, make_spec

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.step import HOLE_BLOCK

UNREADABLE = (HOLE_BLOCK, 2**30)
WINDOWS, SINKS, CAPS, GROUPS = (None, 1, 7, 40), (False, True), (None, 4.0), (1, 3, 8)
COMBINATIONS = list(itertools.product(WINDOWS, SINKS, CAPS, GROUPS))
CHUNKS = (21, 1, 33, 1, 9)


def drive(make_step, combination, seed):
    """Yields (output, expected) of each step, both [T, Hq, D]."""
    window, has_sinks, cap, group = combination
    rng = random.Random(seed)
    size, num_kv_heads, dim = rng.choice([8, 16, 64]), rng.choice([1, 2]), rng.choice([16, 24, 40])
    spec = make_spec(
        group * num_kv_heads, num_kv_heads, dim, window=window, has_sinks=has_sinks, soft_cap=cap
    )
    start, other = rng.randint(1, 70), rng.randint(50, 90)
    last = start + sum(CHUNKS)
    step = make_step((spec,), [other + len(CHUNKS), last], block_size=size, seed=seed)
    step.fill([other, start])
    for number, count in enumerate(CHUNKS):
        query_lens, contexts = [1, count], [other + number + 1, start + count]
        batch = step.batch(query_lens, contexts)
        tables = batch.groups[0].block_tables
        for row, context, queries in zip(batch.rows_list, contexts, query_lens, strict=True):
            passed = 0 if window is None else max(0, context - queries - window + 1) // size
            tables[row, :passed] = UNREADABLE[number % 2]
        step.backend.plan(batch)
        out = step.backend.run(0, step.inputs(0, query_lens, contexts))
        yield out.double(), step.expected(0, query_lens, contexts)
        start += count


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["native", "torch"])
def test_cpu_backends_match_the_reference(best, name, combination):
    def make_step(*arguments, **options):
        if name == "torch":
            return PagedStep(TorchPagedAttention(), *arguments, **options)
        return NativeStep(CpuPagedAttention(best), *arguments, **options)

    for out, expected in drive(make_step, combination, COMBINATIONS.index(combination)):
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 7, 40, 200])
@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("name", ["native", "torch"])
def test_queries_of_contents_see_all_of_them(best, name, cap, window):
    """Two chunks and a decoding row, in layers of both kinds; contents over edges of tiles."""
    specs = tuple(
        make_spec(4, 2, 24, window=window, soft_cap=cap, sees_ahead=x) for x in (True, False)
    )
    contents = (range(3, 4), range(10, 60), range(60, 61), range(70, 330), range(331, 333))
    kind, backend = (
        (PagedStep, TorchPagedAttention())
        if name == "torch"
        else (NativeStep, CpuPagedAttention(best))
    )
    step = kind(backend, specs, [341, 340, 65], contents=contents, block_size=8)
    step.fill([340, 65, 0])
    query_lens = [1, 275, 65]
    for layer, out in enumerate(step.run_all(query_lens)):
        expected = step.expected(layer, query_lens)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("cap", "window"), [(None, None), (4.0, 7), (None, 40)])
def test_queries_of_contents_see_all_of_them_in_triton(cap, window, batch_invariant, monkeypatch):
    pytest.importorskip("triton")
    from tests.attention.triton_step import TritonStep, torch_write

    from quire.attention import triton_paged

    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)
    specs = tuple(
        make_spec(4, 2, 24, window=window, soft_cap=cap, sees_ahead=x) for x in (True, False)
    )
    contents = (range(3, 4), range(10, 30), range(40, 90), range(91, 93))
    backend = triton_paged.TritonPagedAttention(batch_invariant=batch_invariant)
    step = TritonStep(backend, specs, [96, 93, 30], contents=contents, block_size=8)
    step.fill([95, 40, 10])
    query_lens = [1, 53, 20]
    for layer, out in enumerate(step.run_all(query_lens)):
        expected = step.expected(layer, query_lens)
        torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)


def test_triton_attends_a_content_to_the_bit_in_any_step(monkeypatch):
    """Alone, and beside others whose tiles it shares no key with, batch-invariant. The content is
    longer than all parts of a window's keys may be."""
    pytest.importorskip("triton")
    from tests.attention.triton_step import TritonStep, torch_write

    from quire.attention import triton_paged, triton_plan

    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)
    monkeypatch.setattr(triton_plan, "MIN_UNIFORM_CHUNK_TOKENS", 16)
    spec = make_spec(2, 1, 16, window=9, sees_ahead=True)
    backend = triton_paged.TritonPagedAttention(batch_invariant=True)
    step = TritonStep(backend, (spec,), [3, 80], contents=(range(20, 79),), block_size=8)
    step.fill([2, 20])
    found = []
    for order in ((0, 1), (1,)):
        step.backend.plan(step.batch([1, 60], order=order))
        found.append(step.backend.run(0, step.inputs(0, [1, 60], order=order))[-60:])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    expected = step.expected(0, [1, 60])[-60:]
    torch.testing.assert_close(found[0].double(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(
    ("combination", "batch_invariant"),
    [(combination, index % 2 == 1) for index, combination in enumerate(COMBINATIONS[1::5])],
)
def test_triton(combination, batch_invariant, monkeypatch):
    """Fewer: the interpreter is slow."""
    pytest.importorskip("triton")
    from tests.attention.triton_step import TritonStep, torch_write

    from quire.attention import triton_paged

    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)

    def make_step(*arguments, **options):
        backend = triton_paged.TritonPagedAttention(batch_invariant=batch_invariant)
        return TritonStep(backend, *arguments, **options)

    for out, expected in drive(make_step, combination, COMBINATIONS.index(combination)):
        torch.testing.assert_close(out, expected, atol=5e-6, rtol=5e-6)
