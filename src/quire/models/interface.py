"""The interface of a model, as the engine calls it.

No model file knows ranks, devices, quantization or block tables.

To add a family: one file in `families/` with its config and its modules, one line in `registry.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.layers.operator_module import OperatorModule
from quire.layers.recurrent import RecurrentModule
from quire.models.config import ModelConfig
from quire.recurrence.state_backend import RecurrentSpec, StateBackend


@dataclass(slots=True)
class ModelOutput:
    """hidden: [T, hidden_size], after the final norm. captured: by layer index, the residual stream
    [T, hidden_size] after the layers that were asked for."""

    hidden: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


class TextModel(OperatorModule, ABC):
    """A model of tokens, from their ids to their hidden states.

    vocab_size: of the tokens that it is given. attention_specs: one for each attention layer, in
    the order of attention's `layer` argument. recurrent_specs: one for each `RecurrentModule`, by
    its `layer`; recurrence: what moves their states, None where there are none.

    What is computed between linears and attention is computed by `operators`, and there is no other
    form of the model: on the CPU `forward`, and `logits`, are recorded once as native operations
    (`kernels.cpu.recorder`). Where torch computes something itself, it is run module by module.
    """

    vocab_size: int
    hidden_size: int
    attention_specs: tuple[AttentionSpec, ...]
    recurrent_specs: tuple[RecurrentSpec, ...] = ()
    recurrence: StateBackend | None = None

    @abstractmethod
    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        """config: of the family's own type; of one rank's share, where there are several.
        max_model_len: fixes rope types that depend on a length."""
        super().__init__()

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

        Exactly one of token_ids [T] int64 and input_embeds [T, hidden_size], as `embed` gives them,
        is there. capture_layers: EAGLE-3 drafts from the hidden states of three of them
        (arXiv:2503.01840).
        """

    def check_loaded(self) -> None:
        """Called once, with weights and operators, before the first step. Raises
        UnsupportedModelError for a model that would compute something else than it should."""

    def use_states(self, recurrence: StateBackend) -> None:
        """Let `recurrence` move the states of all recurrent layers, before the first step."""
        self.recurrence = recurrence
        for module in self.modules():
            if isinstance(module, RecurrentModule):
                module.states = recurrence

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """vectors [R, hidden_size], one of each sequence -> [R, num_labels] fp32, what the model's
        head says of them. Called only where the config has labels."""
        raise AssertionError(f"{type(self).__name__} has no head that scores")


class CausalLM(TextModel):
    """A decoder that predicts the next token."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> input embeddings [T, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size] fp32. Called only for rows that need them."""
