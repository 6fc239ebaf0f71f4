"""Codes out of words: those that `CodeWords` has by torch."""

import pytest
import torch
from tests.pairwise import pairwise

from quire.formats.block_quantized.weights import CodeWords
from quire.kernels.cpu.block_quantized.words import unpack_words

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def _words(num_rows: int, num_columns: int, gap: int) -> torch.Tensor:
    """gap: words between rows."""
    random = torch.Generator().manual_seed(num_rows * 1000 + num_columns)
    whole = torch.randint(-(1 << 31), 1 << 31, (num_rows, num_columns + gap), generator=random)
    return whole.int()[:, gap:]


@pairwise()
@pytest.mark.parametrize("num_rows", [8, 64, 200])
@pytest.mark.parametrize("num_columns", [1, 16, 37])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(("width", "order"), [(4, None), (8, None), (4, AWQ), (4, AWQ[::-1])])
def test_each_code_is_where_the_reference_has_it(num_rows, num_columns, gap, width, order) -> None:
    words = _words(num_rows, num_columns, gap)
    num_outputs = num_columns * (1 if order is None else 8)
    expected = CodeWords(words, width, 0, num_outputs, order).unpacked()
    found = unpack_words(words, width, order)
    assert found.dtype is torch.uint8 and torch.equal(found, expected)


def test_a_few_rows_of_no_whole_tile() -> None:
    words = _words(3, 5, 0)
    assert torch.equal(unpack_words(words, 4), CodeWords(words, 4, 0, 5).unpacked())


@pytest.mark.parametrize(
    ("named", "words", "width", "order"),
    [
        ("words", torch.zeros(8, 8), 4, None),
        ("words", _words(8, 8, 0).T, 4, None),
        ("words", _words(8, 8, 0)[0], 4, None),
        ("width", _words(8, 8, 0), 5, None),
        ("order", _words(8, 8, 0), 8, AWQ),
        ("order", _words(7, 8, 0), 4, AWQ),
        ("order", _words(8, 8, 0), 4, (0,) * 8),
    ],
)
def test_errors_name_the_bad_argument(named, words, width, order) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        unpack_words(words, width, order)
