"""A checkpoint that splits stacked tensors of experts into one tensor for each expert.

Some files hold the weights of all experts of a layer in one tensor:

    experts.gate_up_proj        [E, 2F, H]    gate, then up
    experts.down_proj           [E, H, F]
    transposed, in gpt-oss:
    experts.gate_up_proj        [E, H, 2F]    gate and up alternate
    experts.down_proj           [E, F, H]
    experts.gate_up_proj_bias   [E, 2F]       gate and up alternate
    experts.down_proj_bias      [E, H]

Each expert gets separate tensors, such as `experts.0.gate_proj.weight` for the gate of expert 0.
Its rows are views, and only the requested rows are read. Called by `models.registry`.

Shapes: E experts, F intermediate size, H hidden size.
"""

import re
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.models.checkpoints.source import (
    CheckpointSource,
    WrappedSource,
    check_num_experts,
    refusal_of_two,
)

_STACKED = re.compile(r"^(.*experts)\.(gate_up_proj|down_proj)(_bias)?$")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class _ExpertTensor:
    """The location of an expert's tensor: part `index` of `count` parts of the tensor `name`."""

    name: str
    expert: int
    index: int
    count: int
    is_bias: bool


class UnstackedCheckpoint(WrappedSource):
    """The checkpoint `source` with separate tensors for each expert.

    `is_transposed` says that stacked tensors have gpt-oss's layout. Raises CheckpointError if a
    tensor of an expert exists both separately and in a stacked tensor.
    """

    def __init__(self, source: CheckpointSource, *, is_transposed: bool = False) -> None:
        super().__init__(source)
        self._is_transposed = is_transposed
        #: Maps each tensor to its location. A str is the name of a tensor that is not stacked.
        self._names: dict[str, _ExpertTensor | str] = {}
        for name in source.names:
            found = _STACKED.match(name)
            if found is None or not source.shape(name):
                self._add(name, name)
                continue
            for place in self._tensors_of(name, found):
                part = _PARTS[found[2]][place.index]
                parameter = "bias" if place.is_bias else "weight"
                self._add(f"{found[1]}.{place.expert}.{part}.{parameter}", place)

    def _add(self, name: str, place: "_ExpertTensor | str") -> None:
        other = self._names.setdefault(name, place)
        if other is not place:
            first, second = (
                each if isinstance(each, str) else each.name for each in (other, place)
            )
            raise refusal_of_two(first, second, name)

    @property
    def names(self) -> Set[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._names[name]
        if isinstance(place, str):
            return self._source.shape(place)
        _, *rest = self._source.shape(place.name)
        if len(rest) != (1 if place.is_bias else 2):
            return tuple(rest)  # no linear has this shape, so the loader refuses it by name
        if self._is_transposed:
            rest.reverse()
        if rest[0] % place.count:
            return tuple(rest)
        return (rest[0] // place.count, *rest[1:])

    def stored_name(self, name: str) -> str:
        place = self._names[name]
        return place if isinstance(place, str) else place.name

    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        place = self._names[name]
        if isinstance(place, str):
            return self._source.rows(place, span)
        return self._rows_of_expert(place, span)

    def block_format(self, name: str) -> BlockFormat | None:
        place = self._names[name]
        return self._source.block_format(place) if isinstance(place, str) else None

    def quantized_rows(self, name: str, span: range) -> AbstractContextManager[BlockQuantizedRows]:
        place = self._names[name]
        assert isinstance(place, str), place
        return self._source.quantized_rows(place, span)

    @contextmanager
    def _rows_of_expert(self, place: _ExpertTensor, span: range) -> Iterator[torch.Tensor]:
        with self._source.rows(place.name, range(place.expert, place.expert + 1)) as lent:
            whole = lent[0]
            if self._is_transposed:
                outputs = whole if place.is_bias else whole.T
                part = outputs[place.index :: place.count]
            else:
                size = len(whole) // place.count
                part = whole[place.index * size : (place.index + 1) * size]
            yield part[span.start : span.stop]

    def _tensors_of(self, name: str, found: "re.Match[str]") -> Iterator[_ExpertTensor]:
        num_experts, count = self._source.shape(name)[0], len(_PARTS[found[2]])
        check_num_experts(name, num_experts)
        for expert in range(num_experts):
            for index in range(count):
                yield _ExpertTensor(name, expert, index, count, found[3] is not None)
