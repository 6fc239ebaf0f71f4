"""How layers form groups and pages, and that copies move whole blocks."""

from collections.abc import Callable, Sequence

import pytest
import torch

from quire.attention.interface import AttentionSpec
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.kv_groups import KVKind
from quire.core.step import BlockCopy
from quire.errors import InsufficientMemoryError
from quire.runtime.kv_cache import (
    KVCache,
    KVCacheLayout,
    choose_width,
    copy_at_once,
    copy_in_turn,
    plan_layout,
)

CPU = torch.device("cpu")


def spec(window: int | None = None, num_kv_heads: int = 2) -> AttentionSpec:
    return AttentionSpec(4, num_kv_heads, 16, 0.25, window)


def layout(*specs: AttentionSpec, block_size: int = 16) -> KVCacheLayout:
    return plan_layout(specs, TorchPagedAttention, block_size, torch.float32)


def test_one_kind_of_layer_is_one_group() -> None:
    found = layout(*[spec()] * 3)
    assert [(group.layers, group.kind) for group in found.groups] == [((0, 1, 2), KVKind.FULL)]
    bytes_per_layer = 2 * 16 * 2 * 16 * 4
    assert found.bytes_per_block == 3 * bytes_per_layer
    assert found.layer_places == ((0, 0), (0, bytes_per_layer), (0, 2 * bytes_per_layer))


def test_several_kinds_share_pages_of_equal_size() -> None:
    found = layout(spec(), *[spec(window=64)] * 5, spec())
    assert [group.layers for group in found.groups] == [(0, 6), (1, 2), (3, 4), (5,)]
    assert [group.window for group in found.groups] == [None, 64, 64, 64]
    assert {group.bytes_per_block for group in found.groups} == {found.bytes_per_block}
    assert found.layer_places[6] == (0, found.bytes_per_block // 2)


@pytest.mark.parametrize(
    ("kind_sizes", "width"),
    [
        ([1], 1),
        ([80], 80),
        ([1, 2], 1),  # 3 groups: 15%; with 2 layers each one place of 3 is lost, and 2 groups
        ([2, 5], 2),
        ([6, 30], 6),
        ([1, 27], 9),  # 4 groups and 8 of 28 places lost; the rarest kind's width has 28 groups
        ([27, 1], 9),
        ([20, 20], 20),
        ([2, 3], 1),
        ([2, 18], 6),  # 40%, as with 3: the wider one
    ],
)
def test_the_width_weighs_lost_places_against_groups(kind_sizes: list[int], width: int) -> None:
    assert choose_width(kind_sizes) == width


@pytest.mark.parametrize("kinds", [(1, 27), (27, 1)])
def test_a_lone_layer_of_its_kind_does_not_split_the_others_into_groups_of_one(
    kinds: tuple[int, int],
) -> None:
    found = layout(*[spec()] * kinds[0], *[spec(window=64)] * kinds[1])
    assert sorted(len(group.layers) for group in found.groups) == [1, 9, 9, 9]
    assert found.bytes_per_block == 9 * found.formats[0].bytes_per_layer
    assert len(set(found.layer_places)) == 28


def test_layers_of_other_sizes_are_another_kind() -> None:
    found = layout(spec(num_kv_heads=1), spec(num_kv_heads=4))
    assert [group.layers for group in found.groups] == [(0,), (1,)]
    assert found.bytes_per_block == found.formats[1].bytes_per_layer


def test_layers_of_a_block_lie_side_by_side_and_do_not_overlap() -> None:
    cache = KVCache(layout(*[spec()] * 3), 5, CPU)
    cache.storage.zero_()
    for number, layer in enumerate(cache.layers(), 1):
        layer.pages[2].fill_(number)
    block = cache.storage[2]
    part = cache.layout.formats[0].bytes_per_layer
    assert [int(block[at]) for at in (0, part, 2 * part)] == [1, 2, 3]
    assert int((block == 0).sum()) == 0
    assert int(cache.storage.sum()) == part * (1 + 2 + 3)


def test_groups_share_the_storage() -> None:
    cache = KVCache(layout(spec(), spec(window=8)), 4, CPU)
    full, window = cache.layers()
    assert (full.group, window.group) == (0, 1)
    assert full.pages.data_ptr() == window.pages.data_ptr()


def test_copies_move_whole_blocks() -> None:
    cache = KVCache(layout(spec()), 6, CPU)
    cache.storage.copy_(torch.arange(6)[:, None].expand(cache.storage.shape))
    cache.copy_blocks([BlockCopy(1, 4), BlockCopy(0, 5)])
    cache.copy_blocks([])
    assert cache.storage.float().mean(dim=1).tolist() == [0, 1, 2, 3, 1, 0]


@pytest.mark.parametrize("copy", [copy_in_turn, copy_at_once])
def test_one_block_may_be_copied_to_several(
    copy: Callable[[torch.Tensor, Sequence[BlockCopy]], None],
) -> None:
    if copy is copy_at_once:
        pytest.importorskip("triton")
    cache = KVCache(layout(*[spec()] * 3), 8, CPU)
    cache.storage.random_(0, 256)
    before = cache.storage.clone()
    copy(cache.storage, [BlockCopy(2, 7), BlockCopy(5, 1), BlockCopy(2, 0), BlockCopy(2, 4)])
    assert torch.equal(cache.storage, before[[2, 5, 2, 3, 2, 5, 6, 2]])


def test_memory_that_is_not_there() -> None:
    with pytest.raises(InsufficientMemoryError, match="lower kv_cache_memory or num_blocks"):
        KVCache(layout(spec()), 1 << 45, CPU)
