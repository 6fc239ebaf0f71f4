"""Counts the bytes that a model stores and reads, from its config.

Nothing is allocated: the sizes are read from a blueprint. Decoding is bound by what it reads, so
`token_bytes` over the memory's speed bounds the tokens per second of one sequence. Called by
`assembly.reports.model_report`.

A module of whose weights a token reads only a share says so by an attribute `active_share`: of an
embedding that is one row of V, of a mixture's experts the chosen ones of all. It counts for what is
inside of the module, too.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quire.formats.dense import DenseMethod
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import (
    blueprint,
    module_bytes,
    served_blueprint,
    stored_bytes,
)
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.models.registry import find_entry


@dataclass(frozen=True, slots=True)
class Footprint:
    """weight_bytes: of all that is stored. token_bytes: of the weights that one sequence reads to
    decode a token, those of its head included."""

    weight_bytes: int
    token_bytes: int


def footprint(config: ModelConfig, dtype: torch.dtype, methods: LinearMethods) -> Footprint:
    """Of the model that `config` describes, in a model of this dtype, whose linears have `methods`.
    Its architecture is one that the registry finds."""
    return _footprint(blueprint(config, find_entry(config), methods), config, dtype)


def served_footprint(
    folder: Path, config: ModelConfig, dtype: torch.dtype, methods: LinearMethods
) -> Footprint:
    """Of the model of `folder`, whose weights may be quantized already, as it is served.

    Raises CheckpointError where its weights are not those that `config` describes.
    """
    return _footprint(served_blueprint(folder, config, methods), config, dtype)


def _footprint(whole: TextModel, config: ModelConfig, dtype: torch.dtype) -> Footprint:
    stored = stored_bytes(whole, config, dtype)
    return Footprint(stored, round(_read_bytes(whole, dtype, 1.0)))


def num_weights(config: ModelConfig) -> Footprint:
    """The same, in weights in place of bytes."""
    return footprint(config, torch.int8, LinearMethods(DenseMethod()))  # a byte each


def _read_bytes(module: nn.Module, dtype: torch.dtype, share: float) -> float:
    share *= getattr(module, "active_share", 1.0)
    inner = sum(_read_bytes(child, dtype, share) for child in module.children())
    return share * module_bytes(module, dtype) + inner
