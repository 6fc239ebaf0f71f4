"""The FlashInfer backend against the oracle, with a stand-in for the package.

The stand-in computes with torch what the package's documentation promises, and refuses arguments
that the documentation excludes.
"""

import inspect
import sys
import types
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from tests.attention.paged import PagedStep, kv_of, make_spec

from quire.attention.flashinfer_paged import FlashInferAttention
from quire.attention.interface import AttentionSpec
from quire.attention.reference import attend_dense
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles, Rotation, rotate

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


PLAN_ARGUMENTS = (
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim_qk",
    "page_size",
)
PLAN_OPTIONS = (
    "causal",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
)


class StandIn:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper, as far as it is used."""

    workspaces: ClassVar[list[torch.Tensor]] = []

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.workspaces.append(float_workspace_buffer)

    def plan(self, *arrays, **options):
        assert set(options) == set(PLAN_OPTIONS)
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes = arrays
        num_qo_heads, num_kv_heads, head_dim_qk, page_size = sizes
        causal, window_left = options["causal"], options["window_left"]
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (qo_indptr, *pages))
        assert len(paged_kv_indptr) == len(qo_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert paged_kv_last_page_len.min() > 0 and paged_kv_last_page_len.max() <= page_size
        assert options["q_data_type"] == options["kv_data_type"] and (causal or window_left == -1)
        self.query_start, self.pages = qo_indptr.tolist(), pages
        self.shape = num_kv_heads, page_size, head_dim_qk
        window = window_left + 1 if window_left >= 0 else None
        self.spec = AttentionSpec(
            num_qo_heads, num_kv_heads, head_dim_qk, options["sm_scale"], window,
            options["logits_soft_cap"], causal=causal,
        )  # fmt: skip

    def run(self, q, paged_kv_cache, *, out=None):
        assert q.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype
        assert paged_kv_cache.shape[1:] == (2, *self.shape)
        indptr, indices, last_lens = self.pages
        for s, (first, last) in enumerate(
            zip(self.query_start, self.query_start[1:], strict=False)
        ):
            blocks = indices[indptr[s] : indptr[s + 1]].long()
            num_keys = (len(blocks) - 1) * self.shape[1] + int(last_lens[s])
            # [blocks, 2, Hkv, B, D] -> [2, tokens, Hkv, D]
            stored = paged_kv_cache[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_keys]
            out[first:last], _ = attend_dense(self.spec, q[first:last], stored[0], stored[1])
        return out


@pytest.fixture
def backend(monkeypatch):
    """A new one, on the stand-in."""
    module = types.ModuleType("flashinfer")
    module.__spec__ = types.SimpleNamespace(name="flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    StandIn.workspaces = []
    return FlashInferAttention


class HeadMajorStep(PagedStep):
    """Pages are [2, Hkv, B, D]."""

    def fill(self, contexts):
        for layer, spec, k, v in zip(self.layers, self.specs, self.k, self.v, strict=True):
            shape = (2, spec.num_kv_heads, self.block_size, spec.head_dim)
            for i, context in enumerate(contexts):
                for position in range(context):
                    block = self.tables[layer.group][i][position // self.block_size]
                    page = layer.pages[block].view(self.dtype).view(shape)
                    page[0, :, position % self.block_size] = k[i][position]
                    page[1, :, position % self.block_size] = v[i][position]


def _step(backend, specs, contexts, **options):
    options = {"dtype": BFLOAT16, "q_dtype": BFLOAT16, "padding_bytes": 64, **options}
    return HeadMajorStep(backend(), tuple(specs), contexts, **options)


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize(
    ("contexts", "query_lens"),
    [([5, 16, 33], [1, 1, 1]), ([9, 20, 6], [1, 4, 6]), ([1], [1])],
)
def test_attends_to_what_is_stored(backend, contexts, query_lens, block_size):
    specs = [make_spec(), make_spec(num_heads=6, num_kv_heads=3, soft_cap=20.0), make_spec()]
    step = _step(backend, specs, contexts, block_size=block_size)
    step.check(query_lens, tolerance=1e-2)
    assert len(StandIn.workspaces) == 2  # the first and the last layer share a plan
    assert StandIn.workspaces[0] is StandIn.workspaces[1]


@pytest.mark.parametrize("window", [1, 7, 20])
def test_blocks_before_the_window_are_not_named(backend, window):
    """Those of a hole may be any number, and have been given to others."""
    step = _step(backend, [make_spec(window=window)], [37, 12, 50], block_size=8)
    query_lens = [1, 2, 5]
    step.fill([c - n for c, n in zip(step.contexts, query_lens, strict=True)])
    expected = step.expected(0, query_lens)
    batch = step.batch(query_lens)
    for row, context, num_new in zip(batch.rows_list, step.contexts, query_lens, strict=True):
        first_seen = max(0, context - num_new - window + 1) // 8
        batch.groups[0].block_tables[row, :first_seen] = -1
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


def test_norms_rotates_and_writes_first(backend):
    step = _step(backend, [make_spec()], [9, 4], dtype=FLOAT16, q_dtype=FLOAT16)
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


def test_a_layer_without_causality_sees_all(backend):
    step = _step(backend, [make_spec(causal=False)], [6, 3])
    step.check([6, 3], tolerance=1e-2)


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (make_spec(has_sinks=True), BFLOAT16, "has no attention sinks, .* 'triton'|triton"),
        (make_spec(head_dim=80), BFLOAT16, r"no heads of 80 \(of 64, 128, 256 it has\)"),
        (make_spec(causal=False, window=8), BFLOAT16, "no windows that look ahead"),
        (make_spec(), torch.float32, "float32 can't be served; choose one of bfloat16"),
    ],
)
def test_features_that_flashinfer_lacks_are_refused_by_name(spec, dtype, message):
    with pytest.raises(ConfigurationError, match=message):
        FlashInferAttention.page_format(spec, 16, kv_of(dtype))


def test_batch_invariance_is_refused(backend):
    with pytest.raises(ConfigurationError, match="can't obey batch_invariant=True"):
        backend(batch_invariant=True)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install flashinfer-python"):
        FlashInferAttention()


def test_no_step_is_captured():
    assert not FlashInferAttention.serves_graphs


def test_flashinfer_takes_the_arguments_of_the_stand_in():
    flashinfer = pytest.importorskip("flashinfer")
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    plan = tuple(inspect.signature(real.plan).parameters)[1:]
    assert plan[: len(PLAN_ARGUMENTS)] == PLAN_ARGUMENTS and set(PLAN_OPTIONS) <= set(plan)
    for method in ("__init__", "run"):
        wanted = inspect.signature(getattr(StandIn, method)).parameters
        assert set(wanted) <= set(inspect.signature(getattr(real, method)).parameters)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_pages_are_refused_by_name(dtype):
    with pytest.raises(
        ConfigurationError, match="can't be served; choose one of bfloat16, float16"
    ):
        FlashInferAttention.page_format(make_spec(8, 2, 128), 16, kv_of(dtype))
