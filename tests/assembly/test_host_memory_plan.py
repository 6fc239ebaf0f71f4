"""How many blocks a sequence takes of groups of all kinds, and how long one may be."""

import pytest

from quire.assembly.host_memory_plan import blocks_for, fitting_tokens
from quire.core.kv_groups import KVGroup, KVKind
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import KVCacheLayout

FULL = KVGroup((0,), KVKind.FULL, 64)
WINDOW = KVGroup((1,), KVKind.WINDOW, 64, window=100)
STATE = KVGroup((0,), KVKind.STATE, 64, num_state_blocks=5)
OPTIONS = EngineOptions.from_mapping({"block_size": 16, "max_num_batched_tokens": 64})


def layout(*groups: KVGroup) -> KVCacheLayout:
    return KVCacheLayout(groups, 64, (), ())


@pytest.mark.parametrize(
    ("groups", "num_tokens", "num_blocks"),
    [
        ((FULL,), 33, 3),
        ((FULL, FULL), 33, 6),
        (
            (FULL, WINDOW, STATE),
            33,
            3 + 3 + 5 + 7,
        ),  # the states and parts of two blocks to go on from
        ((FULL, WINDOW, STATE), 1600, 100 + 11 + 5 + 7),
        ((STATE,), 1600, 5 + 5),
    ],
)
def test_a_sequence_holds_of_each_group_what_its_kind_says(
    groups: tuple[KVGroup, ...], num_tokens: int, num_blocks: int
) -> None:
    assert blocks_for(num_tokens, OPTIONS, layout(*groups)) == num_blocks


@pytest.mark.parametrize(
    ("groups", "num_blocks", "num_tokens"),
    [
        ((FULL,), 10, 160),
        ((FULL, FULL), 11, 80),
        ((FULL, STATE), 16, 80),
        ((FULL, STATE), 11, 0),
        ((FULL, WINDOW), 20, 144),
        ((FULL, WINDOW), 40, 27 * 16),  # of the window never more than 11
        ((WINDOW, STATE), 22, 4096),
        ((WINDOW, STATE), 21, 160),
        ((STATE,), 10, 4096),
        ((STATE,), 9, 0),
    ],
)
def test_the_longest_sequence_takes_all_blocks_and_no_more(
    groups: tuple[KVGroup, ...], num_blocks: int, num_tokens: int
) -> None:
    found = fitting_tokens(num_blocks, 4096, OPTIONS, layout(*groups))
    assert found == num_tokens
    if found:
        assert blocks_for(found, OPTIONS, layout(*groups)) <= num_blocks
    if found < 4096:
        assert blocks_for(found + 1, OPTIONS, layout(*groups)) > num_blocks
