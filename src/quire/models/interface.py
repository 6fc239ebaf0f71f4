"""The interface of a model (hidden states, logits, scores) that the engine calls.

The code of a model does not depend on ranks, devices, quantization or block tables.

To add a family, add a file in `families/` with its config and modules, and a line in `registry.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.errors import UnsupportedModelError
from quire.layers.operator_module import OperatorModule, RecurrentModule
from quire.layers.rotary import AxisRotations
from quire.models.config import ModelConfig
from quire.recurrence.state_backend import RecurrentSpec, StateBackend


class InputEmbeds(NamedTuple):
    """Input embeddings that replace those of the token ids at some of a step's tokens."""

    #: [N] int64: the tokens' indices in the step, all different.
    places: torch.Tensor
    #: [N, hidden_size * k], where k is the model's `num_embed_parts`. The first part is an
    #: embedding as the model's `embed` would return it. Part i > 0 is added to the residual stream
    #: after layer i - 1 (DeepStack, arXiv:2406.04334).
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """The residual stream before some layers, kept for a head that drafts (EAGLE-3)."""

    #: Indices of the layers, in ascending order.
    layers: tuple[int, ...]
    #: [most tokens of a step, len(layers) * hidden_size]: the inputs of a token, layer by layer.
    #: Each call of `forward` overwrites the rows of its tokens.
    rows: torch.Tensor


class TextModel(OperatorModule, ABC):
    """A model that computes hidden states from token ids.

    Everything between linears and attention is computed by `operators`. On the CPU, `forward` and
    `logits` are recorded once as native operations (`kernels.cpu.recorder`). A model in which torch
    computes other operations is run module by module instead.
    """

    #: The number of token ids that the model accepts.
    vocab_size: int
    hidden_size: int
    #: Specs of the attention layers, indexed by the `layer` argument of the attention call.
    attention_specs: tuple[AttentionSpec, ...]
    #: Specs of the recurrent modules, indexed by the modules' attribute `layer`.
    recurrent_specs: tuple[RecurrentSpec, ...] = ()
    #: Updates the states of recurrent modules; None if there are none.
    recurrence: StateBackend | None = None
    #: Where `forward` keeps the inputs of some layers; None if nobody reads them.
    kept_inputs: KeptInputs | None = None
    #: The number of parts of hidden_size elements in the rows of `InputEmbeds`.
    num_embed_parts: int = 1
    #: The token id that must stand where `InputEmbeds` replace an embedding; None if any may.
    content_token_id: int | None = None
    #: Rotates tokens with positions on three axes; None if all positions have one axis.
    axis_rotations: AxisRotations | None = None
    #: Number of layers, the last ones, that the CPU computes for a model on another device.
    num_host_layers: int = 0

    @abstractmethod
    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        """`config` has the family's type, and describes this rank's shard of the model.

        `max_model_len` is the length for rope types that depend on a length.
        """
        super().__init__()

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        """Run all layers over `token_ids` [T] int64 at absolute `positions` [T] int64. Returns the
        hidden states [T, hidden_size] after the final norm.

        Where `input_embeds` replace an embedding, any token id of the vocabulary may stand, or
        `content_token_id` if the model names one.
        """

    def check_loaded(self) -> None:
        """Check the model once, after loading and before the first step.

        Raises UnsupportedModelError if the model would compute wrong results.
        """

    def keep_inputs(self, layers: tuple[int, ...], max_num_tokens: int) -> None:
        """Have `forward` keep the inputs of these layers, for steps of at most `max_num_tokens`.

        Called before a program is recorded. Raises UnsupportedModelError if the model can't.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} gives no inputs of its layers, which EAGLE-3 needs; leave out"
            " the model that drafts"
        )

    def take_contents(
        self, num_embed_parts: int, sections: tuple[int, int, int] | None, max_num_tokens: int
    ) -> None:
        """Prepare `forward` for the embeddings of contents, in steps of at most `max_num_tokens`.

        Called before a program is recorded. `num_embed_parts` is the k of `InputEmbeds.rows`.
        `sections` are those of `AxisRotations`; None if positions have one axis. Raises
        UnsupportedModelError if the model can't.
        """
        if num_embed_parts > 1 or sections is not None:
            raise UnsupportedModelError(
                f"{type(self).__name__} computes no images whose features are added to several"
                " layers or whose positions have several axes; set language_model_only=True"
            )

    def place_on_host(self, num_layers: int) -> None:
        """Let the CPU compute the last layers. The first layers and the head stay on the device.

        Called before linears get methods. Raises UnsupportedModelError if the model can't.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} can't have its layers on two devices; leave out cpu_layers"
        )

    def use_states(self, recurrence: StateBackend) -> None:
        """Set the backend of all recurrent layers' states, before the first step."""
        self.recurrence = recurrence
        for module in self.modules():
            if isinstance(module, RecurrentModule):
                module.states = recurrence

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the classification head: vectors [R, hidden_size] -> [R, num_labels] fp32.

        Called only if the config has labels, with one vector for each sequence.
        """
        raise AssertionError(f"{type(self).__name__} has no head that scores")


class CausalLM(TextModel):
    """A decoder that predicts the next token."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> input embeddings [T, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size] fp32, only for rows that need logits."""
