"""Layers of quire with the call signatures of the transformers layers that they replace.

They compute with `operators`, so that a model made of these layers is recorded as one native
program (`kernels.cpu.recorder`), like quire's own models. Made by `parts.py`.

Shapes: T tokens, H hidden size, R elements of a head that rotate, L max_model_len.
"""

from typing import Any, Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionSpec
from quire.kernels.rotary import Angles
from quire.layers.attention import Attention, AttentionBias, QKNorm
from quire.layers.embedding import VocabEmbedding
from quire.layers.mlp import MLP
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.models.fallback.interfaces import ATTENDING

_POSITIONS_AT_ONCE = 1 << 14


class TokenEmbedding(VocabEmbedding):
    """An embedding of token ids [1, T] -> [1, T, H]."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ATTENDING.given(token_ids))
        embeds = ATTENDING.take_embeds()
        return (rows if embeds is None else self.operators.put_rows(rows, *embeds))[None]


class RowNorm(RMSNorm):
    """RMSNorm for x [1, T, H], or for x of another shape [..., H]."""

    def forward(self, x: torch.Tensor, *, overwrites: bool = False) -> torch.Tensor:
        if x.dim() == 3 and x.shape[0] == 1:
            return super().forward(x[0], overwrites=overwrites)[None]
        return super().forward(x, overwrites=overwrites)


class RowMLP(MLP):
    """A gated MLP for x [1, T, H], or for x of another shape [..., H]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x[0])[None] if x.dim() == 3 else super().forward(x)


class TableRotary(nn.Module):
    """A rotation whose cosines and sines come from a table made by transformers' own module. Rope
    types that depend on the context's length use `max_model_len`."""

    def __init__(
        self, original: Any, max_model_len: int, device: torch.device, *, is_fused: bool
    ) -> None:
        super().__init__()
        #: Whether all attention layers are `RowAttention`, which takes `Angles`.
        self.is_fused = is_fused
        self.config = original.config  # the model's own forward may read it
        probe = torch.empty(0, dtype=torch.float32)
        # The last positions are computed first, so that rope types that depend on the length use
        # the full length.
        starts = range(0, max_model_len, _POSITIONS_AT_ONCE)
        parts = []
        for start in reversed(starts):
            positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, max_model_len))
            cos, sin = original(probe, position_ids=positions[None])
            half = cos.shape[-1] // 2
            parts.append(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1))
        self.register_buffer("table", torch.cat(parts[::-1]).to(device), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """The `Angles` of `position_ids` [1, T] if `is_fused`, else (cosines, sines) [1, T, R]."""
        assert isinstance(self.table, torch.Tensor)
        angles = Angles(self.table, ATTENDING.given(position_ids), x.dtype)
        if self.is_fused:
            return angles
        cos, sin = angles.cos_sin()
        return cos[None], sin[None]


class RowAttention(Attention):
    """Attention of Llama, or of Qwen3, which normalises q and k: [1, T, H] -> [1, T, H]."""

    def __init__(self, original: Any, spec: AttentionSpec, **storage: Unpack[Storage]) -> None:
        q_norm = getattr(original, "q_norm", None)
        super().__init__(
            0,
            original.q_proj.in_features,
            spec,
            bias=AttentionBias(
                qkv=original.q_proj.bias is not None, output=original.o_proj.bias is not None
            ),
            qk_norm=None if q_norm is None else QKNorm(q_norm.variance_epsilon),
            **storage,
        )

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, position_embeddings: Angles, **_: Any
    ) -> tuple[torch.Tensor, None]:
        step = ATTENDING.step
        self.layer = step.num_called
        step.num_called += 1
        return super().forward(hidden_states[0], position_embeddings, step.call)[None], None


class ResidualLayer(OperatorModule):
    """Llama's decoder layer, with any attention and any MLP."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, child in original.named_children():
            setattr(self, name, child)
        # The model's own forward reads this attribute of its layers.
        self.attention_type = getattr(original, "attention_type", None)

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """[1, T, H] -> [1, T, H]. The caller must not use `hidden_states` afterwards."""
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **arguments)
        total = self.operators.add(attended[0], hidden_states[0])
        added = self.mlp(self.post_attention_layernorm(total[None]))
        return self.operators.add(added[0], total)[None]
