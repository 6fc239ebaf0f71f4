"""The FlashAttention-3 backend against the oracle, with a stand-in for the package.

The stand-in computes with torch what the docstring of `flash_attn_with_kvcache` says, and refuses
what the package's checks refuse. It reads all of a page table, as the package's tiles may.
"""

import inspect
import sys
import types
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from tests.attention.paged import POISON, kv_of, make_spec
from tests.attention.test_flashinfer_paged import HeadMajorStep

from quire.attention import flash_attn3_paged
from quire.attention.backends import default_backends, select
from quire.attention.flash_attn3_paged import FlashAttention3
from quire.attention.interface import AttentionBatch, AttentionSpec, GroupBatch
from quire.attention.reference import attend_dense
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles, Rotation, rotate

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16

OPTIONS = (
    "cache_seqlens",
    "page_table",
    "cu_seqlens_q",
    "max_seqlen_q",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
)


def flash_attn_with_kvcache(q, k_cache, v_cache, **options):
    """q [T, Hq, D], caches [N, B, Hkv, D] -> [T, Hq, D]. Query i of a sequence has the position
    i + seqlen_k - seqlen_q, and sees window_size[0] keys to its left and window_size[1] to its
    right; -1 means all."""
    assert set(options) == set(OPTIONS)
    page_table, cu_seqlens_q = options["page_table"], options["cu_seqlens_q"]
    cache_seqlens, causal = options["cache_seqlens"], options["causal"]
    for tensor in (cache_seqlens, page_table, cu_seqlens_q):
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (BFLOAT16, FLOAT16)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert k_cache.shape == v_cache.shape and k_cache.shape[2:] == (q.shape[1] // 2, q.shape[2])
    assert page_table.shape[0] == len(cache_seqlens) == len(cu_seqlens_q) - 1
    starts, left, right = cu_seqlens_q.tolist(), *options["window_size"]
    assert options["max_seqlen_q"] >= max(b - a for a, b in pairwise(starts))
    window = None if left < 0 else left + 1
    assert right == (0 if causal and left >= 0 else left)
    spec = AttentionSpec(
        q.shape[1], k_cache.shape[2], q.shape[2], options["softmax_scale"], window,
        options["softcap"] or None, causal=causal,
    )  # fmt: skip
    out = torch.zeros_like(q)
    for s, num_keys in enumerate(cache_seqlens.tolist()):
        # An entry that doesn't name a block raises, and NaN in keys before a window shows.
        k, v = (cache[page_table[s].long()].flatten(0, 1) for cache in (k_cache, v_cache))
        first, last = starts[s], starts[s + 1]
        if num_keys:
            out[first:last], _ = attend_dense(spec, q[first:last], k[:num_keys], v[:num_keys])
    return out


@pytest.fixture
def backend(monkeypatch):
    """Its class, on the stand-in."""
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = types.SimpleNamespace(name="flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return FlashAttention3


def make_step(backend, specs, contexts, **options):
    options = {"dtype": BFLOAT16, "q_dtype": BFLOAT16, "padding_bytes": 64, **options}
    return HeadMajorStep(backend(), tuple(specs), contexts, **options)


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize(
    ("contexts", "query_lens"),
    [([5, 16, 33], [1, 1, 1]), ([9, 20, 6], [1, 4, 6]), ([1], [1])],
)
def test_attends_to_what_is_stored(backend, contexts, query_lens, block_size):
    specs = [
        make_spec(),
        make_spec(num_heads=6, num_kv_heads=3, soft_cap=20.0),
        make_spec(window=7, scale=0.2),
        make_spec(causal=False),
        make_spec(causal=False, window=5),
    ]
    step = make_step(backend, specs, contexts, block_size=block_size, groups=(0, 1, 1, 0, 0))
    step.check(query_lens, tolerance=1e-2)


@pytest.mark.parametrize("window", [1, 7, 20])
def test_blocks_before_the_window_are_not_named(backend, window):
    """Such blocks are freed, and their entries may be any number."""
    step = make_step(backend, [make_spec(window=window)], [37, 12, 50], block_size=8)
    query_lens = [1, 2, 5]
    step.fill([c - n for c, n in zip(step.contexts, query_lens, strict=True)])
    expected = step.expected(0, query_lens)
    batch = step.batch(query_lens)
    for row, context, num_new in zip(batch.rows_list, step.contexts, query_lens, strict=True):
        batch.groups[0].block_tables[row, : max(0, context - num_new - window + 1) // 8] = -1
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


def test_a_decode_step_follows_its_tensors_and_not_its_lists(backend):
    """As it is replayed after the capture of padding, whose row of the table names no block."""
    step = make_step(backend, [make_spec(), make_spec(window=9)], [40, 17], groups=(0, 1))
    step.fill([39, 16])
    now = step.batch([1, 1])
    row = next(r for r in range(9) if r not in now.rows_list)
    zeros = torch.zeros(2, dtype=torch.int32)
    groups = tuple(
        GroupBatch(g.block_tables, torch.cat([g.slot_mapping, zeros.long() - 1]))
        for g in now.groups
    )
    assert all((g.block_tables[row] == POISON).all() for g in groups)
    padded = AttentionBatch(
        query_start=torch.arange(5, dtype=torch.int32),
        context_lens=torch.cat([now.context_lens, zeros]),
        rows=torch.cat([now.rows, zeros.long() + row]),
        query_lens_list=[],
        context_lens_list=[],
        rows_list=[],
        num_decodes=0,
        groups=groups,
    )
    step.backend.plan(padded)
    for layer in range(2):
        q, k, v, *_ = (None if x is None else torch.cat([x, x]) for x in step.inputs(layer, [1, 1]))
        out = step.backend.run(layer, AttentionInputs(q, k, v))
        expected = step.expected(layer, [1, 1])
        torch.testing.assert_close(out[:2].double(), expected, atol=1e-2, rtol=1e-2)
        assert not out[2:].any()


def test_norms_rotates_and_writes_first(backend):
    step = make_step(backend, [make_spec()], [9, 4], dtype=FLOAT16, q_dtype=FLOAT16)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(40, 64, generator=generator)
    norms = torch.rand(2, 64, generator=generator).to(FLOAT16)
    positions = torch.tensor([*range(9), *range(4)])
    rotation = Rotation(Angles(table, positions, FLOAT16), norms[0], norms[1], 1e-6)
    q, k, v, *_ = step.inputs(0, [9, 4])
    rotated_q, rotated_k = rotate(q.clone(), k.clone(), rotation)
    step.backend.plan(step.batch([9, 4]))
    out = step.backend.run(0, AttentionInputs(q, k, v, None, rotation))
    for first, last in ((0, 9), (9, 13)):
        parts = (x[first:last] for x in (rotated_q, rotated_k, v))
        expected, _ = attend_dense(step.specs[0], *parts)
        torch.testing.assert_close(out[first:last].double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (make_spec(has_sinks=True), BFLOAT16, "has no attention sinks, .*'triton'"),
        (make_spec(head_dim=264), BFLOAT16, r"no heads of 264 \(multiples of 8 up to 256 it has\)"),
        (make_spec(head_dim=36), BFLOAT16, r"no heads of 36 \(multiples of 8"),
        (make_spec(v_head_dim=32), BFLOAT16, "no values of another size than keys"),
        (make_spec(), torch.float32, "float32 can't be served; choose one of bfloat16"),
        (make_spec(), torch.int8, "int8 can't be served; choose one of bfloat16"),
    ],
)
def test_what_the_package_lacks_is_refused_by_name(spec, dtype, message):
    with pytest.raises(ConfigurationError, match=message):
        FlashAttention3.page_format(spec, 16, kv_of(dtype))


def test_batch_invariance_and_a_missing_package_are_refused(backend, monkeypatch):
    with pytest.raises(ConfigurationError, match="'flash_attn3' can't obey batch_invariant=True"):
        backend(batch_invariant=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs the package flash_attn_interface: build"):
        select("cuda", "flash_attn3")


def test_it_is_chosen_by_name_only(backend):
    assert isinstance(select("cuda", "flash_attn3"), FlashAttention3)
    assert "flash_attn3" not in default_backends("cuda")


def test_other_gpus_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ConfigurationError, match="sm_80 to sm_90, but cuda:0 is of sm_100"):
        flash_attn3_paged._check_device(torch.device("cuda:0"))
    flash_attn3_paged._check_device(torch.device("cpu"))


def test_the_package_takes_the_arguments_of_the_stand_in():
    package = pytest.importorskip("flash_attn_interface")
    wanted = {"q", "k_cache", "v_cache", *OPTIONS}
    assert wanted <= set(inspect.signature(package.flash_attn_with_kvcache).parameters)
