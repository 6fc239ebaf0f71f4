"""gpt-oss: mixtures of experts with a special gate, attention sinks, and alternating windows.

Source: arXiv:2508.10925. Its differences from Llama:

- every layer's MLP is a mixture; the experts' weights are the softmax over the chosen experts'
  logits, and all linears have biases, including the router;
- experts multiply gate * sigmoid(1.702 gate) by up + 1, with gate and up clamped;
- in each head, attention's softmax includes a learned logit (a sink) whose value vector is zero;
- every second layer, starting with the first, has the sliding window;
- norms multiply by their weight before the result is rounded to the model's dtype;
- the defaults are a head size of 64, and YaRN.

In published checkpoints, experts are MXFP4 (`checkpoints.quantized.mxfp4`); in bf16 checkpoints,
they are stacked and transposed (`checkpoints.unstacked`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from quire.errors import CheckpointError, shown
from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.routing import Scoring
from quire.layers.experts import MoESpec
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.layer_kinds import FULL, SLIDING, read_layer_types, read_windows
from quire.models.mixture_config import by_layer, read_num_experts, read_router, replaced
from quire.models.model_entry import mixture_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_experts_per_tok": 4,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """`attention_bias` applies to all four projections."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = {**_DEFAULTS, **raw}
        if not raw.get("rope_scaling") and raw.get("rope_parameters") is None:
            raw["rope_parameters"] = _YARN
        fields = ConfigFields(raw)
        _check_other_names(fields)
        layer_types = read_layer_types(fields, lambda layer: FULL if layer % 2 else SLIDING)
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", True),
            norm_offset=0.0,
            has_sinks=True,
            windows=read_windows(fields, layer_types),
            mixtures=by_layer(fields, _read_mixture(fields), lambda _: True),
        )


def rename(name: str) -> str:
    """Map a tensor's name in the files to its name in the model, or for a stacked tensor to the
    name that `checkpoints.unstacked` expects."""
    return replaced(name, {".mlp.router.": ".mlp.gate."})


def _read_mixture(fields: ConfigFields) -> MoESpec:
    router = read_router(
        fields, read_num_experts(fields, 128), scoring=Scoring.SOFTMAX_OF_CHOSEN, rounds=True
    )
    gating = Gating(
        ActivationFunction.SILU,
        limit=fields.number("swiglu_limit", 7.0),
        alpha=fields.number("swiglu_alpha", 1.702),
        up_offset=1.0,
    )
    size = fields.integer("intermediate_size")
    return MoESpec(
        router=router, intermediate_size=size, gating=gating, bias=True, router_bias=True
    )


def _check_other_names(fields: ConfigFields) -> None:
    """Check fields that only repeat other fields, and that transformers does not read."""
    fields.value("initial_context_length")
    again, top_k = fields.value("experts_per_token"), fields.integer("num_experts_per_tok")
    if again is not None and again != top_k:
        raise CheckpointError(
            f"config.json: experts_per_token is {shown(again)}, but num_experts_per_tok {top_k}"
        )


ENTRY = mixture_entry(GptOssConfig, rename, partial(UnstackedCheckpoint, is_transposed=True))
