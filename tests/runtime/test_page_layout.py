"""Which layers form groups, how large pages become, and that little of them is unused."""

from dataclasses import dataclass

import pytest
import torch
from tests.runtime.hybrid_shapes import SHAPES, Shape

from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.kv_groups import KVGroup, KVKind
from quire.runtime.page_layout import (
    KVCacheLayout,
    PageNeeds,
    StatePlace,
    blocks_held,
    plan_groups,
    plan_layout,
    unused_share,
)

LEAST_TOKENS = 256


@dataclass(frozen=True)
class Units:
    """A recurrent layer as the layout sees it."""

    num_units: int
    unit_bytes: int


def spec(window: int | None = None, num_kv_heads: int = 2) -> AttentionSpec:
    return AttentionSpec(num_kv_heads * 2, num_kv_heads, 16, 0.25, window)


def layout(
    *specs: AttentionSpec, states: tuple[Units, ...] = (), block_size: int = 16
) -> KVCacheLayout:
    return plan_layout(
        specs,
        TorchPagedAttention,
        block_size,
        KVFormat.plain(torch.float32),
        recurrent_specs=states,
    )


LAYER = 2 * 16 * 2 * 16 * 4
"""Bytes of `spec()`."""


def test_one_kind_of_layer_is_one_group() -> None:
    found = layout(*[spec()] * 3)
    assert found.groups == (KVGroup((0, 1, 2), KVKind.FULL, 3 * LAYER),)
    assert found.bytes_per_block == 3 * LAYER
    assert found.layer_places == ((0, 0), (0, LAYER), (0, 2 * LAYER))


def test_several_kinds_share_pages_of_equal_size() -> None:
    found = layout(spec(), *[spec(window=64)] * 4, spec())
    assert [group.layers for group in found.groups] == [(0, 5), (1, 2), (3, 4)]
    assert [group.window for group in found.groups] == [None, 64, 64]
    assert {group.bytes_per_block for group in found.groups} == {found.bytes_per_block}
    assert found.layer_places[5] == (0, LAYER)


def test_layers_of_other_sizes_that_grow_alike_share_a_page() -> None:
    found = layout(spec(num_kv_heads=1), spec(num_kv_heads=4), spec(num_kv_heads=1))
    assert [group.layers for group in found.groups] == [(0, 1, 2)]
    assert found.layer_places == ((0, 0), (0, LAYER // 2), (0, LAYER // 2 + 2 * LAYER))
    assert found.bytes_per_block == 3 * LAYER


def test_windows_of_other_sizes_fill_pages_with_more_layers() -> None:
    """Two wide full layers and four narrow ones with windows: pages of two layers, or of four."""
    found = layout(*[spec(num_kv_heads=4)] * 2, *[spec(window=64)] * 4)
    assert [group.layers for group in found.groups] == [(0, 1), (2, 3, 4, 5)]
    assert found.bytes_per_block == 4 * LAYER
    assert all(group.unused_bytes == 0 for group in found.groups)


def test_a_lone_full_layer_is_not_padded_to_the_width_of_the_windows() -> None:
    """It is held for every token, they for the last ones: a wide page would be mostly its own."""
    found = layout(spec(), *[spec(window=64)] * 6)
    assert [len(group.layers) for group in found.groups] == [1] * 7


def test_states_follow_tokens_with_their_units_one_after_the_other() -> None:
    """Layer 1's 5 units of 1024 bytes and layer 3's 4: of pages of 4 KiB, 2 and a part."""
    units = (Units(5, 1024), Units(6, 1024), Units(1, 192))
    found = layout(spec(), states=units)
    assert [group.kind for group in found.groups] == [KVKind.FULL, KVKind.STATE, KVKind.STATE]
    assert found.bytes_per_block == LAYER == 4096
    assert found.state_places == (StatePlace(1, 0, 4), StatePlace(1, 5, 4), StatePlace(2, 0, 21))
    large, small = found.groups[1:]
    assert (large.layers, large.num_state_blocks, large.unused_bytes) == ((0, 1), 3, 1024)
    assert (small.layers, small.num_state_blocks, small.unused_bytes) == ((2,), 1, 4096 - 192)
    assert found.state_sizes == (3, 1)


def test_a_model_of_states_alone_has_pages_for_them() -> None:
    found = layout(states=(Units(96, 8192), Units(3, 768)))
    assert found.layer_places == ()
    assert unused_share(found.groups, 16, 1000) < 0.05


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_real_hybrids_leave_less_than_a_twentieth_of_their_pages_unused(
    name: str, block_size: int
) -> None:
    """At half of the model's length, and at every length down to a paragraph."""
    shape = SHAPES[name]
    groups = shape.groups(block_size)
    assert unused_share(groups, block_size, shape.max_len // 2) < 0.02
    length = shape.max_len
    while length >= LEAST_TOKENS:
        assert unused_share(groups, block_size, length) < 0.05, length
        length = length * 9 // 10


@pytest.mark.parametrize("name", SHAPES)
def test_pages_hold_what_their_layers_need_and_say_what_is_left(name: str) -> None:
    needs, groups = SHAPES[name].needs(16), SHAPES[name].groups(16)
    kinds = [group.kind for group in groups]
    assert kinds == sorted(kinds, key=lambda kind: kind is KVKind.STATE)
    assert len({group.bytes_per_block for group in groups}) == 1
    for (kind, window), sizes in needs.layers.items():
        of_kind = [group for group in groups if (group.kind, group.window) == (kind, window)]
        assert sorted(layer for group in of_kind for layer in group.layers) == sorted(sizes)
        for group in of_kind:
            used = sum(sizes[layer] for layer in group.layers)
            assert used + group.unused_bytes == group.bytes_per_block
    states = [group for group in groups if group.kind is KVKind.STATE]
    for group, (unit_bytes, counts) in zip(states, needs.states.items(), strict=True):
        assert group.layers == tuple(counts)
        units_per_page = group.bytes_per_block // unit_bytes
        assert group.num_state_blocks * units_per_page >= sum(counts.values())
        used = sum(counts.values()) * unit_bytes
        assert used + group.unused_bytes == group.num_state_blocks * group.bytes_per_block


def test_plain_models_keep_one_group_of_pages_without_gaps() -> None:
    groups = Shape(40_960, ((28, 8, 128, None),)).groups(16)
    assert groups == (KVGroup(tuple(range(28)), KVKind.FULL, 28 * 16 * 2 * 8 * 128 * 2),)


def test_pages_are_aligned_and_that_is_said_to_be_unused() -> None:
    needs = PageNeeds({(KVKind.FULL, None): {0: 100, 1: 100}}, {})
    assert plan_groups(needs, 16, 1000) == (KVGroup((0, 1), KVKind.FULL, 256, unused_bytes=56),)


def test_the_blocks_of_a_sequence_follow_the_kind_of_group() -> None:
    full = KVGroup((0,), KVKind.FULL, 64)
    window = KVGroup((1,), KVKind.WINDOW, 64, window=100)
    state = KVGroup((2,), KVKind.STATE, 64, num_state_blocks=3)
    lengths = (1, 16, 17, 1000)
    assert [blocks_held(full, n, 16) for n in lengths] == [1, 1, 2, 63]
    assert [blocks_held(window, n, 16) for n in lengths] == [1, 1, 2, 8]
    assert [blocks_held(state, n, 16) for n in lengths] == [3, 3, 3, 3]


def test_the_pages_of_all_ranks_are_counted_together() -> None:
    one = layout(spec(), states=(Units(5, 1024),))
    found = one.over_ranks(4)
    assert found.bytes_per_block == 4 * one.bytes_per_block
    for group, whole in zip(one.groups, found.groups, strict=True):
        assert whole.bytes_per_block == found.bytes_per_block
        assert whole.unused_bytes == 4 * group.unused_bytes
        assert whole.num_state_blocks == group.num_state_blocks
