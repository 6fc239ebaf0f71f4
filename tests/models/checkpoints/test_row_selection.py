"""Parameters made of selected rows of a tensor: every span of their rows, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.models.checkpoints.arranged import ArrangedCheckpoint, Arrangement
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.checkpoints.row_selection import IndexedRows, TransposedRows

NUM_HEADS, STRIDE, WIDTH = 3, 7, 5
ORDER = torch.randperm(15, generator=torch.Generator().manual_seed(1))


PARTS = {
    "some": IndexedRows(ORDER, NUM_HEADS * STRIDE),
    "keys": TransposedRows(start=9, num_rows=4, num_source_rows=NUM_HEADS * STRIDE),
}
ARRANGEMENT = Arrangement(selected={"fused": PARTS})


@pytest.fixture
def whole() -> torch.Tensor:
    return torch.randn(NUM_HEADS * STRIDE, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def checkpoint(tmp_path: Path, whole: torch.Tensor) -> ArrangedCheckpoint:
    weights = {
        "a.fused.weight": whole,
        "a.fused.bias": whole[:, 0].clone(),
        "a.other.weight": torch.arange(4.0),
    }
    save_file(weights, tmp_path / "model.safetensors")
    return ArrangedCheckpoint(open_checkpoint(tmp_path), ARRANGEMENT)


def test_any_piece_of_every_tensor(checkpoint, whole):
    bias = whole[:, 0]
    expected = {
        "some.weight": whole[ORDER],
        "some.bias": bias[ORDER],
        "keys.weight": whole[9:13].T,
        "keys.bias": bias[None, 9:13],
        "other.weight": torch.arange(4.0),
    }
    assert checkpoint.names == {f"a.{name}" for name in expected}
    for part, tensor in expected.items():
        name = f"a.{part}"
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == torch.float32
        for start in range(len(tensor)):
            for stop in range(start + 1, len(tensor) + 1):
                with checkpoint.rows(name, range(start, stop)) as rows:
                    assert torch.equal(rows, tensor[start:stop]), (name, start, stop)


def test_reads_hardly_more_than_it_wants(whole):
    """Rows that lie far apart are not read through."""
    wanted = torch.tensor([0, 1, 18, 19, 20])
    read = []

    class Lent:
        def __init__(self, rows):
            read.extend(rows)
            self.rows = rows

        def __enter__(self):
            return whole[self.rows.start : self.rows.stop]

        def __exit__(self, *_):
            pass

    found = IndexedRows(wanted, len(whole)).read(Lent, range(5))
    assert torch.equal(found, whole[wanted])
    assert len(read) <= 2 * len(wanted)


def test_refuses_a_tensor_with_another_number_of_rows(tmp_path):
    save_file({"a.fused.weight": torch.zeros(4, WIDTH)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"a.fused.weight' has 4 rows, but config.json says 21"
    ):
        ArrangedCheckpoint(open_checkpoint(tmp_path), ARRANGEMENT)
