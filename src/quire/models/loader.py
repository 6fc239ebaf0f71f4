"""Builds a model and fills it from a checkpoint, straight into its (fused) parameters.

A checkpoint's tensors and a model's parameters must match one to one; what is missing, left over or
of another shape is refused by name. Knows no device or format of its own: both are told.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.layers.linear import Linear
from quire.models.checkpoint import Checkpoint
from quire.models.config import DecoderConfig
from quire.models.interface import CausalLM
from quire.models.registry import MODELS, ModelEntry

_log = logging.getLogger(__name__)

# Tensors that old checkpoints carry and that follow from the config.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_MAX_NAMES_SHOWN = 8


def load_model(
    folder: Path,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> CausalLM:
    """The model of `folder`, whose `config` is `registry.load_config(folder)`, ready to run.

    dtype: of all parameters; the checkpoint's numbers are converted. max_model_len: fixes rope
    types that depend on a length. Needs the model's memory once, plus a few dozen MiB.
    Raises CheckpointError that names the file or the tensors at fault.
    """
    checkpoint = Checkpoint(folder)
    entry = MODELS[config.architecture]
    if config.tie_word_embeddings and _ends_differ(checkpoint, entry):
        _log.warning(
            "%s: its config ties the two ends of the model, but its weights hold two that differ; "
            "both are used, as transformers does",
            folder,
        )
        config = dataclasses.replace(config, tie_word_embeddings=False)
    model = entry.model(config, dtype=dtype, device=device, max_model_len=max_model_len)
    targets = checkpoint_targets(model, entry.checkpoint_parts)
    spare_names = set()
    if config.tie_word_embeddings:
        # Either name fills the one tensor; the other, if it is there, says the same again.
        spare_names.add(entry.head if entry.embedding in checkpoint.names else entry.embedding)
    for name in spare_names:
        del targets[name]
    _check_match(folder, checkpoint, targets, spare_names)
    for name, target in targets.items():
        checkpoint.copy(name, target)
    return model.eval()


def checkpoint_targets(
    model: nn.Module, checkpoint_parts: Mapping[str, tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """Checkpoint names -> the parameters, or the slices of fused ones, that they fill."""
    targets: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        parts = checkpoint_parts.get(leaf)
        for name, parameter in module.named_parameters(recurse=False):
            if parts is None:
                targets[f"{path}.{name}"] = parameter
                continue
            assert isinstance(module, Linear) and len(parts) == len(module.part_sizes), path
            for index, part in enumerate(parts):
                targets[f"{parent}.{part}.{name}"] = module.part(name, index)
    return targets


def _ends_differ(checkpoint: Checkpoint, entry: ModelEntry) -> bool:
    both = {entry.embedding, entry.head} <= checkpoint.names
    return both and not checkpoint.equal(entry.embedding, entry.head)


def _check_match(
    folder: Path, checkpoint: Checkpoint, targets: dict[str, torch.Tensor], spare_names: set[str]
) -> None:
    missing = targets.keys() - checkpoint.names
    if missing:
        raise CheckpointError(
            f"{folder}: the weights lack {_listed(missing)}; the download is not whole, or "
            "config.json describes another model"
        )
    unexpected = {
        name
        for name in checkpoint.names - targets.keys() - spare_names
        if not name.endswith(_DERIVED_SUFFIXES)
    }
    if unexpected:
        raise CheckpointError(
            f"{folder}: the weights have {_listed(unexpected)}, which the model of config.json has "
            "no place for; ignoring them would change its results"
        )
    wrong = [
        f"{name} {list(checkpoint.shape(name))} instead of {list(target.shape)}"
        for name, target in targets.items()
        if checkpoint.shape(name) != tuple(target.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{folder}: the weights have other shapes than config.json says: {_listed(wrong)}"
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _MAX_NAMES_SHOWN
    return ", ".join(ordered[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
