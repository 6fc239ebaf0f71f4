"""Counts the bytes of weights that a model stores and reads, from its config.

Sizes are read from a blueprint, without allocating weights. The speed of decoding is limited by
memory reads: `token_bytes` divided by the memory's bandwidth is the least time per token of one
sequence. Called by `assembly.reports`.

If a token reads only a fraction of a module's weights (one row of an embedding, the chosen experts
of a mixture), the module has an attribute `active_share`. It applies to contained modules, too.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quire.formats.dense import DenseMethod
from quire.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from quire.layers.experts import Experts
from quire.layers.linear import Linear
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
    """The bytes of a model's weights."""

    #: Bytes of all stored weights.
    weight_bytes: int
    #: Bytes of weights, including the head's, that are read to decode one token of one sequence.
    token_bytes: int


@dataclass(frozen=True, slots=True)
class WeightReads:
    """The bytes of weights that steps read, and the numbers of weights that they multiply with."""

    #: Bytes of the weights that every step reads, without heads, embeddings and experts.
    layer_bytes: int
    #: Number of weights by which every token is multiplied, without heads and experts.
    layer_weights: int
    #: Bytes of the heads that compute logits.
    head_bytes: int
    #: Number of weights of the heads that compute logits.
    head_weights: int
    #: Bytes of one token's rows in the embeddings.
    row_bytes: int
    #: Maps the fraction of experts that a token uses to (bytes, number of weights) of all experts.
    experts: dict[float, tuple[int, int]]


def weight_reads(model: nn.Module, dtype: torch.dtype) -> WeightReads:
    """Count the weight reads of `model`, a loaded model or a blueprint, at this dtype. What
    the host computes for another device is left out."""
    experts: dict[float, tuple[int, int]] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Experts):
            num_bytes, num_weights = experts.get(module.active_share, (0, 0))
            own = list(module.modules())
            inside.update(own)
            if module.is_on_host:  # the device reads none of them
                continue
            num_bytes += sum(module_bytes(each, dtype) for each in own)
            num_weights += sum(map(_num_multiplied, own))
            experts[module.active_share] = num_bytes, num_weights
    others = [module for module in model.modules() if module not in inside]
    heads = [module for module in others if isinstance(module, LMHead)]
    tables = [module for module in others if isinstance(module, VocabEmbedding | PositionEmbedding)]
    apart = {*heads, *tables, *(each for each in others if getattr(each, "is_on_host", False))}
    layers = [module for module in others if module not in apart]
    return WeightReads(
        layer_bytes=sum(module_bytes(each, dtype) for each in layers),
        layer_weights=sum(map(_num_multiplied, layers)),
        head_bytes=sum(module_bytes(each, dtype) for each in heads),
        head_weights=sum(map(_num_multiplied, heads)),
        row_bytes=sum(_row_bytes(each, dtype) for each in tables),
        experts=experts,
    )


def footprint(config: ModelConfig, dtype: torch.dtype, methods: LinearMethods) -> Footprint:
    """The footprint of the config's model in this dtype. `methods` store its linears and may
    quantize them."""
    return _footprint(blueprint(config, find_entry(config), methods), config, dtype)


def served_footprint(
    folder: Path, config: ModelConfig, dtype: torch.dtype, methods: LinearMethods
) -> Footprint:
    """The footprint of the model in `folder`, whose weights may be quantized, as it is served.

    Raises CheckpointError if the weights don't match `config`.
    """
    return _footprint(served_blueprint(folder, config, methods), config, dtype)


def _footprint(whole: TextModel, config: ModelConfig, dtype: torch.dtype) -> Footprint:
    stored = stored_bytes(whole, config, dtype)
    return Footprint(stored, round(_read_bytes(whole, dtype, 1.0)))


def num_weights(config: ModelConfig) -> Footprint:
    """The footprint of the config's model, counted in weights instead of bytes."""
    return footprint(config, torch.int8, LinearMethods(DenseMethod()))  # one byte per weight


def _read_bytes(module: nn.Module, dtype: torch.dtype, share: float) -> float:
    share *= getattr(module, "active_share", 1.0)
    inner = sum(_read_bytes(child, dtype, share) for child in module.children())
    return share * module_bytes(module, dtype) + inner


def _row_bytes(table: VocabEmbedding | PositionEmbedding, dtype: torch.dtype) -> int:
    if isinstance(table, PositionEmbedding):
        return table.weight.shape[1] * dtype.itemsize
    if table.method is not None:
        return round(module_bytes(table, dtype) / table.vocab_size)
    return table.hidden_size * dtype.itemsize  # also if a tied head stores the table


def _num_multiplied(module: nn.Module) -> int:
    """The number of the module's own weights, without norms, biases and contained modules."""
    if isinstance(module, Linear):
        return module.output_size * module.input_size
    return sum(each.numel() for each in module.parameters(recurse=False) if each.ndim > 1)
