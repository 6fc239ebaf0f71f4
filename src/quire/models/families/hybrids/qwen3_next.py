"""Qwen3-Next: Gated DeltaNet, gated attention, and mixtures of many small experts.

By Alibaba (model card of Qwen3-Next-80B-A3B). `delta_hybrid.py` describes the layers. The MLP of
every `decoder_sparse_step`-th layer is a mixture of experts, except for `mlp_only_layers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from quire.models.checkpoints.arranged import Arrangement
from quire.models.checkpoints.row_selection import IndexedRows, RowSelection
from quire.models.config_fields import ConfigFields
from quire.models.families.hybrids.delta_hybrid import (
    DEFAULTS,
    MOE_DEFAULTS,
    DeltaHybridConfig,
    conv_parts,
    delta_hybrid_entry,
    gated_query,
    read_mixture,
)
from quire.models.mixture_config import by_sparse_step

_DEFAULTS = {**DEFAULTS, **MOE_DEFAULTS, "num_experts_per_tok": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(DeltaHybridConfig):
    """The config of models with mixtures of experts."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        mixture = read_mixture(
            fields, num_experts=512, renormalizes=fields.flag("norm_topk_prob", True)
        )
        return cls.read_hybrid(fields, mixtures=by_sparse_step(fields, mixture))


def arrangement(config: Qwen3NextConfig) -> Arrangement:
    """Split the fused linears q, k, v, z and b, a, whose rows alternate by key head in the
    files."""
    delta = config.delta
    repeats = delta.num_v_heads // delta.num_k_heads
    values = repeats * delta.value_dim
    sizes = (delta.key_dim, delta.key_dim, values, values)
    return Arrangement(
        fused={"conv1d": conv_parts(config)},
        selected={
            "in_proj_qkvz": _in_turn(delta.num_k_heads, "qkvz", sizes),
            "in_proj_ba": _in_turn(delta.num_k_heads, "ba", (repeats, repeats)),
            "q_proj": gated_query(config),
        },
    )


def _in_turn(num_heads: int, parts: str, sizes: tuple[int, ...]) -> dict[str, RowSelection]:
    """The rows of each part of a fused linear.

    The linear stores its heads one after another, and each head stores the parts in the order of
    `parts`, with sizes[i] rows of part i.
    """
    total = num_heads * sum(sizes)
    rows = torch.arange(total).view(num_heads, -1)
    found, start = {}, 0
    for part, size in zip(parts, sizes, strict=True):
        found[f"in_proj_{part}"] = IndexedRows(rows[:, start : start + size].flatten(), total)
        start += size
    return dict(found)


ENTRY = delta_hybrid_entry(Qwen3NextConfig, arrangement)
