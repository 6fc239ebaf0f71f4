"""A shared prefix that is read once gives the results of a copy for each row, to fp32 rounding.

Bits are claimed only of rows that share no block: a product of many rows sums in another order.
"""

import pytest
import torch
from tests.attention.paged import PagedStep, make_spec

from quire.attention import torch_paged
from quire.attention.torch_paged import TorchPagedAttention

CONTEXTS = [700, 655, 1, 660, 700, 50, 641, 900, 910]
QUERY_LENS = [1] * len(CONTEXTS)
UNSHARED = [2, 5]
"""The rows that `make_steps` lets share nothing."""

OPTIONS = {
    "plain": {},
    "window": {"window": 300},
    "cap": {"soft_cap": 5.0},
    "sinks": {"has_sinks": True},
    "encoder": {"causal": False},
    "all": {"window": 500, "soft_cap": 3.0, "has_sinks": True, "scale": 0.2},
}


@pytest.fixture(autouse=True)
def share_all(monkeypatch):
    """However little it saves, and with several pieces and spans."""
    monkeypatch.setattr(torch_paged, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(torch_paged, "PIECE_BYTES", 1 << 19)
    monkeypatch.setattr(torch_paged, "SPAN_TOKENS", 256)


def make_steps(specs, contexts=None, **options):
    """The same tokens twice: prefixes in shared blocks, and in copies. Two of the prefixes nest."""
    contexts = contexts or CONTEXTS
    steps = []
    for in_blocks in (True, False):
        step = PagedStep(TorchPagedAttention(), specs, contexts, **options)
        step.share([0, 1, 3, 4, 6], 512, in_blocks)
        step.share([0, 4], 640, in_blocks)
        step.share([7, 8], 768, in_blocks)
        step.fill([c - 1 for c in contexts])
        steps.append(step)
    return steps


def num_runs(step, layer=0):
    plan = step.backend._layers[layer].view.plan(step.batch([1] * len(step.contexts)))
    return sum(call.tokens.shape[1] > 1 for call in plan.calls)


def check_equal(shared, private):
    """All layers; the shared side against the oracle too."""
    assert num_runs(shared) > 0
    assert num_runs(private) == 0
    results = shared.run_all(QUERY_LENS), private.run_all(QUERY_LENS)
    for layer, (out, own) in enumerate(zip(*results, strict=True)):
        assert torch.equal(out[UNSHARED], own[UNSHARED])
        torch.testing.assert_close(out, own, atol=2e-6, rtol=2e-6)
        expected = shared.expected(layer, QUERY_LENS)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_prefix_gives_the_results_of_a_copy(name, dtype):
    check_equal(*make_steps((make_spec(**OPTIONS[name]), make_spec(14, 2, 64)), dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "num_threads"),
    [
        ((7, 1, 80), 1),
        ((7, 1, 80), 2),
        ((3, 3, 40), 1),
        ((3, 3, 40), 2),
        ((8, 8, 64), 1),
        ((12, 4, 64), 1),
        ((1, 1, 128), 1),
        ((10, 10, 64), 1),
    ],
)
def test_with_any_heads(heads, num_threads):
    """Also where the library has kernels of its own for a few query heads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check_equal(*make_steps((make_spec(*heads),), dtype=torch.bfloat16))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_with_any_block_size(block_size):
    check_equal(*make_steps((make_spec(),), block_size=block_size))


def test_in_the_rows_of_several_groups():
    specs = (make_spec(), make_spec(window=250))
    check_equal(*make_steps(specs, groups=(0, 1), padding_bytes=512))


def test_windows_share_while_they_begin_at_one_block():
    """Branches in step have equal contexts; the first tile that they see is cut, and their own."""
    contexts = [700] * 5 + [711] * 4
    shared, private = make_steps((make_spec(window=300),), contexts)
    check_equal(shared, private)


def test_the_result_does_not_depend_on_who_else_shares():
    shared, _ = make_steps((make_spec(),))
    (out,) = shared.run_all(QUERY_LENS)
    for order in ([0], [4, 0], [6, 3, 1], [8, 2, 7, 0, 1, 3]):
        (some,) = shared.run_all(QUERY_LENS, order=order)
        torch.testing.assert_close(some, out[order], atol=2e-6, rtol=2e-6)


def test_beside_chunks_of_the_same_prefix():
    """Chunks are computed one by one; the decode rows before them share all the same."""
    shared, private = make_steps((make_spec(),))
    query_lens = [1] * 7 + [100, 110]
    (out,), (own,) = shared.run_all(query_lens), private.run_all(query_lens)
    assert torch.equal(out[UNSHARED], own[UNSHARED])
    torch.testing.assert_close(out, own, atol=2e-6, rtol=2e-6)
