"""Reads rows of a loaded model's linears again from its checkpoint.

The rows are compared with the same weights in a quantized format. Called by
`assembly.format_checks`.
"""

from pathlib import Path

import torch

from quire.formats.weight_format import LinearModule
from quire.models.checkpoints.loader import checkpoint_slots
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.models.registry import find_entry

_WEIGHT, _BIAS = ".weight", ".bias"


class LinearWeights:
    """The checkpoint's weights of a model that is not sharded. For a tied head, they are the
    embedding's rows."""

    def __init__(self, folder: Path, config: ModelConfig, model: TextModel) -> None:
        """`model` was built from `config`. Raises CheckpointError."""
        entry = find_entry(config)
        self._checkpoint = entry.open(folder, config)
        self._names: dict[tuple[LinearModule, int], str] = {}
        for name, slots in checkpoint_slots(model, entry.checkpoint_parts).items():
            if name == entry.head and name not in self._checkpoint.names:
                name = entry.embedding
            for part in (slot.part for slot in slots):
                if part is not None and name in self._checkpoint.names:
                    self._names[part] = name

    def rows(self, linear: LinearModule, index: int, span: range) -> torch.Tensor | None:
        """Rows [len(span), I] fp32 of the weight of part `index`; None if the checkpoint has no
        separate tensor for this part. Raises CheckpointError."""
        return self._read(self._names.get((linear, index)), span)

    def biases(self, linear: LinearModule, index: int, span: range) -> torch.Tensor | None:
        """The biases [len(span)] fp32 of these rows, or None. Raises CheckpointError."""
        weight = self._names.get((linear, index))
        if weight is None or not weight.endswith(_WEIGHT):
            return None
        return self._read(f"{weight.removesuffix(_WEIGHT)}{_BIAS}", span)

    def _read(self, name: str | None, span: range) -> torch.Tensor | None:
        if name is None or name not in self._checkpoint.names:
            return None
        with self._checkpoint.rows(name, span) as rows:
            return rows.to(torch.float32, copy=True)
