"""Products of many experts in the interpreter: their numbers, and that a token has the same bits
whatever the batch."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, assert_close, numbers

from quire.kernels.experts import mix_experts
from quire.kernels.quantize import quantize_int4, quantize_int8, quantize_int8_weight
from quire.kernels.routing import Routing
from quire.kernels.triton.linear.group_plan import plan_groups
from quire.kernels.triton.linear.grouped_int4_matmul import (
    group_int4_weights,
    grouped_int4_matmul,
)
from quire.kernels.triton.linear.grouped_int8_matmul import (
    group_int8_weights,
    grouped_int8_matmul,
)
from quire.kernels.triton.linear.grouped_matmul import (
    add_experts,
    group_weights,
    grouped_matmul,
)
from quire.kernels.triton.linear.int4_matmul import (
    Int4Weight,
    int4_matmul,
    pack_levels,
    pack_offsets,
    pack_scales,
)
from quire.kernels.triton.linear.int8_matmul import Int8Weight, int8_matmul


def _routing(num_tokens, num_experts, top_k, seed=5):
    generator = torch.Generator().manual_seed(seed)
    ids = (
        torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].contiguous()
    )
    return Routing(ids, torch.rand(num_tokens, top_k, generator=generator))


def _weights(num_experts, num_outputs, num_inputs, dtype):
    scale = num_inputs**-0.5
    return [
        (numbers(num_outputs, num_inputs, seed=10 + expert) * scale).to(dtype)
        for expert in range(num_experts)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 3), (20, 70, 130), (37, 64, 128)])
def test_products_equal_torchs(shape, dtype):
    num_tokens, num_outputs, num_inputs = shape
    x = numbers(num_tokens, num_inputs).to(dtype)
    weights = _weights(5, num_outputs, num_inputs, dtype)
    biases = [numbers(num_outputs, seed=30 + expert).to(dtype) for expert in range(5)]
    ids = _routing(num_tokens, 5, 2).ids
    plan = plan_groups(ids, 5)
    found = grouped_matmul(x, group_weights(weights, biases), plan, pairs_per_row=2)
    rows = x[plan.order.long() // 2]
    for place, pair in enumerate(plan.order.tolist()):
        expert = int(ids.view(-1)[pair])
        exact = rows[place].double() @ weights[expert].double().T + biases[expert].double()
        assert_close(found[place], exact)
    again = grouped_matmul(rows, group_weights(weights, biases), plan, pairs_per_row=0)
    assert torch.equal(again, found)


@pytest.mark.parametrize("block_rows", [64, 128])
def test_products_in_wide_tiles_equal_torchs(block_rows):
    x, ids = numbers(150, 100).bfloat16(), _routing(150, 3, 2).ids
    weights = _weights(3, 150, 100, torch.bfloat16)
    plan = plan_groups(ids, 3, block_rows)
    found = grouped_matmul(x, group_weights(weights, None), plan, pairs_per_row=2)
    for place, pair in enumerate(plan.order.tolist()):
        weight = weights[int(ids.view(-1)[pair])]
        assert_close(found[place], x[pair // 2].double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weighted_sum_has_the_definitions_roundings(dtype):
    num_tokens, top_k = 9, 4
    routing = _routing(num_tokens, 6, top_k)
    plan = plan_groups(routing.ids, 6)
    outputs = numbers(num_tokens * top_k, 1100).to(dtype)
    found = add_experts(outputs, routing.weights, plan)
    of_pair = torch.empty_like(outputs)
    of_pair[plan.order.long()] = outputs
    by_expert = of_pair.view(num_tokens, top_k, -1)

    def compute(expert, rows):
        tokens, places = (routing.ids == expert).nonzero(as_tuple=True)
        return by_expert[tokens, places]

    expected = mix_experts(torch.zeros(num_tokens, 1100, dtype=dtype), routing, compute)
    assert torch.equal(found, expected)


def test_a_token_has_the_same_bits_in_any_batch():
    x, weights = (
        numbers(40, 70).bfloat16(),
        group_weights(_weights(5, 30, 70, torch.bfloat16), None),
    )
    routing = _routing(40, 5, 2)

    def run(rows):
        plan = plan_groups(routing.ids[rows], 5)
        found = grouped_matmul(x[rows], weights, plan, pairs_per_row=2)
        return add_experts(found, routing.weights[rows], plan)

    whole = run(slice(0, 40))
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(run(rows), whole[rows])
    assert run(slice(0, 0)).shape == (0, 30)


def test_weights_that_are_not_alike_are_refused():
    weights = _weights(2, 8, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="all must be"):
        group_weights([weights[0], weights[1].float()], None)
    with pytest.raises(ValueError, match="no multiple of 16"):
        whole = torch.zeros(17 * 16, dtype=torch.bfloat16)
        group_weights([whole[1:].view(-1)[:256].view(16, 16)], None)
    with pytest.raises(ValueError, match=r"x is \(3, 9\)"):
        plan = plan_groups(torch.zeros(3, 1, dtype=torch.int64), 2)
        grouped_matmul(numbers(3, 9), group_weights(weights, None), plan, pairs_per_row=1)


def _some_places(plan, ids):
    """The first and the last place of each expert, with it: a product by itself takes long."""
    experts = ids.view(-1)[plan.order.long()].tolist()
    around = [None, *experts, None]
    return [
        (place, expert)
        for place, expert in enumerate(experts)
        if around[place] != expert or around[place + 2] != expert
    ]


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_int8_has_the_bits_of_one_expert_after_another(num_tokens, is_rotated):
    x = numbers(num_tokens, 200).bfloat16()
    quantize = quantize_int8_weight if is_rotated else quantize_int8
    rounded = [quantize(each) for each in _weights(5, 70, 200, torch.float32)]
    biases = [numbers(70, seed=30 + expert).bfloat16() for expert in range(5)]
    ids = _routing(num_tokens, 5, 2).ids
    plan = plan_groups(ids, 5)
    levels, scales = zip(*rounded, strict=True)
    weights = group_int8_weights(levels, scales, biases, is_rotated=is_rotated)
    found = grouped_int8_matmul(x, weights, plan, pairs_per_row=2)
    rows = x[plan.order.long() // 2]
    for place, expert in _some_places(plan, ids):
        weight = Int8Weight(levels[expert], scales[expert], biases[expert], is_rotated)
        assert torch.equal(found[place], int8_matmul(rows[place], weight))
    assert torch.equal(grouped_int8_matmul(rows, weights, plan, pairs_per_row=0), found)


@pytest.mark.parametrize("num_tokens", [1, 18])
def test_int4_has_the_bits_of_one_expert_after_another(num_tokens):
    x = numbers(num_tokens, 300).bfloat16()
    weights = []
    for expert, each in enumerate(_weights(5, 70, 300, torch.float32)):
        rounded = quantize_int4(each, 32)
        weights.append(
            Int4Weight(
                pack_levels(rounded).contiguous(),
                pack_scales(rounded).contiguous(),
                pack_offsets(rounded).contiguous(),
                rounded.scale_factors,
                rounded.offset_factors,
                numbers(70, seed=30 + expert).bfloat16(),
            )
        )
    ids = _routing(num_tokens, 5, 2).ids
    plan = plan_groups(ids, 5)
    found = grouped_int4_matmul(x, group_int4_weights(weights), plan, pairs_per_row=2)
    rows = x[plan.order.long() // 2]
    for place, expert in _some_places(plan, ids):
        assert torch.equal(found[place], int4_matmul(rows[place], weights[expert]))
    again = grouped_int4_matmul(rows, group_int4_weights(weights), plan, pairs_per_row=0)
    assert torch.equal(again, found)
    with pytest.raises(ValueError, match="3 stretches of 128"):
        grouped_int4_matmul(x[:, :200], group_int4_weights(weights), plan, pairs_per_row=2)
