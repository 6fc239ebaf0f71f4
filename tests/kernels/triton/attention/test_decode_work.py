"""The work list made on the device against the one made on the host, which its test proves."""

import pytest
import torch
from tests.attention.paged import make_spec
from tests.attention.test_triton_plan import H200, make_batch

pytest.importorskip("triton")

from quire.attention.triton_plan import chunk_rule, decode_shape, host_work, uniform_shape
from quire.kernels.triton.attention.decode_work import decode_work

CONTEXTS = [1, 256, 257, 5000, 40, 8192, 300, 1024, 65]


def rows_of(items):
    return sorted(map(tuple, items.tolist()))


@pytest.mark.parametrize("window", [None, 300, 5])
@pytest.mark.parametrize("choose", [decode_shape, uniform_shape])
@pytest.mark.parametrize("contexts", [CONTEXTS, [700]])
def test_work_list_equals_the_hosts_list(window, choose, contexts):
    shape = choose(make_spec(8, 2, 64, window=window), 16, torch.bfloat16, H200)
    rule = chunk_rule(shape, 8192)
    batch = make_batch([1] * len(contexts), contexts)
    host = host_work(batch, shape, rule)
    items, count, merges = decode_work(batch.query_start, batch.context_lens, batch.rows, rule)
    found, split = items[: int(count)], merges[merges[:, 2] >= 0]
    assert int(count) == len(host.items)
    # Where parts lie is each list's own affair.
    assert rows_of(found[:, [0, 1, 2, 3, 4, 5, 7]]) == rows_of(host.items[:, [0, 1, 2, 3, 4, 5, 7]])
    assert split[:, [0, 2]].tolist() == host.merges[:, [0, 2]].tolist()
    for token, first_part, num_parts, _ in merges.tolist():
        parts = found[found[:, 1] == token, 6].tolist()
        assert parts == ([-1] if num_parts < 0 else [first_part + i for i in range(num_parts)])
        assert first_part == token * rule.parts_per_token


def test_padding_has_an_item_without_keys_and_an_output_of_no_parts():
    rule = chunk_rule(decode_shape(make_spec(8, 2, 64), 16, torch.bfloat16, H200), 4096)
    context = torch.tensor([0, 40, 0, 600, 0], dtype=torch.int32)
    items, count, merges = decode_work(
        torch.arange(6, dtype=torch.int32), context, torch.zeros(5, dtype=torch.int64), rule
    )
    items = items[: int(count)]
    assert items[items[:, 4] == items[:, 5]].tolist() == [
        [0, token, 1, -1, 0, 0, -1, 0] for token in (0, 2, 4)
    ]
    assert items[items[:, 4] != items[:, 5], 1].tolist() == [1, 3, 3, 3, 3, 3]
    assert merges[:, 2].tolist() == [0, -1, 0, 5, 0]
