"""Pages of the block map: plain data, bounded, and together the whole map."""

import json

from quire.core.kv_groups import KVKind
from quire.core.memory.memory_report import BlockMap, BlockState, BlockUse
from quire.engine_client.block_page import block_page

OWNERS = (("a", 0), ("a", 1), ("b", 0))


def block(index: int, *owners: tuple[str, int]) -> BlockUse:
    state = BlockState.HELD if owners else BlockState.FREE
    group, fill, kind = (0, index, KVKind.WINDOW) if owners else (None, None, None)
    return BlockUse(index, state, group, len(owners), owners, index % 3, fill, kind)


def test_a_page_names_each_sequence_once() -> None:
    blocks = (block(4, OWNERS[2], OWNERS[0]), block(5), block(6, OWNERS[0], OWNERS[1]))
    page = block_page(BlockMap(9, 16, 4, blocks))
    assert json.loads(json.dumps(page)) == page
    assert page["sequences"] == [["b", 0], ["a", 0], ["a", 1]]
    assert [entry["owners"] for entry in page["blocks"]] == [[0, 1], [], [1, 2]]
    assert page["blocks"][0] == {
        "block": 4,
        "state": "held",
        "group": 0,
        "kind": "window",
        "ref_count": 2,
        "owners": [0, 1],
        "heat": 1,
        "fill": 4,
    }
    assert page["blocks"][1]["state"] == "free"
    assert page["blocks"][1]["group"] is None and page["blocks"][1]["fill"] is None
    assert page["blocks"][1]["kind"] is None
    bounds = {name: page[name] for name in ("num_blocks", "block_size", "first_block")}
    assert bounds == {"num_blocks": 9, "block_size": 16, "first_block": 4}
    assert page["next_block"] == 7


def test_pages_follow_one_another_to_the_end() -> None:
    blocks = tuple(block(index, *OWNERS[: index % 4]) for index in range(20))
    found, first = [], 0
    while first is not None:
        page = block_page(BlockMap(20, 16, first, blocks[first : first + 6]), max_num_owners=4)
        num_owners = sum(len(entry["owners"]) for entry in page["blocks"][:-1])
        assert num_owners < 4 and 1 <= len(page["blocks"]) <= 6
        found += [
            (entry["block"], tuple(tuple(page["sequences"][place]) for place in entry["owners"]))
            for entry in page["blocks"]
        ]
        first = page["next_block"]
    assert found == [(use.block, use.owners) for use in blocks]


def test_page_past_the_last_block_is_empty() -> None:
    page = block_page(BlockMap(20, 16, 30, ()))
    assert page["blocks"] == [] and page["next_block"] is None
