"""Maps an adapter's tensors to the linears of a model.

An adapter names linears as transformers' model does. quire's model may fuse linears, rename them or
reorder their outputs, as `models.registry` describes for checkpoints. To find out how, the indices
of the outputs are passed through the same steps as a checkpoint's weights. The result shows which
rows of B each fused part of a linear takes, and whether the part is transposed.

Shapes: r rank, I inputs and O outputs of a part of a linear.
"""

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.errors import AdapterError, CheckpointError, ConfigurationError
from quire.hub.model_files import shown_name
from quire.layers.experts import Experts
from quire.layers.linear import Linear, SlottedModule
from quire.models.checkpoints.renamed import RenamedCheckpoint
from quire.models.checkpoints.source import CheckpointSource, DerivedSource
from quire.models.config import ModelConfig
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.interface import TextModel
from quire.models.registry import find_entry
from quire.models.wrappers import WRAPPERS, language_model_name

_NUMBER_BITS = 32
"""Bits for the index of an output within its linear; the higher bits hold the linear's index."""
_PARAMETER = ".bias"
"""Output indices are stored like a bias, since a bias has one element per output."""
_IN_LAYER = re.compile(r"(^|\.)layers?\.\d+\.")

PartWeights = tuple[LoRAWeights | None, ...]
"""An adapter's weights for each part of a linear; None for parts without weights."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A fused part of a linear (such as q of q, k and v) to which an adapter's weights are
    added."""

    linear: Linear
    #: The index of the part.
    part: int
    #: Why adapters of the linear are refused; None if they are supported.
    refusal: str | None

    def shape(self, *, transposed: bool) -> tuple[int, int]:
        """The adapter's (O, I) for this part; swapped if the part is transposed."""
        outputs, inputs = self.linear.part_sizes[self.part], self.linear.input_size
        return (inputs, outputs) if transposed else (outputs, inputs)


class AdapterTargets:
    """The linears of one model that support adapters: all linears in its layers, except linears of
    experts."""

    def __init__(self, model: TextModel, config: ModelConfig) -> None:
        """Raises ConfigurationError if a class of transformers computes the model."""
        if isinstance(config, FallbackConfig):
            raise ConfigurationError(
                "enable_lora is set, but a class of transformers computes the model, which serves "
                "no adapters; leave it out, or choose a model that quire has itself"
            )
        self._config = config
        self._entry = find_entry(config)
        self._parts = dict(_targets_of(model, self._entry.checkpoint_parts))
        adapted = {target.linear for target in self._parts.values() if not target.refusal}
        #: The linears by their paths in the model.
        self.linears = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, Linear) and module in adapted
        }

    def uses(self, path: str) -> bool:
        """Whether the path may name a linear of the language model. False for an image encoder.

        True for paths that the model doesn't know. Image encoders are not served.
        """
        wrapper = self._config.wrapper
        return wrapper is None or WRAPPERS[wrapper].rename(path) is not None

    def resolve(self, adapter: LoRAAdapter) -> dict[str, PartWeights]:
        """The adapter's weights by path in `linears`, in the shapes of the linear's parts.

        Raises AdapterError for a linear that the model lacks, or that has another shape.
        """
        self._check_layers(adapter)
        self._check_sizes(adapter)
        paths = list(adapter.weights)
        found: dict[Linear, list[LoRAWeights | None]] = {}
        unknown = set(paths)
        for name, numbers in self._outputs(adapter, paths):
            path = paths[int(numbers.flatten()[0]) >> _NUMBER_BITS]
            weights, target = adapter.weights[path], self._target(adapter, name, path)
            rows = numbers & ((1 << _NUMBER_BITS) - 1)
            part = LoRAWeights(
                weights.a, weights.b.index_select(0, rows.flatten()), weights.scaling
            )
            is_transposed = rows.dim() > 1
            _check_shape(adapter, path, part, target.shape(transposed=is_transposed))
            if is_transposed:
                part = part.transposed
            parts = found.setdefault(target.linear, [None] * len(target.linear.part_sizes))
            parts[target.part] = part
            unknown.discard(path)
        for path in paths:
            if path in unknown:
                raise _no_such(adapter, path)
        return {
            path: tuple(found[linear]) for path, linear in self.linears.items() if linear in found
        }

    def _check_layers(self, adapter: LoRAAdapter) -> None:
        num_layers = self._config.num_layers
        for layer in adapter.layers:
            if layer >= num_layers:
                raise AdapterError(
                    f"adapter {adapter.name}: layers_to_transform names layer {layer}, but the "
                    f"model has layers 0 to {num_layers - 1}; it was trained on another model"
                )

    def _check_sizes(self, adapter: LoRAAdapter) -> None:
        """Refuse an adapter with more outputs than the model, before indices of all outputs are
        allocated."""
        most = sum(
            max(target.linear.input_size, target.linear.part_sizes[target.part])
            for target in self._parts.values()
        )
        num_outputs = sum(len(each.b) for each in adapter.weights.values())
        if len(adapter.weights) > len(self._parts) or num_outputs > most:
            raise AdapterError(
                f"adapter {adapter.name}: its {len(adapter.weights)} linears with {num_outputs} "
                f"outputs are more than the model has: {len(self._parts)}, with {most}; it was "
                "trained on another model"
            )

    def _outputs(
        self, adapter: LoRAAdapter, paths: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each part's name in the model with the indices [O] of the adapter's outputs for it.

        If the part is transposed, there is one output for each of its inputs, in the shape [1, I].
        """
        sizes = {path: len(adapter.weights[path].b) for path in paths}
        try:
            named: CheckpointSource = _OutputNumbers(sizes)
            # The adapter may have been trained in a wrapper of the model.
            if self._config.wrapper is None:
                named = RenamedCheckpoint(named, language_model_name)
            arranged = self._entry.arranged(named, self._config)
            for name in arranged.names:
                with arranged.rows(name, range(arranged.shape(name)[0])) as rows:
                    yield name.removesuffix(_PARAMETER), rows.clone()
        except CheckpointError as error:
            why = str(error).partition(";")[0].replace(_PARAMETER, "")
            raise AdapterError(
                f"adapter {adapter.name}: it does not fit the model: {why}"
            ) from error

    def _target(self, adapter: LoRAAdapter, name: str, path: str) -> _Target:
        target = self._parts.get(name)
        if target is None:
            raise _no_such(adapter, path)
        if target.refusal is not None:
            raise AdapterError(f"adapter {adapter.name}: {shown_name(path)}: {target.refusal}")
        return target


def _targets_of(
    model: TextModel, checkpoint_parts: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, _Target]]:
    """Yield each part of each linear with its name in `models.checkpoints.loader`."""
    inside = ("", "")
    for path, module in model.named_modules():
        refusal = inside[1] if inside[0] and path.startswith(f"{inside[0]}.") else None
        if isinstance(module, Experts | SlottedModule):
            inside = path, "adapters of experts are not served"
        if not isinstance(module, Linear):
            continue
        if refusal is None and not _IN_LAYER.search(path):
            refusal = "adapters of heads, and of what no layer computes, are not served"
        parent, _, leaf = path.rpartition(".")
        is_fused = len(module.part_sizes) > 1
        parts = checkpoint_parts.get(leaf, (leaf,)) if is_fused else (leaf,)
        for index, part in enumerate(parts):
            yield f"{parent}.{part}" if parent else part, _Target(module, index, refusal)


def _check_shape(
    adapter: LoRAAdapter, path: str, part: LoRAWeights, shape: tuple[int, int]
) -> None:
    outputs, inputs = shape
    if part.a.shape[1] != inputs or len(part.b) != outputs:
        raise AdapterError(
            f"adapter {adapter.name}: {shown_name(path)}: A is {list(part.a.shape)} and B has "
            f"{len(part.b)} outputs, but the model's linear has {inputs} inputs and {outputs} "
            "outputs; it was trained on another model"
        )


def _no_such(adapter: LoRAAdapter, path: str) -> AdapterError:
    return AdapterError(
        f"adapter {adapter.name}: the model has no linear {shown_name(path)} that an adapter could "
        "be added to; embeddings, heads and what is no linear are not served"
    )


class _OutputNumbers(DerivedSource):
    """A checkpoint that has, instead of a linear's weights, the indices [O] int64 of its outputs.

    They are stored as the bias.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes` maps each linear's path to its number of outputs O."""
        self._numbers = {
            f"{path}{_PARAMETER}": torch.arange(size) + (index << _NUMBER_BITS)
            for index, (path, size) in enumerate(sizes.items())
        }

    @property
    def names(self) -> Set[str]:
        return self._numbers.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._numbers[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return torch.int64

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        yield self._numbers[name][span.start : span.stop]

    def equal(self, first: str, second: str) -> bool:
        return False  # so that two tensors for one linear are always refused
