"""The picture of a hybrid's pages is what the memory does today."""

from xml.etree import ElementTree

from tools import hybrid_pages


def test_the_picture_in_the_docs_is_up_to_date() -> None:
    picture = hybrid_pages.draw()
    assert hybrid_pages.PICTURE.read_text(encoding="utf-8") == picture, (
        "run python tools/hybrid_pages.py"
    )
    cells = [
        element for element in ElementTree.fromstring(picture).iter() if "rx" in element.attrib
    ]
    assert len(cells) > hybrid_pages.NUM_BLOCKS, "tables and the pool"


def test_it_shows_what_its_text_says() -> None:
    memory, branches = hybrid_pages.serve()
    assert [branch.num_cached_tokens for branch in branches] == [24, 24]
    tables = [branch.block_tables for branch in branches]
    assert tables[0][0][:6] == tables[1][0][:6] == list(range(24, 30))
    assert all(-1 in table[1] and len(table[2]) == 3 for table in tables)
    assert memory.pool.num_free
