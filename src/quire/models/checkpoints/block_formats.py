"""Decides which weights stay block-quantized as in the checkpoint, and which are dequantized.

Called by `loader` before the model is filled, because the block formats of a linear's parts decide
which method stores the linear.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from math import prod

import torch
from torch import nn

from quire.formats.block_quantized.weights import BlockFormat
from quire.layers.embedding import VocabEmbedding
from quire.layers.experts import Experts
from quire.layers.linear import Linear, WeightSlot
from quire.layers.sharded import LinearMethods, PartBlockFormats
from quire.models.checkpoints.source import CheckpointSource

_log = logging.getLogger(__name__)


class BlockFormats:
    """The block formats of the weights that stay quantized, for a model's linears and its
    embedding.

    `whole` is the model's blueprint. `slots` maps the name of each tensor in the checkpoint to the
    places in the blueprint that it fills. `renamed` maps the names of a tied model's embedding and
    head to the tensor that fills both.
    """

    def __init__(
        self,
        whole: nn.Module,
        slots: Mapping[str, tuple[WeightSlot, ...]],
        checkpoint: CheckpointSource,
        methods: LinearMethods,
        *,
        renamed: Mapping[str, str],
    ) -> None:
        paths = {id(module): path for path, module in whole.named_modules()}
        self._whole, self._methods = whole, methods
        #: Maps a linear's path to the block format of each fused part (q, k, v); None for a
        #: dequantized part.
        self._linears: dict[str, list[BlockFormat | None]] = {}
        self._tables: dict[str, BlockFormat] = {}
        #: Number of dequantized weights of each block format.
        self._numbers: Counter[str] = Counter()
        for name, places in slots.items():
            source = renamed.get(name, name)
            if source not in checkpoint.names:
                continue
            block_format = checkpoint.block_format(source)
            # Without a block format, the checkpoint can only return the weights as floats, which it
            # may have dequantized.
            if block_format is None:
                stored_as = checkpoint.stored_as(source)
                if stored_as is not None:
                    self._numbers[stored_as] += prod(checkpoint.shape(source))
                continue
            for part in (slot.part for slot in places):
                if part is not None:
                    self._add_part(paths[id(part[0])], *part, block_format)
                elif self._is_table(name):
                    self._add_table(
                        name.removesuffix(".weight"), block_format, is_tied=bool(renamed)
                    )
                else:
                    self._numbers[block_format.name] += prod(checkpoint.shape(source))
        if methods.groups_experts:
            self._dequantize_mixed_experts()

    def _dequantize_mixed_experts(self) -> None:
        """Dequantize all experts of a layer on the device if some of their weights are dequantized.

        One kernel multiplies all experts of a layer, and takes either codes or numbers.
        """
        for path, module in self._whole.named_modules():
            if not isinstance(module, Experts) or module.is_on_host:
                continue
            linears = {
                f"{path}.{name}": linear
                for name, linear in module.named_modules()
                if isinstance(linear, Linear)
            }
            if all(each in self._linears and all(self._linears[each]) for each in linears):
                continue
            for each, linear in linears.items():
                formats = self._linears.pop(each, [])
                for size, block_format in zip(linear.part_sizes, formats, strict=False):
                    if block_format is not None:
                        self._numbers[block_format.name] += size * linear.input_size

    def _is_table(self, name: str) -> bool:
        path, _, parameter = name.rpartition(".")
        if parameter != "weight":
            return False
        found = dict(self._whole.named_modules()).get(path)
        return isinstance(found, VocabEmbedding)

    def _add_part(self, path: str, linear: Linear, index: int, block_format: BlockFormat) -> None:
        if not self._methods.keeps(block_format, linear):
            if not linear.stays_dense:
                self._numbers[block_format.name] += linear.part_sizes[index] * linear.input_size
            return
        none: list[BlockFormat | None] = [None] * len(linear.part_sizes)
        self._linears.setdefault(path, none)[index] = block_format

    def _add_table(self, path: str, block_format: BlockFormat, *, is_tied: bool) -> None:
        if self._methods.of_block_format(block_format) is None:
            table = self._whole.get_submodule(path)
            assert isinstance(table, VocabEmbedding)
            self._numbers[block_format.name] += table.vocab_size * table.hidden_size
        elif not is_tied:  # in a tied model, the embedding reads the head's codes
            self._tables[path] = block_format

    def of_linear(self, path: str) -> PartBlockFormats:
        """The block format of each part of the linear at this path; empty if no codes are kept."""
        return self._linears.get(path, ())

    def of_table(self, path: str) -> BlockFormat | None:
        """The block format of the embedding at this path; None if no codes are kept."""
        return self._tables.get(path)

    def choose_methods(self) -> None:
        """Set the methods of the blueprint's linears to those that the model will use. They
        determine the model's size."""
        for path, module in self._whole.named_modules():
            if isinstance(module, Linear):
                module.method = self._methods.stored_by(module, self.of_linear(path))
            elif isinstance(module, VocabEmbedding):
                module.method = self._methods.of_block_format(self.of_table(path))

    def log_dequantized(self, folder: object, dtype: torch.dtype) -> None:
        """Log which weights are dequantized, and the memory that they take."""
        for name, count in self._numbers.items():
            _log.warning(
                "%s: its %s weights are decoded to %s, as these kernels have no layout for their"
                " codes: %.0f MiB in memory",
                folder,
                name,
                str(dtype).removeprefix("torch."),
                count * dtype.itemsize / 2**20,
            )
