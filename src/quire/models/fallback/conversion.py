"""A checkpoint converted to the tensor names and shapes of a class of transformers.

Published checkpoints keep the names of their original code. This module applies transformers'
tables, which say how to rename tensors, stack experts and split fused tensors. Tensors are
converted when they are read, stacked tensors row by row. Called by `models.registry`.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quire.errors import CheckpointError
from quire.models.checkpoints.source import CheckpointSource, WrappedSource
from quire.models.fallback.hf_classes import build, find_class


@dataclass(slots=True)
class _Group:
    """A group of tensors in the files that one converter turns into tensors of the model."""

    #: A WeightConverter of transformers.
    converter: Any
    first_target: str
    #: Maps each pattern of the converter to the names in the files that match it, in order.
    sources: dict[str, list[str]] = field(default_factory=dict)
    #: The shapes of the converted tensors by name.
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: Whether each row of a converted tensor is made of one source tensor of each pattern.
    is_stacked: bool = False


class ConvertedCheckpoint(WrappedSource):
    """The checkpoint `source`, converted for `model`, a transformers model on the meta device."""

    def __init__(self, source: CheckpointSource, model: Any) -> None:
        super().__init__(source)
        self._model = model
        #: Maps the model's name to the name in the files, for tensors that are only renamed.
        self._names: dict[str, str] = {}
        #: Maps the model's name to the group that makes the tensor, for all other tensors.
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        #: The group that was converted last, and the resulting tensors; None before the first.
        self._last: tuple[_Group, dict[str, torch.Tensor]] | None = None
        self._sort_in()
        for target, tied_to in model.get_expanded_tied_weights_keys(all_submodels=True).items():
            if target not in self._names and tied_to in self._names:
                self._names[target] = self._names[tied_to]

    @property
    def names(self) -> Set[str]:
        return self._names.keys() | self._groups.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._groups:
            return self._groups[name].targets[name]
        return self._source.shape(self._names[name])

    def stored_name(self, name: str) -> str:
        if name in self._groups:
            return next(iter(self._groups[name].sources.values()))[0]
        return self._names[name]

    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        if name not in self._groups:
            return self._source.rows(self._names[name], span)
        group = self._groups[name]
        return (
            self._stacked(group, name, span) if group.is_stacked else self._cut(group, name, span)
        )

    @contextmanager
    def _stacked(self, group: _Group, name: str, span: range) -> Iterator[torch.Tensor]:
        with ExitStack() as stack:
            lent = {
                pattern: [self._whole(stack, names[index]) for index in span]
                for pattern, names in group.sources.items()
            }
            yield self._convert(group, lent)[name]

    @contextmanager
    def _cut(self, group: _Group, name: str, span: range) -> Iterator[torch.Tensor]:
        """Yields rows of a converted tensor. The last group is cached, because its tensors are
        usually read one after another."""
        with self._lock:
            if self._last is None or self._last[0] is not group:
                with ExitStack() as stack:
                    lent = {
                        pattern: [self._whole(stack, each).clone() for each in names]
                        for pattern, names in group.sources.items()
                    }
                self._last = group, self._convert(group, lent)
            whole = self._last[1][name]
        yield whole[span.start : span.stop]

    def _whole(self, stack: ExitStack, name: str) -> torch.Tensor:
        whole = range(self._source.shape(name)[0])
        return stack.enter_context(self._source.rows(name, whole))

    def _convert(
        self, group: _Group, tensors: dict[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        converter = deepcopy(group.converter)
        for pattern, lent in tensors.items():
            converter.collected_tensors[pattern] = [partial(_itself, each) for each in lent]
        converted: dict[str, Any] = converter.convert(
            group.first_target, model=self._model, config=self._model.config
        )
        return {
            name: each[0] if isinstance(each, list) else each for name, each in converted.items()
        }

    def _sort_in(self) -> None:
        """Sort all tensors of the source into `_names` and `_groups`."""
        from transformers import core_model_loading as loading  # is not always installed
        from transformers.conversion_mapping import get_model_conversion_mapping

        mapping = get_model_conversion_mapping(self._model)
        renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
        by_pattern = {each: found for found in converters for each in found.source_patterns}
        wanted = self._model.state_dict()
        prefix = self._model.base_model_prefix
        ignored = [re.compile(each) for each in self._model._keys_to_ignore_on_load_unexpected]
        groups: dict[str, _Group] = {}
        for name in sorted(self._source.names, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
            if target not in wanted and name in wanted:
                target, pattern = name, None
            if target not in wanted:
                if not any(each.search(name) or each.search(target) for each in ignored):
                    self._names[target] = name  # the loader refuses it by name
            elif pattern is None:
                self._names[target] = name
            else:
                group = groups.setdefault(target, _Group(by_pattern[pattern], target))
                group.sources.setdefault(pattern, []).append(name)
        for group in groups.values():
            self._find_shapes(group)

    def _find_shapes(self, group: _Group) -> None:
        """Find the shapes of a group's converted tensors by a conversion on the meta device."""
        from transformers import core_model_loading as loading  # is not always installed

        shapes = {
            pattern: [torch.empty(self._source.shape(name), device="meta") for name in names]
            for pattern, names in group.sources.items()
        }
        first, *others = group.converter.operations
        counts = {len(names) for names in group.sources.values()}
        group.is_stacked = (
            isinstance(first, loading.MergeModulelist)
            and first.dim == 0
            and len(counts) == 1
            and all(isinstance(each, loading.Concatenate) and each.dim > 0 for each in others)
        )
        try:
            converted = self._convert(group, shapes)
        except Exception as error:  # an operation of transformers may raise anything
            names = ", ".join(f"{len(each)} like {each[0]}" for each in group.sources.values())
            raise CheckpointError(
                f"{group.first_target} can't be made of the tensors that the weights have, {names}"
                f" ({error}); the download is not whole, or config.json describes another model"
            ) from error
        group.targets = {name: tuple(each.shape) for name, each in converted.items()}
        self._groups |= dict.fromkeys(group.targets, group)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def shape_model(raw: Mapping[str, Any]) -> Any:
    """A model of the transformers class that config.json names, on the meta device."""
    return build(*find_class(raw), dtype=torch.float32, only_meta=True)
