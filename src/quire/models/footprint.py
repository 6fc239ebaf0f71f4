"""Counts the bytes that a model stores and reads, from its config.

Nothing is allocated: the sizes are read from a blueprint. Decoding is bound by what it reads, so
`token_bytes` over the memory's speed bounds the tokens per second of one sequence. Called by
`assembly.reports`.

A module of whose weights a token reads only a share says so by an attribute `active_share`: of an
embedding that is one row of V, of a mixture's experts the chosen ones of all. It counts for what is
inside of the module, too.
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
    """weight_bytes: of all that is stored. token_bytes: of the weights that one sequence reads to
    decode a token, those of its head included."""

    weight_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class WeightReads:
    """What a step reads of the weights, and how many it multiplies with.

    layer_*: of all that every step needs. head_*: of heads that give logits. row_bytes: of the
    embeddings' rows of one token. experts: the share of them that a token has -> (bytes, weights)
    of all experts of which that is so.
    """

    layer_bytes: int
    layer_weights: int
    head_bytes: int
    head_weights: int
    row_bytes: int
    experts: dict[float, tuple[int, int]]


def weight_reads(model: nn.Module, dtype: torch.dtype) -> WeightReads:
    """Of a model of this dtype, loaded or a blueprint."""
    experts: dict[float, tuple[int, int]] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Experts):
            num_bytes, num_weights = experts.get(module.active_share, (0, 0))
            own = list(module.modules())
            num_bytes += sum(module_bytes(each, dtype) for each in own)
            num_weights += sum(map(_num_multiplied, own))
            experts[module.active_share] = num_bytes, num_weights
            inside.update(own)
    others = [module for module in model.modules() if module not in inside]
    heads = [module for module in others if isinstance(module, LMHead)]
    tables = [module for module in others if isinstance(module, VocabEmbedding | PositionEmbedding)]
    layers = [module for module in others if module not in {*heads, *tables}]
    return WeightReads(
        layer_bytes=sum(module_bytes(each, dtype) for each in layers),
        layer_weights=sum(map(_num_multiplied, layers)),
        head_bytes=sum(module_bytes(each, dtype) for each in heads),
        head_weights=sum(map(_num_multiplied, heads)),
        row_bytes=sum(_row_bytes(each, dtype) for each in tables),
        experts=experts,
    )


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


def _row_bytes(table: VocabEmbedding | PositionEmbedding, dtype: torch.dtype) -> int:
    if isinstance(table, PositionEmbedding):
        return table.weight.shape[1] * dtype.itemsize
    if table.method is not None:
        return round(module_bytes(table, dtype) / table.vocab_size)
    return table.hidden_size * dtype.itemsize  # also where a tied head keeps it


def _num_multiplied(module: nn.Module) -> int:
    """Weights of the module itself that a token is multiplied with: not norms, not biases."""
    if isinstance(module, Linear):
        return module.output_size * module.input_size
    return sum(each.numel() for each in module.parameters(recurse=False) if each.ndim > 1)
