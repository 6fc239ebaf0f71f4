"""Reads rotary position parameters from a GGUF model's metadata and small tensors.

The parameters of Llama 3's scaling are not in the metadata. Instead, llama.cpp stores the divisor
of each frequency in the tensor rope_freqs. Phi's two lists of divisors are tensors, too.
"""

import math
from typing import Any

from quire.errors import UnsupportedModelError, shown
from quire.hub.gguf.header import broken
from quire.models.checkpoints.gguf.gguf_model import GGUFModel

_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters of Llama 3's rotation that are the same in all published models."""
_TOLERANCE = 1e-5  # relative error of divisors that were computed in fp32
_DEFAULT_BASE = 10000.0


def rope_parameters(
    model: GGUFModel, head_dim: int, *, log_multiplier: float = 0.1
) -> dict[str, Any]:
    """The config field `rope_parameters`, in the form of transformers 5.

    `head_dim` is the size of a head of q and k. The field `partial_rotary_factor` is set if only a
    part of the head rotates. `log_multiplier` is the ratio of the stored YaRN log multiplier to
    mscale_all_dim.
    """
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": model.number("rope.freq_base", _DEFAULT_BASE),
    }
    rotary_dim = model.integer("rope.dimension_count", head_dim)
    if not 0 < rotary_dim <= head_dim:
        raise broken(model.path, f"{rotary_dim} numbers of a head of {head_dim} would rotate")
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = partial_factor(rotary_dim, head_dim)
    kind = model.text("rope.scaling.type", "none")
    if kind == "linear" or (kind == "none" and model.has("rope.scale_linear")):
        factor = model.number("rope.scaling.factor", model.number("rope.scale_linear", 1.0))
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found |= _yarn(model, log_multiplier)
    elif kind not in ("none", "longrope"):
        raise UnsupportedModelError(
            f"{model.path}: the rope's scaling is {shown(kind)}, but only none, linear, yarn and "
            "longrope are understood"
        )
    model.skip("rope.scaling.finetuned")
    return found | _stretched(model, found["rope_theta"], rotary_dim)


def partial_factor(rotary_dim: int, head_dim: int) -> float:
    """The fraction of a head that rotates. It is chosen so that its product with `head_dim`,
    rounded down, is `rotary_dim`."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def _yarn(model: GGUFModel, log_multiplier: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.number("rope.scaling.factor"),
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length"),
    }
    for name, field in (
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
        ("attention_factor", "rope.scaling.yarn_attn_factor"),
        ("attention_factor", "rope.scaling.attn_factor"),
    ):
        if model.has(field):
            found[name] = model.number(field)
    if model.has("rope.scaling.yarn_log_multiplier"):
        # mscale isn't stored, but in published models it equals mscale_all_dim.
        scale = round(model.number("rope.scaling.yarn_log_multiplier") / log_multiplier, 6)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _stretched(model: GGUFModel, theta: float, rotary_dim: int) -> dict[str, Any]:
    """The rope parameters that are found from the divisors in the model's tensors."""
    factors = model.small_numbers("rope_freqs.weight")
    long, short = (
        model.small_numbers(f"rope_factors_{length}.weight") for length in ("long", "short")
    )
    if long or short:
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short} | (
            _long_scale(model)
        )
    model.skip("rope.scaling.original_context_length", "rope.scaling.attn_factor")
    if not factors:
        return {}
    if not 0 < theta < math.inf or not all(0 < each < math.inf for each in factors):
        raise broken(
            model.path,
            f"rope.freq_base {theta} and the numbers of rope_freqs.weight must be above 0",
        )
    # Recognize Llama 3's scaling by its divisors.
    parameters = {"factor": max(factors), **_LLAMA_3}
    if 2 * len(factors) == rotary_dim and all(
        abs(mine - given) <= _TOLERANCE * given
        for mine, given in zip(
            llama3_factors(theta, rotary_dim, **parameters), factors, strict=True
        )
    ):
        return {"rope_type": "llama3", **parameters}
    # Express other divisors as LongRoPE, which accepts arbitrary divisors.
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": model.integer("context_length"),
        "attention_factor": 1.0,
    }


def _long_scale(model: GGUFModel) -> dict[str, Any]:
    """LongRoPE's original length. Also its attention factor, unless it equals the default, which is
    computed from the context's length and the original length."""
    length = model.integer("context_length")
    original = model.integer("rope.scaling.original_context_length", length)
    scale = model.number("rope.scaling.attn_factor", 1.0)
    found: dict[str, Any] = {"original_max_position_embeddings": original}
    usual = 1.0
    if length > original > 1:
        usual = math.sqrt(1 + math.log(length / original) / math.log(original))
    return found if abs(scale - usual) <= _TOLERANCE else found | {"attention_factor": scale}


def llama3_factors(
    theta: float,
    rotary_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> list[float]:
    """The divisors of Llama 3's frequencies (transformers' function _compute_llama3_parameters)."""
    found = []
    for index in range(0, rotary_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / rotary_dim)
        turns = original_max_position_embeddings / wavelength
        part = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        part = min(1.0, max(0.0, part))
        found.append(1 / ((1 - part) / factor + part))
    return found
