"""How layers form groups and pages, and that copies move whole blocks."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.step import BlockCopy
from quire.errors import InsufficientMemoryError
from quire.runtime.kv_cache import KVCache, copy_at_once, copy_in_turn
from quire.runtime.page_layout import KVCacheLayout, plan_layout

CPU = torch.device("cpu")


def spec(window: int | None = None, num_kv_heads: int = 2) -> AttentionSpec:
    return AttentionSpec(4, num_kv_heads, 16, 0.25, window)


def layout(*specs: AttentionSpec, block_size: int = 16) -> KVCacheLayout:
    return plan_layout(specs, TorchPagedAttention, block_size, KVFormat.plain(torch.float32))


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


def test_cache_above_the_machines_memory_is_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="lower kv_cache_memory or num_blocks"):
        KVCache(layout(spec()), 1 << 45, CPU)


def test_memory_that_was_asked_for_is_given_back() -> None:
    """And no more is asked for."""
    cache, may_go_on = KVCache(layout(spec()), 4, CPU), threading.Event()
    cache.touch(cache.storage.nbytes, may_go_on.is_set)
    cache.release()
    may_go_on.set()
    assert cache._first_touch is not None and cache._first_touch.num_bytes_touched == 0
    cache.storage.fill_(1)
