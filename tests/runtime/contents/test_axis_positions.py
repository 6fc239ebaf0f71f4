"""Rotary positions on three axes equal transformers', whatever the chunks."""

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding

from quire.core.content_spans import ContentSpan
from quire.layers.rotary import AxisRotations, DefaultRope, RopeLimits, RotaryEmbedding
from quire.runtime.contents.axis_positions import AxisPositions

LENGTH, STEP_TOKENS, NUM_ROWS = 64, 40, 3
SECTIONS = {"fitting": (4, 2, 2), "too long": (11, 11, 10)}
SPANS = (
    ContentSpan(3, 12, "a", (1, 3, 4)),
    ContentSpan(16, 4, "b", (1, 4, 1)),
    ContentSpan(24, 1, "c", (1, 1, 1)),
)
NUM_TOKENS = 32


def make(sections: str = "fitting") -> tuple[RotaryEmbedding, AxisPositions]:
    limits = RopeLimits(16, LENGTH, LENGTH)
    storage = {"dtype": torch.float32, "device": torch.device("cpu")}
    embedding = RotaryEmbedding(DefaultRope(1e4), limits, **storage)
    return embedding, AxisPositions(
        AxisRotations([embedding], SECTIONS[sections], STEP_TOKENS), NUM_ROWS
    )


def expected_angles(sections: str = "fitting") -> torch.Tensor:
    """transformers' cosines and sines [T, R] of a prompt with images at `SPANS`."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(SECTIONS[sections])}
    text = Qwen3VLTextConfig(head_dim=16, rope_parameters=rope)
    kinds = torch.zeros(1, NUM_TOKENS, dtype=torch.int32)
    for span in SPANS:
        kinds[0, span.first_position : span.end] = 1
    grids = torch.tensor([span.grid for span in SPANS]) * torch.tensor([1, 2, 2])

    class Holder:
        config = Qwen3VLConfig(text_config=text)
        get_vision_position_ids = Qwen3VLModel.get_vision_position_ids

    positions, _ = Qwen3VLModel.get_rope_index(Holder(), torch.zeros_like(kinds), kinds, grids)
    cos, sin = Qwen3VLTextRotaryEmbedding(text)(torch.zeros(1), positions)
    return torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=1)


@pytest.mark.parametrize("cuts", [[], [5], [3, 15], [10, 16, 17, 20, 26], range(1, 32)], ids=str)
@pytest.mark.parametrize("sections", SECTIONS)
def test_angles_equal_transformers(sections: str, cuts: list[int]) -> None:
    embedding, axes = make(sections)
    axes.set_row(1, SPANS)
    axes.fork(2, 1)
    axes.set_row(1, ())
    found = []
    for first, end in zip([0, *cuts], [*cuts, NUM_TOKENS], strict=True):
        number = STEP_TOKENS - (end - first)  # other rows of the step come first
        rows = axes.of_chunk(2, first, end - first, number)
        found.append(embedding.table[torch.from_numpy(rows)])
    assert torch.equal(torch.cat(found), expected_angles(sections))


def test_decodes_have_rows_of_their_own() -> None:
    embedding, axes = make()
    axes.set_row(0, SPANS)
    axes.set_row(2, SPANS[1:])
    rows, indices = np.array([0, 1, 2, 0]), np.array([28, 28, 17, 4])
    found = axes.of_decodes(rows, indices)
    shift = 4 - 12  # of the first image; the others have as many positions as tokens
    assert found[:2].tolist() == [28 + shift, 28]
    assert found[2:].tolist() == [LENGTH + 2, LENGTH + 3]
    assert torch.equal(embedding.table[found[3]], expected_angles()[4])


def test_text_has_the_rows_of_its_indices() -> None:
    _, axes = make()
    axes.set_row(0, ())
    assert axes.of_decodes(np.array([0, 1]), np.array([7, 3])).tolist() == [7, 3]
    assert axes.of_chunk(0, 5, 4, 9).tolist() == [5, 6, 7, 8]
    plain = AxisPositions(None, NUM_ROWS)
    plain.set_row(0, SPANS)  # a model with one axis
    assert plain.of_chunk(0, 0, NUM_TOKENS, 0).tolist() == list(range(NUM_TOKENS))
