"""States of one sequence in pages of their own, for models that are run by hand."""

import torch

from quire.models.interface import TextModel
from quire.recurrence.state_backend import LayerStates, StateBatch
from quire.recurrence.torch_states import TorchStates


class PlainStates:
    """Moves a model's states in torch: of all its layers, of one sequence from token 0."""

    def __init__(self, model: TextModel) -> None:
        self.num_tokens = 0
        self.backend = TorchStates()
        specs = model.recurrent_specs
        layers = [
            LayerStates(
                # Garbage, as a pool has it before a sequence's first token: NaN, read as fp32.
                pages=torch.full((1, spec.num_units * spec.unit_bytes), 0xFF, dtype=torch.uint8),
                group=0,
                first_unit=0,
                units_per_page=spec.num_units,
            )
            for spec in specs
        ]
        self.backend.bind(specs, tuple(layers))
        model.use_states(self.backend)

    def plan(self, num_tokens: int) -> None:
        """The next step has so many tokens."""
        self.num_tokens += num_tokens
        self.backend.plan(
            StateBatch(
                query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
                context_lens=torch.tensor([self.num_tokens], dtype=torch.int32),
                rows=torch.tensor([0]),
                query_lens_list=[num_tokens],
                context_lens_list=[self.num_tokens],
                rows_list=[0],
                num_decodes=int(num_tokens == 1),
                tables=(torch.zeros((1, 1), dtype=torch.int32),),
            )
        )
