"""The text model of Qwen3.5: Qwen3-Next with other tensors for DeltaNet, dense or with experts.

By Alibaba (model cards of Qwen3.5). `delta_hybrid.py` describes the layers. In a model, either all
MLPs are dense, or all are mixtures of experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.errors import UnsupportedModelError
from quire.models.checkpoints.arranged import Arrangement
from quire.models.config_fields import ROPE_FORMS, ConfigFields
from quire.models.families.hybrids.delta_hybrid import (
    DEFAULTS,
    MOE_DEFAULTS,
    DeltaHybridConfig,
    conv_parts,
    delta_hybrid_entry,
    gated_query,
    read_mixture,
)
from quire.models.mixture_config import by_layer
from quire.models.rope_config import of_one_axis

_MTP_FIELDS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
"""Fields about layers that predict further tokens. These are draft heads (`models.heads.mtp`)."""
_NO_DENSE_LAYER = {"intermediate_size": 512}
"""A required field that configs of mixtures lack. Its value is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(DeltaHybridConfig):
    """The config of dense models."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        return cls.read_hybrid(read_fields(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(DeltaHybridConfig):
    """The config of models with experts."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = read_fields({**MOE_DEFAULTS, **_NO_DENSE_LAYER, **raw})
        mixture = read_mixture(fields, num_experts=256, renormalizes=True)
        return cls.read_hybrid(fields, mixtures=by_layer(fields, mixture, lambda _: True))


def read_fields(raw: Mapping[str, Any]) -> ConfigFields:
    """Read the fields, without the rope sections, which only matter for images."""
    changed = {**DEFAULTS, **raw}
    for form in ROPE_FORMS:
        rope = raw.get(form)
        if isinstance(rope, dict):
            changed[form] = of_one_axis(rope)
    fields = ConfigFields(changed)
    for name in _MTP_FIELDS:
        fields.value(name)
    if fields.value("mlp_only_layers"):
        raise UnsupportedModelError(
            "config.json: mlp_only_layers names layers, which transformers ignores"
        )
    return fields


def arrangement(config: DeltaHybridConfig) -> Arrangement:
    """Split q from its gate, and split the fused linears of linear attention."""
    keys, _, values = config.delta_net.part_sizes
    projected = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
    return Arrangement(
        fused={"in_proj_qkv": projected, "conv1d": conv_parts(config)},
        selected={"q_proj": gated_query(config)},
    )


ENTRY = delta_hybrid_entry(Qwen35Config, arrangement)
MOE_ENTRY = delta_hybrid_entry(Qwen35MoeConfig, arrangement)
