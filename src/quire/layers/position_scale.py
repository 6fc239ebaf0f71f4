"""Factors by which queries grow with their position, to keep long-context attention sharp.

Called by the models; `layers.attention` multiplies the queries. Source: Llama 4's temperature
tuning, after arXiv:2501.19399.

Shapes: T tokens.
"""

from dataclasses import dataclass

import torch

from quire.layers.operator_module import OperatorModule


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """A query at position p is multiplied by 1 + beta ln(1 + floor(p / length))."""

    beta: float
    length: int


class GrowthFactors(OperatorModule):
    """The factors of all positions below max_model_len, computed once."""

    table: torch.Tensor  # [max_model_len, 1]

    def __init__(
        self, growth: QueryGrowth, max_model_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        periods = torch.floor(torch.arange(max_model_len, dtype=torch.float32) / growth.length)
        factors = 1 + growth.beta * torch.log(1 + periods)
        self.register_buffer("table", factors[:, None].to(device, dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] -> [T, 1]."""
        return self.operators.embed(self.table, positions)
