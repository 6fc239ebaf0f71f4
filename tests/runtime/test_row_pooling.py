"""A row's vector depends neither on its chunks nor on the rows beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.pooling import Activation, PoolingKind, PoolingParams
from quire.runtime.row_pooling import RowPooling, add_in_order, finish


def one_by_one(rows):
    total = torch.zeros(rows.shape[1])
    for row in rows.float():
        total = total + row
    return total


@given(
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    width=st.sampled_from([8, 24, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_sum_is_that_of_its_tokens_in_order_however_they_are_cut(cuts, width, dtype):
    rows = torch.randn(sum(cuts), width, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = None
    for part in rows.split(cuts):
        total = add_in_order(total, part)
    assert torch.equal(total, one_by_one(rows))


class Step:
    """What `RowPooling.take` reads of a step: rows, how many tokens each computes, which end."""

    def __init__(self, rows, counts, ended):
        self.rows, self.num_new_tokens = np.array(rows), np.array(counts)
        self.sample_rows = np.array(ended, np.int64)


def pooled(pooling, step, hidden):
    found, _ = pooling._pool_ended_rows(step, hidden).fetch()
    return {row: np.frombuffer(result, np.float32) for row, result in found.items()}


@pytest.mark.parametrize("kind", PoolingKind)
def test_chunks_and_neighbours(kind):
    hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(2))
    params = PoolingParams(kind, normalize=False)
    alone = RowPooling(None, None)
    alone.set_row(3, params)
    expected = pooled(alone, Step([3], [9], [3]), hidden)[3]
    crowd = RowPooling(None, None)
    crowd.set_row(3, params)
    crowd.set_row(5, params)
    beside = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    first = torch.cat([hidden[:4], beside])
    assert not pooled(crowd, Step([3, 5], [4, 4], []), first)
    last = torch.cat([beside[:1], hidden[4:]])
    assert np.array_equal(pooled(crowd, Step([5, 3], [1, 5], [3]), last)[3], expected)
    reference = {
        PoolingKind.CLS: hidden[0],
        PoolingKind.LAST: hidden[-1],
        PoolingKind.MEAN: hidden.mean(0),
        PoolingKind.ALL: hidden.flatten(),
    }
    np.testing.assert_allclose(expected, reference[kind].numpy(), rtol=1e-5, atol=1e-6)


def test_a_row_that_is_admitted_again_begins_again():
    hidden = torch.randn(6, 16, generator=torch.Generator().manual_seed(4))
    pooling = RowPooling(None, None)
    for _ in range(2):
        pooling.set_row(0, PoolingParams(PoolingKind.MEAN, normalize=False))
        assert not pooled(pooling, Step([0], [4], []), hidden[:4])
    pooling.set_row(0, PoolingParams(PoolingKind.MEAN, normalize=False))
    found = pooled(pooling, Step([0], [6], [0]), hidden)[0]
    np.testing.assert_allclose(found, hidden.mean(0).numpy(), rtol=1e-5)


def test_a_row_with_nan_fails_alone():
    hidden = torch.zeros(2, 16)
    hidden[1, 3] = torch.nan
    pooling = RowPooling(None, None)
    for row in (0, 1):
        pooling.set_row(row, PoolingParams())
    found, failed = pooling._pool_ended_rows(Step([0, 1], [1, 1], [0, 1]), hidden).fetch()
    assert (list(found), list(failed)) == ([0], [1])


def test_each_token_of_many_gets_what_it_would_get_alone():
    rows = np.random.default_rng(5).normal(size=(7, 12)).astype(np.float32)
    for params in (
        PoolingParams(PoolingKind.ALL, dimensions=8),
        PoolingParams(PoolingKind.ALL, wants_scores=True, activation=Activation.SOFTMAX),
        PoolingParams(PoolingKind.ALL, wants_scores=True, activation=Activation.SIGMOID),
    ):
        alone = np.stack([finish(row, params) for row in rows])
        assert np.array_equal(finish(rows, params), alone)


def test_activations():
    scores = np.array([-800.0, 0.0, 3.0, 800.0], np.float32)
    sigmoid = finish(scores, PoolingParams(wants_scores=True, activation=Activation.SIGMOID))
    np.testing.assert_allclose(sigmoid, [0, 0.5, 0.95257413, 1], rtol=1e-6)
    softmax = finish(scores[:3], PoolingParams(wants_scores=True, activation=Activation.SOFTMAX))
    np.testing.assert_allclose(softmax, [0, 0.04742587, 0.95257413], rtol=1e-5)
    assert finish(np.zeros(4, np.float32), PoolingParams()).tolist() == [0, 0, 0, 0]
