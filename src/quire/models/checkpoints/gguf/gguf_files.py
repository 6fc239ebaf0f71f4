"""Reads weights and config from GGUF files, presented as a Hugging Face checkpoint.

llama.cpp's converters rename tensors, reorder rows and stack experts. `families` describes these
changes for each architecture. They are undone while rows are read. Quantized rows can be read as
codes (`quantized_rows`) or dequantized (`rows`).
"""

from collections.abc import Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.hub.gguf.naming import find_gguf
from quire.models.checkpoints.gguf.decoding import plain_dtype
from quire.models.checkpoints.gguf.families.architectures import find_architecture
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_locations import Computed, StoredRows
from quire.models.checkpoints.gguf.tensor_map import map_tensors
from quire.models.checkpoints.source import CheckpointSource


class GGUFFiles(CheckpointSource):
    """The tensors of a model in one GGUF file, or in several."""

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """See `CheckpointSource.is_in`. `folder` may also be the model's first file."""
        return find_gguf(folder) is not None

    @classmethod
    def read_config(cls, folder: Path) -> dict[str, Any]:
        model = GGUFModel(folder)
        config = find_architecture(model).config(model)
        model.finish()
        return config

    @classmethod
    def quantized_by(cls, folder: Path) -> str | None:
        model = GGUFModel(folder)
        kinds = {model.info(name).storage for name in model.tensors}
        names = sorted(kind.name for kind in kinds if plain_dtype(kind) is None)
        return f"GGUF's types ({', '.join(names)})" if names else None

    def __init__(self, folder: Path) -> None:
        self._model = GGUFModel(folder)
        self._locations = map_tensors(
            self._model, find_architecture(self._model).rules(self._model)
        )

    @property
    def names(self) -> Set[str]:
        return self._locations.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._locations[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._locations[name].dtype(self._model)

    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        """Yields unquantized rows in their stored dtype, and quantized rows dequantized to fp32."""
        return contextmanager(self._locations[name].lend)(self._model, span)

    def block_format(self, name: str) -> BlockFormat | None:
        return self._locations[name].block_format(self._model)

    def stored_as(self, name: str) -> str | None:
        return self._locations[name].stored_as(self._model)

    def quantized_rows(self, name: str, span: range) -> AbstractContextManager[BlockQuantizedRows]:
        location = self._locations[name]
        assert isinstance(location, StoredRows), name
        return location.lent_quantized(self._model, span)

    def pieces(self, name: str) -> list[range]:
        location = self._locations[name]
        if not isinstance(location, Computed):
            return super().pieces(name)
        # Reading any part of a computed tensor computes the whole tensor, so it is one piece.
        return [range(location.shape[0] if location.shape else 1)]

    def row_bytes(self, name: str) -> int:
        block_format = self.block_format(name)
        if block_format is None:
            return super().row_bytes(name)
        return self.shape(name)[1] * block_format.width // 8
