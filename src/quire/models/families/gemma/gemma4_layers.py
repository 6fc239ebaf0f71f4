"""The modules of Gemma 4. `gemma4.py` lists its differences from Gemma 3.

Shapes: T tokens, H hidden size, L layers, P size of a per-layer input (`PerLayerInputs`).
"""

from typing import Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.formats.weight_format import empty_parameter
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles, Rotation
from quire.layers.embedding import VocabEmbedding
from quire.layers.experts import MoESpec, SparseMLP
from quire.layers.linear import Linear, LinearKind
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import DecoderConfig
from quire.models.decoder import make_norm
from quire.models.families.gemma.gemma2 import GemmaForCausalLM
from quire.models.families.gemma.gemma4 import Gemma4Config, rename_gemma4, unused_keys
from quire.models.interface import InputEmbeds
from quire.models.layer_kinds import FULL
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry


class Gemma4Attention(OperatorModule):
    """Attention with its own keys and values, or with those that an earlier layer stored."""

    def __init__(self, config: Gemma4Config, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        spec = config.attention_spec(layer)
        self.head_dim, self.eps = spec.head_dim, config.rms_norm_eps
        self.stored_by = config.stored_by(layer)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        inputs = config.hidden_size
        # The linear's name determines its parts, as in `checkpoint_parts`.
        self.part_sizes: tuple[int, ...] = (q_size, kv_size, kv_size)
        self.projection = "qkv_proj"
        if self.stored_by != layer:
            self.part_sizes, self.projection = (q_size,), "q_proj"
        elif config.keys_are_values and config.layer_types[layer] == FULL:
            self.part_sizes, self.projection = (q_size, kv_size), "qk_proj"
        linear = Linear(inputs, self.part_sizes, LinearKind.COLUMN, bias=config.qkv_bias, **storage)
        self.add_module(self.projection, linear)
        self.o_proj = Linear(q_size, (inputs,), LinearKind.ROW, bias=config.output_bias, **storage)
        norms = [
            RMSNorm(spec.head_dim, self.eps, **storage, offset=config.norm_offset)
            for _ in self.part_sizes[:2]
        ]
        self.q_norm = norms[0]
        self.k_norm = norms[1] if len(norms) == 2 else None

    def forward(
        self, hidden: torch.Tensor, angles: Angles, attention: AttentionCall
    ) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        projected = self.get_submodule(self.projection)(hidden)
        parts = [
            part.unflatten(-1, (-1, self.head_dim))
            for part in projected.split(self.part_sizes, dim=-1)
        ]
        k_norm = None if self.k_norm is None else self.k_norm.weight
        rotation = Rotation(angles, self.q_norm.weight, k_norm, self.eps, self.q_norm.offset)
        k = v = None
        if len(parts) > 1:
            # `attention` may norm k in place. v may be made of the same tensor, so it comes first.
            k = parts[1]
            v = self.operators.rms_norm(parts[-1], None, self.eps)
        attended = attention(self.stored_by, AttentionInputs(parts[0], k, v, rotation=rotation))
        output: torch.Tensor = self.o_proj(attended.flatten(-2))
        return output


class Gemma4Mixture(SparseMLP):
    """A mixture of experts whose router has its own norm of the residual stream."""

    def __init__(self, config: Gemma4Config, spec: MoESpec, **storage: Unpack[Storage]) -> None:
        super().__init__(config.hidden_size, spec, **storage)
        #: The weight [H] of the router's norm.
        self.scale = empty_parameter((config.hidden_size,), **storage)
        self.eps = config.rms_norm_eps
        self.root = config.hidden_size**-0.5

    def mix(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """x [T, H] for the experts, stream [T, H] for the router -> [T, H]."""
        normed = self.operators.rms_norm(stream, self.scale, self.eps)
        logits = self.gate(self.operators.scale(normed, self.root))
        routing = self.operators.route(logits, self.gate.correction, self.spec.router, x.dtype)
        output: torch.Tensor = self.experts(x, routing)
        return output if self.join is None else self.join(output)


class Gemma4Layer(OperatorModule):
    """Attention, an MLP, optional experts, and an optional block for the per-layer input.

    The last block reads the residual stream itself; the others read its norm. Each block adds the
    norm of its result to the stream.
    """

    def __init__(self, config: Gemma4Config, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        # First, attention and the MLP, with their norms.
        self.input_layernorm, self.post_attention_layernorm = _norms(config, **storage)
        self.self_attn = Gemma4Attention(config, layer, **storage)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = _norms(config, **storage)
        self.activation = config.activation
        self.mlp = MLP(
            config.hidden_size,
            config.mlp_size(layer),
            bias=False,
            activation=config.activation,
            **storage,
        )
        # Then, the mixture of experts and its norms.
        self.mixture: Gemma4Mixture | None = None
        spec = config.mixture_of(layer)
        if spec is not None:
            self.mixture = Gemma4Mixture(config, spec, **storage)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = _norms(
                config, **storage
            )
            self.pre_feedforward_layernorm_2 = make_norm(config, **storage)
        self.layer_scalar = nn.Parameter(torch.empty(1, **storage), requires_grad=False)
        self._factor: float | None = None
        # Last, the block that adds the layer's own input.
        self.per_layer_input_gate: Linear | None = None
        size = config.per_layer_size
        if size:
            self.per_layer_input_gate, self.per_layer_projection = (
                Linear(inputs, (outputs,), LinearKind.REPLICATED, bias=False, **storage)
                for inputs, outputs in ((config.hidden_size, size), (size, config.hidden_size))
            )
            self.post_per_layer_input_norm = make_norm(config, **storage)

    def forward(
        self,
        stream: ResidualStream,
        angles: Angles,
        attention: AttentionCall,
        own_input: torch.Tensor | None,
    ) -> None:
        """Add the blocks' results to the stream, and scale it. `own_input` [T, P], the per-layer
        input, may be overwritten."""
        attended = self.self_attn(stream.normed(self.input_layernorm), angles, attention)
        stream.add(self.post_attention_layernorm(attended, overwrites=True))
        output = self.mlp(stream.normed(self.pre_feedforward_layernorm))
        if self.mixture is not None:
            output = self.post_feedforward_layernorm_1(output, overwrites=True)
            normed = self.pre_feedforward_layernorm_2(stream.read())
            mixed = self.mixture.mix(normed, stream.read())
            mixed = self.post_feedforward_layernorm_2(mixed, overwrites=True)
            output = self.operators.add(mixed, output)
        stream.add(self.post_feedforward_layernorm(output, overwrites=True))
        if self.per_layer_input_gate is not None:
            assert own_input is not None
            gate = self.per_layer_input_gate(stream.read())
            gated = self.operators.gate(own_input, gate, self.activation)
            output = self.per_layer_projection(gated)
            stream.add(self.post_per_layer_input_norm(output, overwrites=True))
        stream.scale(self._own_factor())

    def _own_factor(self) -> float:
        if self._factor is None:  # read only once, since this waits for the device
            self._factor = self.layer_scalar.item()
        return self._factor


def _norms(config: DecoderConfig, **storage: Unpack[Storage]) -> tuple[RMSNorm, RMSNorm]:
    first, second = (make_norm(config, **storage) for _ in range(2))
    return first, second


class PerLayerInputs(OperatorModule):
    """Computes an input for each layer: the layer's own embedding of the token, added to a
    projection of the model's embedding."""

    def __init__(self, config: Gemma4Config, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.size = config.per_layer_size
        total = config.num_layers * self.size
        self.embed_tokens_per_layer = VocabEmbedding(config.vocab_size, total, **storage)
        self.per_layer_model_projection = Linear(
            config.hidden_size, (total,), LinearKind.REPLICATED, bias=False, **storage
        )
        self.per_layer_projection_norm = RMSNorm(
            self.size, config.rms_norm_eps, offset=config.norm_offset, **storage
        )
        self.embedding_scale = torch.tensor(self.size**0.5, dtype=storage["dtype"]).item()
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, token_ids: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """token_ids [T], embeds [T, H] -> L tensors [T, P]."""
        own = self.operators.scale(self.embed_tokens_per_layer(token_ids), self.embedding_scale)
        projected = self.per_layer_model_projection(embeds)
        projected = self.operators.scale(projected, self.projection_scale)
        heads = torch.unflatten(projected, -1, (-1, self.size))
        normed = self.per_layer_projection_norm(heads, overwrites=True)
        total = self.operators.add(own, normed.flatten(-2))
        return torch.split(self.operators.scale(total, 2**-0.5), self.size, dim=-1)


class Gemma4ForCausalLM(GemmaForCausalLM):
    """A decoder of `Gemma4Layer`s."""

    layer_type = Gemma4Layer

    def __init__(
        self, config: Gemma4Config, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.per_layer_inputs: PerLayerInputs | None = None
        if config.per_layer_size:
            self.per_layer_inputs = PerLayerInputs(config, **storage)
            self.content_token_id = config.pad_token_id

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        embeds = self.embed(token_ids)
        if input_embeds is not None:
            embeds = self.operators.put_rows(embeds, *input_embeds)
        own_inputs: tuple[torch.Tensor | None, ...] = (None,) * len(self.model.layers)
        if self.per_layer_inputs is not None:
            own_inputs = self.per_layer_inputs(token_ids, embeds)
        angles = self.model.angles(positions)
        stream = ResidualStream(embeds, self.operators)
        for index, layer in enumerate(self.model.layers):
            layer(stream, angles[index], attention, own_inputs[index])
        return stream.normed(self.model.norm)


ENTRY = ModelEntry(
    Gemma4Config,
    Gemma4ForCausalLM,
    {**CHECKPOINT_PARTS, "qk_proj": ("q_proj", "k_proj")},
    rename=rename_gemma4,
    arrangement=unused_keys,
    unstack=UnstackedCheckpoint,
)
