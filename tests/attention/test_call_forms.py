"""What a layer may hand to its attention call, on every backend, against float64.

Values that are smaller than keys; queries alone, for a layer that attends what another has stored;
heads that are normed with an offset, and normed but not turned.
"""

import pytest
import torch
from tests.attention.native import NativeStep
from tests.attention.paged import PagedStep, kv_of, make_spec

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.flashinfer_paged import FlashInferAttention
from quire.attention.interface import rotated
from quire.attention.reference import attend_dense
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles, Rotation

BACKENDS = ["native", "torch", "triton"]
CONTEXTS, QUERY_LENS = [9, 37, 20], [1, 4, 20]
TOLERANCE = 5e-6


@pytest.fixture(params=BACKENDS)
def make_step(request, best):
    def make(spec, **options):
        if request.param == "torch":
            return PagedStep(TorchPagedAttention(), (spec,), CONTEXTS, **options)
        if request.param == "native":
            return NativeStep(CpuPagedAttention(best), (spec,), CONTEXTS, **options)
        pytest.importorskip("triton")
        from tests.attention.triton_step import TritonStep

        from quire.attention.triton_paged import TritonPagedAttention

        return TritonStep(TritonPagedAttention(), (spec,), CONTEXTS, **options)

    return make


@pytest.mark.parametrize("v_head_dim", [8, 16])
@pytest.mark.parametrize("options", [{}, {"has_sinks": True, "window": 7}], ids=["plain", "sinks"])
def test_heads_of_values_may_be_smaller(make_step, v_head_dim, options):
    step = make_step(make_spec(4, 2, 24, v_head_dim=v_head_dim, **options))
    (out,) = step.check(QUERY_LENS, TOLERANCE)
    assert out.shape == (sum(QUERY_LENS), 4, v_head_dim)


def rotation_of(dim, positions, *, is_turned, offset):
    generator = torch.Generator().manual_seed(3)
    q_norm, k_norm = torch.randn(2, dim, generator=generator)
    table = torch.randn(50, dim, generator=generator)
    angles = Angles(table, positions, torch.float32) if is_turned else None
    return Rotation(angles, q_norm, k_norm, 1e-5, offset)


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("is_turned", [False, True])
def test_queries_alone_attend_what_another_call_has_stored(make_step, is_turned, offset):
    spec = make_spec(4, 2, 24)
    step = make_step(spec)
    lens = contexts = [1, *CONTEXTS[1:]]
    positions = torch.cat([torch.arange(count) for count in lens])
    rotation = rotation_of(24, positions, is_turned=is_turned, offset=offset)
    step.backend.plan(step.batch(lens, contexts))
    q, k, v, *_ = step.inputs(0, lens, contexts)
    other = torch.randn(q.shape, generator=torch.Generator().manual_seed(4))
    kept_q, kept_k = rotated(AttentionInputs(q.clone(), k.clone(), None, rotation=rotation))
    kept_other, _ = rotated(AttentionInputs(other.clone(), None, None, rotation=rotation))
    outputs = [
        step.backend.run(0, AttentionInputs(q.clone(), k.clone(), v.clone(), rotation=rotation)),
        step.backend.run(0, AttentionInputs(other.clone(), None, None, rotation=rotation)),
        step.backend.run(0, AttentionInputs(kept_other.clone(), None, None)),
    ]
    for out, queries in zip(outputs, (kept_q, kept_other, kept_other), strict=True):
        parts = zip(queries.split(lens), kept_k.split(lens), v.split(lens), strict=True)
        expected = torch.cat([attend_dense(spec, *part)[0] for part in parts])
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("v_head_dim", [0, 25])
def test_sizes_of_values_that_can_not_be_are_refused(v_head_dim):
    for backend in (CpuPagedAttention, TorchPagedAttention):
        with pytest.raises(ConfigurationError, match=f"v_head_dim={v_head_dim} is not from 1 to"):
            backend.page_format(
                make_spec(4, 2, 24, v_head_dim=v_head_dim), 16, kv_of(torch.float32)
            )


def test_flashinfer_has_no_smaller_values():
    spec = make_spec(4, 2, 64, v_head_dim=32)
    with pytest.raises(ConfigurationError, match="values of another size than keys"):
        FlashInferAttention.page_format(spec, 16, kv_of(torch.bfloat16))
