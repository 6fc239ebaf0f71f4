"""The contract of a model. No model file knows ranks, devices, quantization or block tables.

To add a model: one file with a frozen config (`from_hf` refuses fields it does not understand), the
layers, and the table of checkpoint names; one line in `registry.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import nn

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.kernels.cpu.program import Buffer, ProgramBuilder


@dataclass(slots=True)
class ModelOutput:
    """hidden: [T, hidden_size], after the final norm. captured: by layer index, the residual stream
    [T, hidden_size] after the layers that were asked for (EAGLE, embeddings)."""

    hidden: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


class CausalLM(nn.Module, ABC):
    """A decoder that predicts the next token.

    attention_specs: one for each attention layer, in the order of attention's `layer` argument.
    """

    vocab_size: int
    hidden_size: int
    attention_specs: tuple[AttentionSpec, ...]

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> input embeddings [T, hidden_size]."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: torch.Tensor | None = None,
        capture_layers: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Run all layers over T tokens at absolute `positions` [T] int64.

        Exactly one of token_ids [T] int64 and input_embeds [T, hidden_size] is given.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size] fp32. Called only for rows that need them."""

    def lower(self, program: ProgramBuilder) -> Buffer | None:
        """Write `forward` from token ids to the hidden states as operations of a native program.

        Called with all linears packed and no adapters. Returns where the hidden states are left;
        None: this model has no such form, and its modules are called.
        """
        return None
