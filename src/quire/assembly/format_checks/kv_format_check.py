"""Measures at the start whether the chosen KV format suits a model's keys.

In some models a few elements of keys are a hundred times as large as the others, for example
because of Qwen2's biases. With one scale per vector, the other elements then keep little precision,
and answers are garbage. So, before the KV cache is allocated, the model reads a prompt of fixed
token ids once with exact K and V. Each layer's attention is compared with attention over rounded
keys.
"""

from dataclasses import dataclass

import torch

from quire.attention.kv_format import KVFormat
from quire.attention.kv_rounding import KeyProbe
from quire.models.interface import TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)

NUM_TOKENS = 128
MOST_DIVERGENCE = 0.01
"""Maximum divergence, in nats, of a format that counts as good. It was measured with 8-bit formats
on the embedded model, without and with outliers of 8 to 160 times the keys' mean. Perplexity of
held-out text rose by 0.5% or more above this limit, by 0.2% to 0.8% from 0.003 up to it, and by at
most 0.3% below 0.003."""

_STRIDE = 7919
"""A prime. Its multiples, modulo the vocabulary's size, are spread over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class KeyDivergence:
    """The divergence of attention over rounded keys from attention over exact keys."""

    #: The index of the layer with the largest divergence.
    layer: int

    #: That layer's mean divergence, in nats; NaN if the layer's results are not numbers.
    mean: float

    @property
    def is_bad(self) -> bool:
        """Whether the format may harm answers."""
        return not self.mean <= MOST_DIVERGENCE


@torch.inference_mode()
def measure_keys(model: TextModel, kv_format: KVFormat, max_model_len: int) -> KeyDivergence:
    """The divergence of the worst layer. The model must be ready to run.

    `max_model_len` limits the prompt's length.
    """
    device = next(model.parameters()).device
    places = torch.arange(min(NUM_TOKENS, max_model_len), device=device)
    probe = KeyProbe(model.attention_specs, kv_format)
    model(places * _STRIDE % model.vocab_size, places, probe)
    found = (KeyDivergence(layer, mean) for layer, mean in probe.divergence.items())
    return max(found, key=lambda each: (each.is_bad, each.mean))


def check_keys(model: TextModel, kv_format: KVFormat, max_model_len: int) -> None:
    """Measure the divergence and log it. Logs a warning if the format is bad for the model."""
    found, name = measure_keys(model, kv_format, max_model_len), kv_format.name
    if not found.is_bad:
        logger.info(
            "kv_cache_dtype=%s: attention diverges by at most %.2g nats on the calibration prompt",
            name,
            found.mean,
        )
        return
    logger.warning(
        "kv_cache_dtype=%s is bad for this model: in layer %d attention over its keys diverges by"
        " %.2g nats on the calibration prompt, and more than %g costs quality; use"
        " kv_cache_dtype=auto, or measure your text with `quire bench perplexity"
        " --kv-cache-dtype auto %s`",
        name,
        found.layer,
        found.mean,
        MOST_DIVERGENCE,
        name,
    )
