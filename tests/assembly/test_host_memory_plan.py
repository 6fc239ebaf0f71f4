"""How many blocks a sequence takes of groups of all kinds, and how long one may be."""

import pytest

from quire.assembly import host_memory_plan
from quire.assembly.host_memory_plan import (
    _choose_num_blocks,
    _Taken,
    blocks_for,
    fitting_tokens,
)
from quire.core.kv_groups import KVGroup, KVKind
from quire.errors import InsufficientMemoryError
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


@pytest.mark.parametrize(
    ("engines_here", "most_gib", "expected_gib"),
    [
        (1, None, 0.3 * (96 - 8)),
        (2, None, 0.3 * (48 - 8)),
        (2, 60, 0.3 * (48 - 8)),  # the machine gives less than the engine's own node
        (2, 40, 0.3 * (40 - 8)),
        (4, 20, 0.3 * (20 - 8)),
    ],
)
def test_each_engine_has_its_share_once(
    engines_here: int,
    most_gib: int | None,
    expected_gib: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(host_memory_plan, "available_memory_bytes", lambda: 96 * gib)
    options = EngineOptions.from_mapping({"engines_here": engines_here, "max_num_seqs": 10**6})
    taken = _Taken(8 * gib, 0, None if most_gib is None else most_gib * gib)
    pages = KVCacheLayout((FULL,), 1 << 20, (), ())
    num_blocks = _choose_num_blocks(options, pages, 1 << 20, taken, True)
    assert num_blocks / 1024 == pytest.approx(expected_gib, abs=0.01)


def test_too_little_on_a_node_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory_plan, "available_memory_bytes", lambda: 96 << 30)
    pages = KVCacheLayout((FULL,), 1 << 20, (), ())
    with pytest.raises(InsufficientMemoryError, match="free for this engine on its memory nodes"):
        _choose_num_blocks(OPTIONS, pages, 100, _Taken(8 << 30, 0, 4 << 30), True)
