"""A checkpoint with fused, transposed or permuted linears, presented in Llama's layout.

Some families store fused linears as one tensor, weights as [inputs, outputs], or the rows of q and
k in another order. `ArrangedCheckpoint` presents their tensors in Llama's layout and names: it
cuts, transposes or reorders each piece as it is read. Called by `models.registry`.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from quire.errors import CheckpointError, shown
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.models.checkpoints.row_selection import RowSelection
from quire.models.checkpoints.source import CheckpointSource, WrappedSource, refusal_of_two


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a family's files store its linears. Keys are the last word of a linear's path, such as
    qkv_proj."""

    #: Maps each fused linear in the files to its parts, in order: their names and numbers of
    #: outputs. A part whose name is "" is skipped.
    fused: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Linears whose weights are stored as [inputs, outputs].
    transposed: frozenset[str] = frozenset()
    #: For a linear, or a part of a fused linear, the stored index of each output.
    order: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: Maps each linear in the files that is split to its parts: their names and rows.
    selected: Mapping[str, Mapping[str, RowSelection]] = field(default_factory=dict)
    #: Prefixes of the names of tensors that are skipped.
    unused: tuple[str, ...] = ()


def from_pairs(num_heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """The stored index of each output, for heads that are stored for an interleaved rotation.

    The interleaved rotation pairs elements 2i and 2i + 1, but `kernels.rotary` pairs i and i +
    rotary_dim / 2. Reordering doesn't change scores, since q and k are reordered in the same way.
    """
    pairs = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    head = torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


_OF_LINEARS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """The location of a tensor in the files: outputs [start, start + size) of the tensor `name`."""

    name: str
    start: int
    size: int
    transposed: bool
    #: The stored index of each output; None if outputs are in order.
    order: torch.Tensor | None
    #: The rows of `name` that make up the tensor, if the fields above can't describe them.
    selection: RowSelection | None = None


class ArrangedCheckpoint(WrappedSource):
    """The checkpoint `source`, presented in Llama's layout."""

    def __init__(self, source: CheckpointSource, arrangement: Arrangement) -> None:
        """Raises CheckpointError for a tensor whose size differs from `arrangement`, and for two
        tensors that fill the same parameter."""
        super().__init__(source)
        self._stored: dict[str, _StoredTensor] = {}
        for name in source.names:
            if name.startswith(arrangement.unused):
                continue
            for ours, stored in _arranged(name, source.shape(name), arrangement):
                if ours in self._stored:
                    raise refusal_of_two(self._stored[ours].name, name, ours)
                self._stored[ours] = stored

    @property
    def names(self) -> Set[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[name]
        shape = self._source.shape(stored.name)
        if stored.selection is not None:
            return stored.selection.shape(shape)
        return (stored.size, *(shape[:1] if stored.transposed else shape[1:]))

    def stored_name(self, name: str) -> str:
        return self._stored[name].name

    def pieces(self, name: str) -> list[range]:
        stored = self._stored[name]
        # A row is a column in the file. Reading one row would read the whole tensor, so the tensor
        # is one piece.
        return [range(stored.size)] if stored.transposed else super().pieces(name)

    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        stored = self._stored[name]
        if stored.selection is not None:
            return self._selected_rows(stored.name, stored.selection, span)
        if stored.transposed or stored.order is not None:
            return self._other_rows(stored, span)
        shifted = range(stored.start + span.start, stored.start + span.stop)
        return self._source.rows(stored.name, shifted)

    def block_format(self, name: str) -> BlockFormat | None:
        stored = self._stored[name]
        keeps_rows = stored.selection is None and not stored.transposed
        return self._source.block_format(stored.name) if keeps_rows else None

    @contextmanager
    def quantized_rows(self, name: str, span: range) -> Iterator[BlockQuantizedRows]:
        stored = self._stored[name]
        if stored.order is None:
            shifted = range(stored.start + span.start, stored.start + span.stop)
            with self._source.quantized_rows(stored.name, shifted) as rows:
                yield rows
            return
        wanted = stored.order[span.start : span.stop] + stored.start
        first, last = int(wanted.min()), int(wanted.max())
        with self._source.quantized_rows(stored.name, range(first, last + 1)) as rows:
            yield rows.picked(wanted - first)

    @contextmanager
    def _selected_rows(
        self, name: str, selection: RowSelection, span: range
    ) -> Iterator[torch.Tensor]:
        yield selection.read(lambda rows: self._source.rows(name, rows), span)

    @contextmanager
    def _other_rows(self, stored: _StoredTensor, span: range) -> Iterator[torch.Tensor]:
        wanted = torch.arange(span.start, span.stop)
        if stored.order is not None:
            wanted = stored.order[span.start : span.stop]
        wanted = wanted + stored.start
        if stored.transposed:
            whole = range(self._source.shape(stored.name)[0])
            with self._source.rows(stored.name, whole) as rows:
                yield rows.index_select(1, wanted).T.contiguous()
            return
        first, last = int(wanted.min()), int(wanted.max())
        with self._source.rows(stored.name, range(first, last + 1)) as rows:
            yield rows.index_select(0, wanted - first)


def _arranged(
    name: str, shape: tuple[int, ...], arrangement: Arrangement
) -> Iterator[tuple[str, _StoredTensor]]:
    """The parameters of the model that one tensor in the files holds: (name in the model, location)
    of each."""
    path, _, parameter = name.rpartition(".")
    parent, _, linear = path.rpartition(".")
    transposed = linear in arrangement.transposed and len(shape) == 2
    num_outputs = shape[-1] if transposed else shape[0] if shape else 1
    if linear in arrangement.selected:
        yield from _selected(name, num_outputs, arrangement.selected[linear])
        return
    parts = {linear: num_outputs}
    if parameter in _OF_LINEARS:  # others belong to quantized linears, which the loader refuses
        parts = dict(arrangement.fused.get(linear, parts))
    if sum(parts.values()) != num_outputs:
        raise CheckpointError(
            f"the weights' tensor {shown(name)} has {num_outputs} outputs, but config.json says "
            f"{' + '.join(map(str, parts.values()))}; the download is not whole, or config.json "
            "describes another model"
        )
    start = 0
    for part, size in parts.items():
        ours = ".".join(filter(None, (parent, part, parameter)))
        if part or not linear:
            yield ours, _StoredTensor(name, start, size, transposed, arrangement.order.get(part))
        start += size


def _selected(
    name: str, num_rows: int, parts: Mapping[str, RowSelection]
) -> Iterator[tuple[str, _StoredTensor]]:
    """The result of `_arranged` for a tensor whose rows are divided among `parts`."""
    path, _, parameter = name.rpartition(".")
    parent, _, _ = path.rpartition(".")
    for part, selection in parts.items():
        if selection.num_source_rows != num_rows:
            raise CheckpointError(
                f"the weights' tensor {shown(name)} has {num_rows} rows, but config.json says "
                f"{selection.num_source_rows}; the download is not whole, or config.json describes "
                "another model"
            )
        ours = ".".join(filter(None, (parent, part, parameter)))
        yield ours, _StoredTensor(name, 0, num_rows, False, None, selection)
