"""How texts are cut into windows, and which of their tokens count."""

import pytest

from quire.bench.quality.windows import Window, cut


def test_the_second_half_of_each_window_counts():
    windows = list(cut(range(10), 4))
    assert windows == [Window((0, 1, 2, 3), 2), Window((4, 5, 6, 7), 2)]
    assert [window.num_counted for window in windows] == [2, 2]


def test_a_short_last_window_counts_what_has_half_a_window_before_it():
    assert list(cut(range(7), 4))[1:] == [Window((4, 5, 6), 2)]
    assert list(cut(range(6), 4)) == [Window((0, 1, 2, 3), 2)]


@pytest.mark.parametrize(("length", "counted"), [(0, 0), (1, 0), (2, 1), (3, 2), (5, 3)])
def test_a_short_text_is_a_window_of_its_own_length(length, counted):
    assert sum(window.num_counted for window in cut(range(length), 1024)) == counted


def test_each_window_begins_with_the_tokenizers_prefix():
    windows = list(cut(range(5), 4, [9]))
    assert windows == [Window((9, 0, 1, 2), 2), Window((9, 3, 4), 2)]


def test_a_prefix_never_counts():
    assert list(cut([1], 4, [7, 8])) == [Window((7, 8, 1), 2)]


def test_the_position_before_each_counted_token_predicts_it():
    window = Window((5, 6, 7, 8), 2)
    assert list(range(4))[window.predicting] == [1, 2]
