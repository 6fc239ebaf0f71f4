"""Weights and config fields of Mamba-2 that several families share."""

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError, shown
from quire.layers.mixers.mamba2 import MambaSizes
from quire.models.config_fields import ConfigFields

MAMBA_PARTS = {
    "in_proj": ("in_z", "in_x", "in_b", "in_c", "in_dt"),
    "conv_taps": ("x_taps", "b_taps", "c_taps"),
}
"""For each fused tensor, the names of its parts, as `fused_mamba` gives them."""


def fused_mamba(sizes: MambaSizes) -> Mapping[str, Mapping[str, int]]:
    """The value of `Arrangement.fused` for Mamba-2's tensors."""
    parts = sizes.part_sizes
    taps = (f"conv.{name}" for name in MAMBA_PARTS["conv_taps"])
    return {
        "in_proj": dict(zip(MAMBA_PARTS["in_proj"], parts, strict=True)),
        "conv1d": dict(zip(taps, parts[1:4], strict=True)),
    }


def read_step_limits(fields: ConfigFields, name: str) -> tuple[float, float]:
    """Read the limits of Mamba-2's time steps. By default, they are 0 and infinity."""
    limits = fields.value(name)
    if limits is None:
        return 0.0, math.inf
    least: Any
    most: Any
    least, most = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    if most in ({"__float__": "Infinity"}, "Infinity"):  # both are written by transformers
        most = math.inf
    for limit in (least, most):
        if type(limit) not in (int, float) or not limit >= 0:
            raise CheckpointError(
                f"config.json: {name} is {shown(limits)}, but must be two numbers"
            )
    return float(least), float(most)
