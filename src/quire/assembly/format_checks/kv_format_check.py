"""Measures at the start whether a model's keys bear the chosen KV format.

Some models have keys of which a few elements are a hundred times the others (Qwen2's biases make
such): a scale for the whole vector then leaves little of the rest, and what is served is garbage.
So, before the KV cache is there, the model reads a prompt of fixed token ids once, with K and V as
they are, and each layer's attention is compared with what it would be over rounded keys.
Called by `rank_build`.
"""

from dataclasses import dataclass

import torch

from quire.attention.kv_rounding import KV_ROUNDINGS, KeyProbe
from quire.models.interface import TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)

NUM_TOKENS = 128
MOST_DIVERGENCE = 0.01
"""In nats, of the worst layer. Measured with formats of 8 bits on the embedded model, its keys as
they are and with outliers of 8 to 160 times their mean: above, the perplexity of held-out text rose
by 0.5% or more; up to 0.003, by 0.3% at most; between them, by 0.2 to 0.8%."""

_STRIDE = 7919
"""A prime: token ids from all parts of a vocabulary."""


@dataclass(frozen=True, slots=True)
class KeyDivergence:
    """The divergence of attention over rounded keys from attention over exact ones."""

    #: The worst layer.
    layer: int

    #: Its mean divergence, in nats; not a number where the layer computes none.
    mean: float

    @property
    def is_bad(self) -> bool:
        """Whether answers may suffer."""
        return not self.mean <= MOST_DIVERGENCE


@torch.inference_mode()
def measure_keys(model: TextModel, kv_cache_dtype: str, max_model_len: int) -> KeyDivergence:
    """Measure a model that is ready to run. kv_cache_dtype: a name in `KV_ROUNDINGS`.
    max_model_len: tokens of the longest prompt that it takes."""
    device = next(model.parameters()).device
    places = torch.arange(min(NUM_TOKENS, max_model_len), device=device)
    probe = KeyProbe(model.attention_specs, KV_ROUNDINGS[kv_cache_dtype].of_keys)
    model(places * _STRIDE % model.vocab_size, places, probe)
    found = (KeyDivergence(layer, mean) for layer, mean in probe.divergence.items())
    return max(found, key=lambda each: (each.is_bad, each.mean))


def check_keys(model: TextModel, kv_cache_dtype: str, max_model_len: int) -> None:
    """Log what was measured, as a warning where the format is bad for this model."""
    found = measure_keys(model, kv_cache_dtype, max_model_len)
    if not found.is_bad:
        logger.info(
            "kv_cache_dtype=%s: attention diverges by at most %.2g nats on the calibration prompt",
            kv_cache_dtype,
            found.mean,
        )
        return
    logger.warning(
        "kv_cache_dtype=%s is bad for this model: in layer %d attention over its keys diverges by"
        " %.2g nats on the calibration prompt, and more than %g costs quality; use"
        " kv_cache_dtype=auto, or measure your text with `quire bench perplexity"
        " --kv-cache-dtype auto %s`",
        kv_cache_dtype,
        found.layer,
        found.mean,
        MOST_DIVERGENCE,
        kv_cache_dtype,
    )
