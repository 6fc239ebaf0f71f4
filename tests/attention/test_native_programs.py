"""Attention as part of a native program: to the bit what the backend's own call gives, but where
heads are normed, whose sums torch adds up in another order.

An embedding whose table has a row for each token of the step gives the program its q, k and v.
"""

from dataclasses import dataclass

import pytest
import torch
from tests.attention.native import NativeStep
from tests.attention.paged import make_spec

from quire.attention.cpu_paged import CpuPagedAttention
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.rotary import Angles, Rotation

CONTEXTS, QUERY_LENS = [9, 37, 20], [1, 4, 20]
NUM_TOKENS, DIM = sum(QUERY_LENS), 24
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Form:
    """How the parts lie in a token's row, and what is done to them.

    gap: elements behind each head. stores: False: a second call has queries alone.
    """

    spec: dict
    gap: int = 0
    is_turned: bool = True
    normed: bool = False
    offset: float | None = None
    stores: bool = True
    rotates: bool = True


FORMS = {
    "llama": Form({}),
    "no rotation": Form({}, rotates=False),
    "no angles": Form({}, is_turned=False, normed=True),
    "normed": Form({}, normed=True),
    "offset": Form({}, normed=True, offset=1.0),
    "heads apart": Form({}, gap=8),
    "heads apart and not rotated": Form({}, gap=8, rotates=False),
    "sinks": Form({"has_sinks": True, "window": 7}),
    "smaller values": Form({"v_head_dim": 16}),
    "smaller values apart": Form({"v_head_dim": 10}, gap=4),
    "queries alone": Form({}, stores=False, normed=True),
    "queries alone, not rotated": Form({}, stores=False, rotates=False),
    "soft cap": Form({"soft_cap": 3.0}),
}


def parts(rows, spec, gap):
    """q, k, v of a second call and the first one's, as views of rows [T, width]."""
    sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    heads = rows.unflatten(-1, (sum(sizes), DIM + gap))[..., :DIM]
    q, k, v, other = heads.split(sizes, dim=1)
    return q, k, v[..., : spec.output_dim], other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_program_attends_as_the_backend_does(best, form, dtype):
    spec = make_spec(6, 2, DIM, **form.spec)
    step = NativeStep(CpuPagedAttention(best), (spec,), CONTEXTS, dtype=dtype)
    step.fill([c - n for c, n in zip(CONTEXTS, QUERY_LENS, strict=True)])
    width = (2 * spec.num_heads + 2 * spec.num_kv_heads) * (DIM + form.gap)
    table = random(NUM_TOKENS, width, seed=5, dtype=dtype)
    turns = random(60, DIM, seed=6)
    norms = [random(DIM, seed=seed, dtype=dtype) if form.normed else None for seed in (7, 8)]
    sinks = step.sinks[0]

    def attend(call, rows, positions):
        q, k, v, other = parts(rows, spec, form.gap)
        angles = Angles(turns, positions, dtype) if form.is_turned else None
        rotation = Rotation(angles, *norms, 1e-5, form.offset) if form.rotates else None
        out = call(0, AttentionInputs(q, k, v, sinks, rotation))
        if form.stores:
            return out
        return call(0, AttentionInputs(other, None, None, sinks, rotation))

    token_ids = torch.arange(NUM_TOKENS)
    positions = torch.cat(
        [torch.arange(c - n, c) for c, n in zip(CONTEXTS, QUERY_LENS, strict=True)]
    )
    step.backend.plan(step.batch(QUERY_LENS))
    expected = attend(step.backend.run, table.clone(), positions).flatten(1)
    pages = step.storage.clone()
    step.fill(CONTEXTS)  # with other K and V
    native = step.backend.native
    recorder = Recorder(best, dtype, NUM_TOKENS, native.layers)
    with recorder.recording():
        rows = recorder.embed(table, recorder.inputs[0])
        output = attend(recorder.attend, rows, recorder.inputs[1]).flatten(1)
    native.step.token_ids, native.step.positions = token_ids.data_ptr(), positions.data_ptr()
    found = recorder.finish(output).run(native.step)
    if form.normed:
        tolerance = 1e-5 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(found, expected)
        assert torch.equal(step.storage, pages)
