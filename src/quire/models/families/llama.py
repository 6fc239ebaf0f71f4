"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783), the base of the other decoders here.

Pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and a SwiGLU MLP. The other
model files say only how they differ from this one, in their configs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.kernels.cpu.program import Buffer, ProgramBuilder
from quire.kernels.rotary import Angles
from quire.layers.attention import Attention, AttentionBias
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RopeLimits, RotaryEmbedding
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.interface import CausalLM, ModelOutput

# Our fused linears -> their parts' names in the checkpoint; all other names are equal.
CHECKPOINT_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Biases are options of the whole attention block and of the whole MLP."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(raw)
        attention_bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        return cls.read(
            fields, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=mlp_bias
        )


class DecoderLayer(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            layer,
            size,
            config.attention_specs[layer],
            bias=AttentionBias(qkv=config.qkv_bias, output=config.output_bias),
            qk_norm_eps=eps if config.qk_norm else None,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(
            size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        attention: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: what the layer before adds to the residual stream, [T, H]; the stream itself
        where residual is None. Returns the same pair for the next layer."""
        if residual is None:
            normed, residual = self.input_layernorm(hidden), hidden
        else:
            normed, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(normed, angles, attention)
        normed, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(normed), residual

    def lower(self, program: ProgramBuilder, residual: Buffer, rope_table: torch.Tensor) -> None:
        """`forward` as operations of a native program, which add to the residual stream."""
        normed = self.input_layernorm.lower(program, residual)
        self.self_attn.lower(program, normed, rope_table, residual)
        normed = self.post_attention_layernorm.lower(program, residual)
        self.mlp.lower(program, normed, residual)


class LlamaModel(nn.Module):
    """All of the model but its head; its tree is named as checkpoints name it."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        limits = RopeLimits(config.head_dim, config.max_position_embeddings, max_model_len)
        self.rotary = RotaryEmbedding(config.rope, limits, dtype=dtype, device=device)


class LlamaForCausalLM(CausalLM):
    """The decoder that all configs of this family describe."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.attention_specs = config.attention_specs
        self.model = LlamaModel(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.lm_head = LMHead(self.model.embed_tokens, tied=config.tie_word_embeddings)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self.model.embed_tokens(token_ids)
        return embeds

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: torch.Tensor | None = None,
        capture_layers: tuple[int, ...] = (),
    ) -> ModelOutput:
        if (token_ids is None) == (input_embeds is None):
            raise ValueError("give exactly one of token_ids and input_embeds")
        hidden = self.embed(token_ids) if token_ids is not None else input_embeds
        assert hidden is not None
        angles = self.model.rotary(positions)
        residual: torch.Tensor | None = None
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            hidden, residual = layer(hidden, residual, angles, attention)
            if index in capture_layers:
                captured[index] = residual + hidden
        assert residual is not None  # a config has at least one layer
        hidden, _ = self.model.norm.add(hidden, residual)
        return ModelOutput(hidden, captured)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def lower(self, program: ProgramBuilder) -> Buffer:
        residual = self.model.embed_tokens.lower(program)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.lower(program, residual, self.model.rotary.table)
        return self.model.norm.lower(program, residual)
