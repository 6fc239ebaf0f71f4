"""Which rows share which tiles: runs of a tree of block tables."""

from itertools import pairwise

import numpy as np
import pytest

from quire.attention.shared_prefix import DecodeRows, shared_runs

TILE = 32
POISON = 10**9


def make_rows(tables, high, low=None):
    """Rows in reverse order in a table whose other entries differ by row and may not be read."""
    width = max(map(len, tables)) + 3
    block_table = POISON + np.arange(len(tables) * width, dtype=np.int32).reshape(-1, width)
    for row, table in enumerate(reversed(tables)):
        block_table[row, : len(table)] = table
    table_rows = np.arange(len(tables))[::-1].copy()
    low = np.zeros(len(tables), np.int64) if low is None else np.array(low)
    return DecodeRows(block_table, table_rows, low, np.array(high))


def runs_of(decodes, block_size=16, min_saved_tiles=1):
    runs = shared_runs(decodes, block_size, TILE, min_saved_tiles)
    return sorted((run.rows.tolist(), run.first_tile, run.end_tile) for run in runs)


def fork(shared, num_rows, num_own=2):
    """Tables that begin with `shared` and end with blocks of their own."""
    return [[*shared, *range(1000 + 50 * i, 1000 + 50 * i + num_own)] for i in range(num_rows)]


def test_nothing_is_shared():
    decodes = make_rows([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [48, 40, 33])
    assert runs_of(decodes) == []


def test_equal_blocks_that_are_not_a_prefix_are_not_shared():
    decodes = make_rows([[1, 2, 3, 9], [4, 2, 3, 9], [5, 1, 2, 3]], [64] * 3)
    assert runs_of(decodes) == []


def test_only_whole_tiles_of_the_common_prefix():
    """Five blocks of 16 are two tiles and a half."""
    decodes = make_rows(fork(range(5), 3), [100, 112, 90])
    assert runs_of(decodes) == [([0, 1, 2], 0, 2)]


def test_a_block_may_hold_many_tiles():
    decodes = make_rows(fork([1, 2], 2), [600, 700])
    assert runs_of(decodes, block_size=256) == [([0, 1], 0, 16)]


def test_no_more_than_the_shortest_row_sees():
    """Its last block, of which it sees a part, is not shared with it but among the others."""
    tables = [[*range(10), *own] for own in ([], [90], [91])]
    decodes = make_rows(tables, [70, 170, 165])
    assert runs_of(decodes) == [([0, 1, 2], 0, 2), ([1, 2], 2, 5)]


def test_runs_form_a_tree():
    root, left, right = range(8), range(10, 14), range(20, 26)
    tables = [
        [*root, *left, 101],
        [*root, *right, 102],
        [*root, *left, 103],
        [*root, 104],
        [*root, *right, 105],
        [200, 201],
    ]
    decodes = make_rows(tables, [16 * len(table) for table in tables])
    assert runs_of(decodes) == [
        ([0, 1, 2, 3, 4], 0, 4),
        ([0, 2], 4, 6),
        ([1, 4], 4, 7),
    ]


def test_runs_of_a_row_come_in_the_order_of_positions():
    tables = [[*range(40), *range(100, 100 + i), 200 + i] for i in range(1, 30)]
    runs = shared_runs(make_rows(tables, [16 * len(t) for t in tables]), 16, TILE, 1)
    assert len(runs) > 5
    for row in range(len(tables)):
        ends = [(run.first_tile, run.end_tile) for run in runs if row in run.rows]
        assert ends[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(ends))


def test_a_run_that_saves_too_little_is_left_to_its_parts():
    """Three rows share 2 tiles (saving 4), two of them 6 more: together 8 tiles."""
    tables = [[*range(16), 100], [*range(16), 101], [*range(4), 102, 103]]
    decodes = make_rows(tables, [16 * len(table) for table in tables])
    assert runs_of(decodes, min_saved_tiles=4) == [([0, 1], 2, 8), ([0, 1, 2], 0, 2)]
    assert runs_of(decodes, min_saved_tiles=5) == [([0, 1], 0, 8)]
    assert runs_of(decodes, min_saved_tiles=9) == []


@pytest.mark.parametrize("num_shared", [15, 16, 17, 47, 48, 49, 500])
def test_long_prefixes_are_compared_in_strides(num_shared):
    decodes = make_rows(fork(range(num_shared), 4), [16 * num_shared + 20] * 4)
    assert runs_of(decodes) == [([0, 1, 2, 3], 0, num_shared // 2)]


def test_table_comparison_stops_at_the_first_difference():
    """A million entries of a row: comparing them would show."""
    entries = np.zeros((2, 1_000_000), np.int32)
    entries[1] = 1
    entries[:, 0] = 7
    touched = entries.view(_Counted)
    touched.num_read = 0
    decodes = DecodeRows(touched, np.arange(2), np.zeros(2, np.int64), np.full(2, 16_000_000))
    assert shared_runs(decodes, 16, TILE, 1) == []
    assert 0 < touched.num_read < 100


class _Counted(np.ndarray):
    """Counts the entries that are indexed."""

    num_read = 0

    def __getitem__(self, index):
        found = np.asarray(self)[index]
        self.num_read += found.size
        return found


def test_windows_share_what_all_of_them_see():
    """Both begin in block 3, at positions 50 and 60: tile 1 is cut, tile 2 is the first whole."""
    tables = [[-1, -1, -1, *range(3, 20), 100], [-1, -1, -1, *range(3, 20), 101]]
    decodes = make_rows(tables, [330, 330], low=[50, 60])
    assert runs_of(decodes) == [([0, 1], 2, 10)]


def test_windows_that_begin_in_other_blocks_do_not_share():
    tables = [[-1, -1, -1, *range(3, 20), 100], [-1, -1, *range(2, 20), 101]]
    decodes = make_rows(tables, [330, 330], low=[50, 40])
    assert runs_of(decodes) == []
