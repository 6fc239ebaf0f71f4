"""A model whose tokens depend on each other beside attention is found out."""

import pytest
import torch

from quire.attention.interface import AttentionSpec
from quire.errors import UnsupportedModelError
from quire.kernels.attention_inputs import AttentionInputs
from quire.models.fallback.row_check import check_rows
from quire.models.interface import TextModel


class OneLayer(TextModel):
    """A layer of attention over what `mix` makes of token ids and positions."""

    def __init__(self, mix):
        super(TextModel, self).__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(32, 16, generator=generator))
        self.mix = mix
        self.vocab_size = 32
        self.attention_specs = (AttentionSpec(2, 1, 8, 1.0),)

    def forward(self, token_ids, positions, attention, *, input_embeds=None):
        x = self.mix(self.table[token_ids], positions)
        k = v = x[:, :8].unflatten(1, (1, 8))
        return attention(0, AttentionInputs(x.unflatten(1, (2, 8)), k, v)).flatten(1)


def test_rows_by_themselves_pass():
    check_rows(OneLayer(lambda x, positions: x + positions[:, None].cos()), 64)
    check_rows(OneLayer(lambda x, positions: x), 2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, positions: x + torch.roll(x, 1, 0),  # a convolution
        lambda x, positions: x.cumsum(0),  # a state
        lambda x, positions: x + torch.arange(len(x))[:, None],  # positions of its own
    ],
)
def test_rows_that_mix_are_refused(mix):
    with pytest.raises(UnsupportedModelError, match="depend on each other"):
        check_rows(OneLayer(mix), 64)
