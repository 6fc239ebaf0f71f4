"""The two ends of a model: token ids to vectors, and vectors to logits. Called by the models.

Shapes: T tokens, R rows that need logits, H hidden size, V vocabulary size.
"""

import torch
from torch import nn
from torch.nn import functional

from quire.layers.linear import empty_parameter


class VocabEmbedding(nn.Module):
    """One vector of the model's width for each token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64, each below V -> [T, H]."""
        return functional.embedding(token_ids, self.weight)


class LMHead(nn.Module):
    """Logits over the vocabulary. A tied head has the embedding's weight for its own."""

    def __init__(self, embedding: VocabEmbedding, *, tied: bool) -> None:
        super().__init__()
        weight = embedding.weight
        self.weight = (
            weight if tied else empty_parameter(tuple(weight.shape), weight.dtype, weight.device)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, V] fp32; the product itself is in the model's dtype."""
        return functional.linear(hidden, self.weight).float()
