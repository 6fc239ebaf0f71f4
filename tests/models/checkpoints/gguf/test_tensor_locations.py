"""Rows in another order, columns in another order, and tensors that are made of several."""

import pytest
import torch
from tests.gguf_writer import Raw, random_raw, write_gguf

from quire.hub.gguf.storage_types import STORAGE_TYPES
from quire.models.checkpoints.gguf.decoding import numbers
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_locations import CombinedStacks, StoredRows

ROWS, WIDTH = 70, 512
STORAGE = {storage.name: storage for storage in STORAGE_TYPES.values()}


def decoded(raw: Raw) -> torch.Tensor:
    content = torch.frombuffer(bytearray(raw.content), dtype=torch.uint8)
    storage = STORAGE[raw.kind]
    row_bytes = raw.shape[-1] // storage.block_size * storage.block_bytes
    return numbers(storage, content.view(-1, row_bytes)).view(raw.shape)


@pytest.fixture
def opened(tmp_path):
    """opened(tensors) -> the model with them"""

    def opened(**tensors):
        fields = {"general.architecture": "x"}
        return GGUFModel(write_gguf(tmp_path / "x.gguf", fields, tensors))

    return opened


def lent(location, model: GGUFModel, span: range) -> torch.Tensor:
    (rows,) = [rows.clone() for rows in location.lend(model, span)]
    return rows


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("start", [0, 30])
def test_order_of_rows_and_of_columns(kind, start, opened):
    raw = random_raw(kind, (ROWS, WIDTH), 1)
    model, whole = opened(w=raw), decoded(raw)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(ROWS - start, generator=generator)
    inputs = torch.randperm(WIDTH, generator=generator)
    location = StoredRows("w", (ROWS - start, WIDTH), start, order, inputs)
    expected = torch.empty(ROWS - start, WIDTH)
    expected[:, inputs] = whole[start:][order]
    for span in (range(ROWS - start), range(7, 8), range(3, 29)):
        assert torch.equal(lent(location, model, span), expected[span.start : span.stop])
        with location.lent_quantized(model, span) as codes:
            assert codes.block_format == location.block_format(model)
            assert torch.equal(codes.block_format.input_order.inputs(), inputs.int())
            assert torch.equal(codes.numbers(), expected[span.start : span.stop])
            picked = codes.picked(torch.tensor([0]))
            assert torch.equal(picked.numbers(), expected[span.start : span.start + 1])


def test_stacks_are_combined_as_they_are_needed(opened):
    first, second = random_raw("Q8_0", (5, 32, 64), 1), random_raw("Q4_0", (5, 7, 32), 2)
    model = opened(a=first, b=second)
    calls = []

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(len(a))
        return torch.cat((a.transpose(1, 2), b), 1)

    location = CombinedStacks((5 * 71, 32), ("a", "b"), 71, joined)
    expected = torch.cat((decoded(first).transpose(1, 2), decoded(second)), 1).view(-1, 32)
    for span, stacks in (
        (range(5 * 71), 5),
        (range(71), 1),
        (range(70, 143), 3),
        (range(9, 10), 1),
    ):
        assert torch.equal(lent(location, model, span), expected[span.start : span.stop])
        assert calls.pop() == stacks
    assert location.block_format(model) is None and location.dtype(model) == torch.float32
