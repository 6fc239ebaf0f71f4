"""A checkpoint that presents the several tensors of a quantized weight as one tensor.

For example, `X.qweight`, `X.qzeros` and `X.scales` are presented as one `X.weight`, either still
quantized (codes) or dequantized (numbers). Other tensors are unchanged. Called by `methods.py`.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.models.checkpoints.quantized.stored_weight import StoredWeight
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.source import DerivedSource, refusal_of_two


@dataclass(slots=True)
class FoundWeights:
    """The quantized weights that a method finds in files."""

    #: Name of a tensor in the files -> the weights that replace it, by their presented names.
    weights: dict[str, dict[str, StoredWeight]] = field(default_factory=dict)
    #: Names of the other tensors of these weights, and of unused tensors. They are not presented.
    others: set[str] = field(default_factory=set)


class QuantizedFiles(DerivedSource):
    """The tensors of `files`, with the quantized weights that a method has found."""

    def __init__(self, files: SafetensorsFiles, found: FoundWeights) -> None:
        """Raises CheckpointError for a weight that the files hold twice."""
        self._files = files
        #: The quantized weight of each presented name; None for a tensor that is not quantized.
        self._names: dict[str, StoredWeight | None] = {}
        for name in files.names:
            shown: Mapping[str, StoredWeight | None] = found.weights.get(name) or {name: None}
            if name in found.others:
                continue
            for ours, weight in shown.items():
                if ours in self._names:
                    raise refusal_of_two(name, ours, ours)
                self._names[ours] = weight

    @property
    def names(self) -> Set[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        weight = self._names[name]
        return self._files.shape(name) if weight is None else weight.shape

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(name) if self._names[name] is None else torch.float32

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        weight = self._names[name]
        if weight is not None:
            yield weight.numbers(span)
            return
        with self._files.rows(name, span) as rows:
            yield rows

    def block_format(self, name: str) -> BlockFormat | None:
        weight = self._names[name]
        return None if weight is None else weight.block_format

    def stored_as(self, name: str) -> str | None:
        weight = self._names[name]
        return None if weight is None else weight.kind

    def quantized_rows(self, name: str, span: range) -> AbstractContextManager[BlockQuantizedRows]:
        weight = self._names[name]
        assert weight is not None, name
        return weight.quantized_rows(span)

    def row_bytes(self, name: str) -> int:
        """Size of a row in bytes, if each code takes one byte."""
        return super().row_bytes(name) if self.block_format(name) is None else self.shape(name)[1]
